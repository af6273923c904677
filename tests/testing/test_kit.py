"""The kit: its stores have the answers they promise, its checks catch what they are for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import xarray as xr
from pydantic import Field

import attnlens
from attnlens.testing import CHECKS, CheckFailed, check_analysis, make_store, maker


class Good(attnlens.Analysis):
    """Mean entropy of each head."""

    name = "good"
    requires = ("pattern.entropy", "twin")
    permutes_heads = True

    class Options(attnlens.Options):
        power: float = Field(1.0, description="Raise it to this.")
        names: tuple[str, ...] = ("a", "b")

    def compute(self, store: Any) -> xr.Dataset:
        value = store["pattern.entropy"].mean("prompt") ** self.options.power
        twins = [t["pattern.entropy"].mean("prompt") for t in store.twins]
        if not twins:
            raise attnlens.Skip("there are no twins")
        bounds = attnlens.nulls.twin_range(twins, floor=0.05)
        return xr.Dataset({"entropy": value, "low": bounds["low"]})

    @attnlens.figure("Entropy")
    def grid(self, result: xr.Dataset, figure: Any) -> None:
        attnlens.figures.head_grid(figure, result["entropy"])

    def findings(self, result: xr.Dataset):
        low = bool((result["entropy"] < result["low"]).any())
        yield attnlens.Finding(claim="focused", holds=low, text="Some head is focused.")


def test_the_good_one_passes() -> None:
    # This module imports torch through the stores, as a plugin's module would not.
    check_analysis(Good)


@pytest.mark.attnlens(analysis=Good)
def test_the_fixture_runs_each_check(attnlens_check) -> None:
    attnlens_check()


class Shifty(Good):
    name = "shifty"

    def findings(self, result: xr.Dataset):
        yield attnlens.Finding(claim="always", holds=True, text="Always.")


@pytest.mark.attnlens(
    analysis=Shifty,
    expected_failures={"claims-nothing-of-a-random-model": "it claims by design"},
)
def test_expected_failures_are_declared(attnlens_check) -> None:
    attnlens_check()


class StoresState(Good):
    name = "bad"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cache: dict[str, int] = {}


class Forgetful(Good):
    name = "bad"
    names_seen: tuple[str, ...] = ()

    class Options(attnlens.Options):
        shape: dict[str, int] = Field({"a": 1})

        @classmethod
        def read(cls, values, *, prefix=""):
            return cls()


class Undeclared(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        return xr.Dataset({"z": store["z"].mean("pos")})


class Random(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        return super().compute(store) + np.random.random()


class Crashes(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        if store.tokens.sizes["pos"] == 1:
            raise IndexError("list index out of range")
        return super().compute(store)


class Nameless(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        return xr.Dataset({"x": (("dim_0",), np.ones(3))})


class NotFinite(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        return super().compute(store) * np.nan


class Undrawable(Good):
    name = "bad"

    @attnlens.figure("None")
    def impossible(self, result: xr.Dataset, figure: Any) -> None:
        raise ValueError("no ink")


class Settings(Good):
    name = "bad"

    @attnlens.figure("Loud")
    def loud(self, result: xr.Dataset, figure: Any) -> None:
        import matplotlib.pyplot as plt

        plt.figure()


class Unpermuted(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        result = super().compute(store)
        return result.assign(entropy=result["entropy"] * (1 + result["entropy"]["head"]))


@pytest.mark.parametrize(
    ("bad", "check"),
    [
        (StoresState, "construction"),
        (Undeclared, "declares-what-it-reads"),
        (Random, "deterministic"),
        (Crashes, "small-and-odd-inputs"),
        (Nameless, "named-and-finite"),
        (NotFinite, "named-and-finite"),
        (Undrawable, "saves-loads-draws"),
        (Settings, "leaves-matplotlib-alone"),
        (Unpermuted, "permuting-heads-permutes-the-result"),
        (Shifty, "claims-nothing-of-a-random-model"),
    ],
)
def test_each_check_catches_what_it_is_for(bad: type, check: str) -> None:
    try:
        with pytest.raises(Exception):  # noqa: B017 - each has its own
            CHECKS[check](maker(bad))
    finally:
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")


def test_a_failure_names_the_check() -> None:
    with pytest.raises(CheckFailed, match=r"claims-nothing-of-a-random-model: .*always"):
        check_analysis(Shifty)


def test_a_declared_failure_that_holds_is_reported() -> None:
    with pytest.raises(CheckFailed, match="pickles: expected to fail"):
        check_analysis(Good, expected_failures={"pickles": "because"})


def test_importing_the_kit_leaves_torch_unloaded() -> None:
    script = (
        "import sys, attnlens.testing, attnlens.pytest_plugin; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_uniform_attention_has_the_closed_form_entropy() -> None:
    store = make_store("uniform", length=9)
    expected = np.log(np.arange(1, 10)).mean()
    np.testing.assert_allclose(store["pattern.entropy"].values, expected, rtol=1e-6)


def test_identity_and_previous_token_have_no_entropy() -> None:
    for kind in ("identity", "previous-token"):
        assert float(make_store(kind)["pattern.entropy"].max()) == 0


def test_the_previous_token_head_scores_one() -> None:
    attention = make_store("previous-token").attention(0)
    np.testing.assert_allclose(attention.previous_token().numpy(), 1.0)


def test_the_induction_head_scores_one_on_repeated_tokens() -> None:
    store = make_store("induction", length=12)
    scores = store.attention(0).induction(store.tokens.values)
    # The random vocabulary is larger than the period, but a token may still come twice in it.
    assert float(scores.mean()) > 0.8


def test_planted_heads_are_multiples_of_each_other() -> None:
    result = make_store("planted-cp", n_heads=6)["result"].isel(layer=0)
    flat = result.transpose("head", ...).values.reshape(6, -1)
    assert np.linalg.matrix_rank(flat, tol=1e-4 * np.linalg.norm(flat)) == 3


def test_grouped_query_and_ragged_stores() -> None:
    store = make_store(n_heads=4, n_kv_heads=2, lengths=[3, 12, 7, 5])
    assert store["k"].sizes["kv_head"] == 2
    assert list(store.lengths.values) == [3, 12, 7, 5]
    assert np.isfinite(store["pattern.entropy"]).all()


def test_same_seed_same_store_and_other_seed_another() -> None:
    a, b, c = make_store(seed=1), make_store(seed=1), make_store(seed=2)
    xr.testing.assert_identical(a["pattern"], b["pattern"])
    assert not np.allclose(a["pattern"], c["pattern"])
    assert not np.allclose(a.twins[0]["pattern"], a["pattern"])
