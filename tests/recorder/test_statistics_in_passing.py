"""Statistics while the activations stream past: nothing raw is kept, no batch shows through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray as xr

from attnlens.errors import NeedError
from attnlens.models import load_model
from attnlens.needs import BUILTIN_STATISTICS
from attnlens.recorder import capture
from attnlens.statistics import Statistic
from tests.modelzoo import tiny

ALL = sorted(BUILTIN_STATISTICS)
LENGTHS = (9, 4, 9, 9, 4, 1, 9, 9)


def ragged() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, 50, size=n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_no_batch_size_shows_through(
    family: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    # In float64, so that the model itself gives the same numbers in every batch.
    model = load_model(folder(family), dtype=torch.float64)
    stores = [
        capture(
            model,
            ragged(),
            activations=[],
            statistics=ALL,
            batch_size=size,
            out=tmp_path / f"{size}.attn",
        )
        for size in (1, 3)
    ]
    for name in ALL:
        reference = stores[0][name]
        for store in stores[1:]:
            np.testing.assert_allclose(store[name].values, reference.values, rtol=1e-12)


def test_statistics_are_those_of_the_raw_activations(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    raw = ["q", "k", "v", "z", "pattern"]
    store = capture(
        folder("llama"),
        ragged(),
        activations=raw,
        statistics=ALL,
        dtypes=dict.fromkeys(raw, "float32"),
        batch_size=2,
        out=tmp_path / "s.attn",
    )
    pattern, k = store["pattern"].values, store["k"].values
    for number, length in enumerate(LENGTHS):
        p = pattern[number, :, :, :length, :length].astype(float)
        rows = -np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0.0).sum(-1)
        np.testing.assert_allclose(
            store["pattern.entropy"].values[number], rows.mean(-1), rtol=1e-5, atol=1e-9
        )
        np.testing.assert_allclose(
            store["pattern.max"].values[number], p.max(-1).mean(-1), rtol=1e-6
        )
    real = np.concatenate([np.moveaxis(k[i, :, :n], 1, 0) for i, n in enumerate(LENGTHS)]).astype(
        float
    )
    assert store["k.second_moment"].dims[:2] == ("layer", "kv_head")
    np.testing.assert_allclose(
        store["k.second_moment"].values,
        np.einsum("tlhd,tlhe->lhde", real, real) / len(real),
        rtol=1e-5,
        atol=1e-8,
    )


def test_only_statistics_leave_nothing_raw_behind(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    store = capture(folder("gpt2"), tokens, activations=[], statistics=ALL, out=tmp_path / "s.attn")
    assert store.manifest.activations == {}
    names = {p.name for p in (tmp_path / "s.attn" / "units" / "000000").iterdir()}
    assert names == {"zarr.json", "tokens", "prompt_id", "prompt", "pos", "statistics"}


def test_chosen_heads_and_layers_are_labelled(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "activations": [],
        "statistics": ["pattern.entropy", "z.mean"],
        "batch_size": 2,
    }
    whole = capture(folder("llama"), tokens, out=tmp_path / "whole.attn", **options)
    part = capture(
        folder("llama"), tokens, out=tmp_path / "part.attn", layers=[1], heads=[1, 3], **options
    )
    for name in ("pattern.entropy", "z.mean"):
        xr.testing.assert_allclose(part[name], whole[name].sel(layer=[1], head=[1, 3]))


class Diagonal(Statistic):
    """Mean weight of a token on itself."""

    name = "diagonal"
    of = "pattern"
    dims: ClassVar[tuple[str, ...]] = ("layer", "head")

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.sums = np.zeros((len(self.layers), self.n_heads))
        self.count = 0

    def update(self, layer: int, value: Any, prompts: slice) -> None:
        dense = value.to_dense()
        diagonal = dense.diagonal(dim1=-2, dim2=-1).double().sum((0, -1))
        self.sums[self.layers.index(layer)] += diagonal.numpy()

    def state(self) -> dict[str, Any]:
        return {"sums": self.sums, "count": np.array([float(self.n_prompts * self.length)])}

    @classmethod
    def merge(cls, states: Any) -> dict[str, Any]:
        return {key: np.sum([s[key] for s in states], axis=0) for key in ("sums", "count")}

    @classmethod
    def finalize(cls, state: Any) -> xr.DataArray:
        return xr.DataArray(state["sums"] / state["count"], dims=cls.dims, name=cls.name)


def test_a_statistic_of_ones_own(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    store = capture(folder("gpt2"), tokens, statistics=[Diagonal], out=tmp_path / "s.attn")
    diagonal = store["pattern"].values[..., range(9), range(9)]
    np.testing.assert_allclose(store["diagonal"].values, diagonal.mean((0, -1)), atol=1e-3)


def test_an_unknown_statistic_names_the_nearest(folder: Callable[..., Path]) -> None:
    with pytest.raises(NeedError, match=r"Did you mean 'pattern\.entropy'"):
        capture(folder("gpt2"), [[1]], statistics=["pattern.entropie"])


def test_a_sliding_window_counts_only_the_keys_that_it_shows(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    store = capture(
        folder("mistral"),
        tokens,
        statistics=["pattern.received", "pattern.by_offset"],
        dtypes={"pattern": "float32"},
        out=tmp_path / "s.attn",
    )
    pattern = store["pattern"].values.astype(float)
    # The window is 2: a key is seen by its own query and the next; the last only by its own.
    viewers = np.array([2.0] * 8 + [1.0])
    np.testing.assert_allclose(
        store["pattern.received"].values, pattern.sum(3).mean(0) / viewers, rtol=1e-6
    )
    by_offset = store["pattern.by_offset"]
    assert np.isnan(by_offset.sel(offset=slice(2, None))).all()
    np.testing.assert_allclose(
        by_offset.sel(offset=1).values,
        pattern[..., range(1, 9), range(8)].mean((0, -1)),
        rtol=1e-6,
    )


@pytest.mark.parametrize(("heads", "groups"), [([2, 3], [1]), ([0, 2], [0, 1]), ([1], [0])])
def test_grouped_heads_keep_their_numbers(tmp_path, heads, groups):
    folder = tiny("llama", tmp_path / "model")
    tokens = np.zeros((2, 5), dtype=int)
    store = capture(folder, tokens, activations=["k"], statistics=["k.mean", "q.mean"], heads=heads)
    assert list(store["k.mean"]["kv_head"].values) == groups
    assert list(store["k"]["kv_head"].values) == groups
    assert list(store["q.mean"]["head"].values) == heads
