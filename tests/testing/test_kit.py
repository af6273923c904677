"""The kit: its stores have the answers they promise, its checks catch what they are for."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import matplotlib
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
        names: tuple[str, ...] = Field(("a", "b"), description="Of nobody.")

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
        attnlens.figures.head_grid(figure, result["entropy"])


class Unpermuted(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        result = super().compute(store)
        return result.assign(entropy=result["entropy"] * (1 + result["entropy"]["head"]))


class ReadsOddly(Good):
    """Reads something undeclared of prompts of one token alone."""

    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        if store.tokens.sizes["pos"] == 1:
            store["pattern.max"]
        return super().compute(store)


class Swallows(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        with contextlib.suppress(Exception):
            store.twins[0]["z"]
        return super().compute(store)


class SwallowsOddly(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        if store.tokens.sizes["pos"] == 2:
            with contextlib.suppress(Exception):
                store["z"]
        return super().compute(store)


class PicksOneHead(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        result = super().compute(store)
        return result.assign(first=result["entropy"].isel(head=0, drop=True))


class NamesOneHead(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        result = super().compute(store)
        words = [f"{value:.6f}" for value in result["entropy"].isel(head=0).values]
        return result.assign_coords(word=("layer", words))


class WritesWhenMade(Good):
    name = "bad"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        (Path(tempfile.gettempdir()) / f"attnlens-kit-{os.getpid()}").touch()


class SetsVariablesWhenMade(Good):
    name = "bad"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        os.environ["ATTNLENS_KIT"] = "1"


class CountsItself(Good):
    name = "bad"
    made: ClassVar[list[int]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made.append(1)


class Remembers(Good):
    name = "bad"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).latest = self.options


def changing(change: Callable[[], object]) -> type[attnlens.Analysis]:
    class Changes(Good):
        name = "bad"

        def compute(self, store: Any) -> xr.Dataset:
            change()
            return super().compute(store)

    return Changes


def _settle_matplotlib() -> None:
    matplotlib.rcParams["figure.dpi"] = 33.0


def _draw_in_double() -> None:
    import torch

    torch.set_default_dtype(torch.float64)


def _sow_torch() -> None:
    import torch

    torch.manual_seed(5)


CHANGES = {
    "matplotlib's settings figure.dpi": _settle_matplotlib,
    "torch's default dtype": _draw_in_double,
    "torch's global random state": _sow_torch,
    "numpy's global random state": lambda: np.random.seed(5),
    "Python's global random state": lambda: random.seed(5),
    "wrote .*notes.txt": lambda: Path("notes.txt").write_text("x"),
    "printed 'so far so good'": lambda: print("so far so good"),
    "environment variables ATTNLENS_KIT": lambda: os.environ.update(ATTNLENS_KIT="1"),
    "working directory": lambda: os.chdir("/"),
}


@pytest.mark.parametrize("told", CHANGES)
def test_what_others_share_is_left_alone_and_put_back(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = changing(CHANGES[told])
    for _ in range(2):  # what one check found does not hide it from the next
        with pytest.raises(CheckFailed, match=told):
            CHECKS["leaves-the-process-alone"](maker(bad))
    assert Path.cwd() == tmp_path
    assert "ATTNLENS_KIT" not in os.environ
    assert matplotlib.rcParams["figure.dpi"] != 33.0


class Blank(Good):
    name = "bad"

    @attnlens.figure("Nothing")
    def nothing(self, result: xr.Dataset, figure: Any) -> None:
        figure.subplots()


class Undescribed(Good):
    name = "bad"

    class Options(attnlens.Options):
        power: float = 1.0


class Unsendable(Good):
    name = "bad"

    def compute(self, store: Any) -> xr.Dataset:
        self.last = lambda: store
        return super().compute(store)


class Unwritable(Good):
    name = "bad"

    def findings(self, result: xr.Dataset):
        yield attnlens.Finding(claim="x", holds=False, text="X.", evidence={"a": b"x"})


class BadName(Good):
    name = "Bad Name!"


@pytest.mark.parametrize(
    ("bad", "check"),
    [
        (StoresState, "construction"),
        (WritesWhenMade, "construction"),
        (SetsVariablesWhenMade, "construction"),
        (CountsItself, "construction"),
        (Remembers, "construction"),
        (BadName, "construction"),
        (Undescribed, "options-are-described"),
        (Undeclared, "declares-what-it-reads"),
        (Swallows, "declares-what-it-reads"),
        (ReadsOddly, "small-and-odd-inputs"),
        (SwallowsOddly, "small-and-odd-inputs"),
        (Random, "deterministic"),
        (Crashes, "small-and-odd-inputs"),
        (Nameless, "named-and-finite"),
        (NotFinite, "named-and-finite"),
        (Undrawable, "saves-loads-draws"),
        (Blank, "saves-loads-draws"),
        (Unsendable, "pickles"),
        (Settings, "leaves-the-process-alone"),
        (Unpermuted, "permuting-heads-permutes-the-result"),
        (PicksOneHead, "permuting-heads-permutes-the-result"),
        (NamesOneHead, "permuting-heads-permutes-the-result"),
        (Shifty, "claims-nothing-of-a-random-model"),
        (Unwritable, "claims-nothing-of-a-random-model"),
    ],
)
def test_each_check_catches_what_it_is_for(bad: type, check: str) -> None:
    with pytest.raises((CheckFailed, attnlens.errors.AttnlensError, AttributeError)):
        CHECKS[check](maker(bad))


def test_what_was_left_open_is_closed_for_the_next_check() -> None:
    with pytest.raises(CheckFailed, match="figures that pyplot holds"):
        CHECKS["leaves-the-process-alone"](maker(Settings))
    assert not sys.modules["matplotlib.pyplot"].get_fignums()


class Misspelt(Good):
    name = "bad"
    requires = ("pattern.entropi", "twin")


class ForgottenComma(Good):
    name = "bad"
    requires = "pattern.max"  # type: ignore[assignment]


class Returns(Good):
    name = "bad"

    def findings(self, result: xr.Dataset):
        return attnlens.Finding(claim="x", holds=False, text="X.")


class Tabulates(Good):
    name = "bad"

    @attnlens.table("Numbers")
    def numbers(self, result: xr.Dataset):
        return {"a": 1}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Undeclared, "read 'z'"),
        (Misspelt, "'pattern.entropi'"),
        (ForgottenComma, "not a tuple of strings"),
        (BadName, "'Bad Name!'"),
    ],
)
def test_what_all_checks_would_meet_is_said_once(bad: type, said: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        check_analysis(bad)
    assert str(caught.value).count(said) == 1


@pytest.mark.parametrize(
    ("bad", "check", "said"),
    [
        (Returns, "claims-nothing-of-a-random-model", "Yield each attnlens.Finding"),
        (Tabulates, "saves-loads-draws", "dict was returned instead of a pandas.DataFrame"),
    ],
)
def test_what_a_method_returned_is_named(bad: type, check: str, said: str) -> None:
    with pytest.raises((CheckFailed, attnlens.errors.ResultError), match=said):
        CHECKS[check](maker(bad))


def test_an_unknown_check_cannot_be_expected_to_fail() -> None:
    with pytest.raises(CheckFailed, match="Did you mean 'imports-no-torch'"):
        check_analysis(Good, expected_failures={"imports_no_torch": "why not"})


MARKED = """
import attnlens, pytest

class Plain(attnlens.Analysis):
    name = "plain"
    requires = ("pattern.max",)

    def compute(self, store):
        return store["z"].to_dataset(name="a")

@pytest.mark.attnlens(@MARK@)
def test_marked(attnlens_check):
    attnlens_check()
"""


def test_a_marker_fails_its_own_module_and_the_fixture_says_things_once(tmp_path: Path) -> None:
    marks = {
        "analysis=Plain, expected_failures={'imports_no_torch': 'x'}": "mean 'imports-no-torch'",
        "": "analysis=None is no class or instance of attnlens.Analysis",
        "'plain'": "not 'plain'",
        "analysis=Plain, expected_failure={}": "not expected_failure",
        "analysis=int": "analysis=<class 'int'> is no class",
    }
    for number, mark in enumerate(["analysis=Plain", *marks]):
        (tmp_path / f"test_{number}.py").write_text(MARKED.replace("@MARK@", mark))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", f"--rootdir={tmp_path}",
         "--continue-on-collection-errors", str(tmp_path)],
        capture_output=True,
        text=True,
    )  # fmt: skip
    for said in marks.values():
        assert said in done.stdout
    assert "declares-what-it-reads does not hold, and this builds on it" in done.stdout
    assert f"1 failed, 1 passed, {len(CHECKS) - 2} skipped, {len(marks)} errors" in done.stdout
    assert "KeyError" not in done.stdout


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
