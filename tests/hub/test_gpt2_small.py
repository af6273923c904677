"""What is known of the real gpt2-small comes first. Needs the hub: ``pytest -m hub``."""

from __future__ import annotations

import pytest
import xarray as xr

import attnlens

pytestmark = pytest.mark.hub

#: Heads that the literature names, among the first of their kind.
INDUCTION = ("5.5", "6.9", "7.10", "5.1", "7.2")
PREVIOUS_TOKEN = ("4.11", "2.2")
DUPLICATE_TOKEN = ("0.1", "0.10", "3.0")


@pytest.fixture(scope="module")
def scores() -> xr.Dataset:
    store = attnlens.capture(
        "gpt2-small",
        "repeated-random",
        activations=[],
        statistics=["pattern.by_offset"],
        samples=16,
        length=101,
    )
    period = store.manifest.prompts.period
    offsets = store["pattern.by_offset"]
    at = {"previous_token": 1, "duplicate_token": period, "induction": period - 1}
    return xr.Dataset({name: offsets.sel(offset=o, drop=True) for name, o in at.items()})


def first(scores: xr.DataArray, count: int) -> list[str]:
    flat = scores.transpose("layer", "head").stack(all=("layer", "head"))
    ranked = flat.sortby(flat, ascending=False)["all"].values[:count]
    return [f"{layer}.{head}" for layer, head in ranked]


@pytest.mark.parametrize(
    ("kind", "known", "among"),
    [
        ("induction", INDUCTION, 8),
        ("previous_token", PREVIOUS_TOKEN, 4),
        ("duplicate_token", DUPLICATE_TOKEN, 6),
    ],
)
def test_the_known_heads_come_first(
    scores: xr.Dataset, kind: str, known: tuple[str, ...], among: int
) -> None:
    assert set(known) <= set(first(scores[kind], among))
