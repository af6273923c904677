"""A faulty analysis loses its own results alone, or is refused with what is wrong with it."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import attnlens
from attnlens.errors import (
    AttnlensError,
    BrokenPluginError,
    NeedError,
    ResultError,
)
from attnlens.testing import make_store


class Sound(attnlens.Analysis):
    """Mean entropy."""

    name = "sound"
    requires = ("pattern.entropy",)

    def compute(self, store: Any) -> xr.Dataset:
        return xr.Dataset({"entropy": store["pattern.entropy"].mean("prompt")})

    def findings(self, result: xr.Dataset):
        yield attnlens.Finding(
            claim="fine", holds=True, text="Fine.", evidence={"mean": result["entropy"].mean()}
        )


class Faulty(Sound):
    name = "faulty"


def analyzed(faulty: type[attnlens.Analysis], out: Path) -> attnlens.Run:
    """Run a faulty analysis beside a sound one, and see that the sound one lost nothing."""
    run = attnlens.analyze(make_store(twins=0), [faulty, Sound], out=out / "run")
    assert "sound" in run
    assert "sound" not in run.errors
    assert [f.text for f in run.findings if f.analysis == "sound"] == ["Fine."]
    assert run.report.stat().st_size > 0
    return attnlens.open_run(run.path)


@pytest.mark.parametrize(
    "value", [b"x", 1j, Path("x"), datetime(2026, 1, 1), object(), {"a": [b""]}]
)
def test_evidence_that_cannot_be_written_fails_its_analysis_alone(
    tmp_path: Path, value: object
) -> None:
    class Unwritable(Faulty):
        def findings(self, result: xr.Dataset):
            yield attnlens.Finding(claim="x", holds=True, text="X.", evidence={"high": value})

    errors = analyzed(Unwritable, tmp_path).errors
    assert "evidence['high']" in errors["faulty"]
    assert "run.json" in errors["faulty"]


def test_evidence_that_is_changed_afterwards_is_looked_at_again(tmp_path: Path) -> None:
    class Sly(Faulty):
        def findings(self, result: xr.Dataset):
            finding = attnlens.Finding(claim="x", holds=True, text="X.", evidence={})
            finding.evidence["high"] = b"x"
            yield finding

    assert "evidence['high']" in analyzed(Sly, tmp_path).errors["faulty"]


def test_text_that_is_not_unicode_is_kept_as_its_escape(tmp_path: Path) -> None:
    class Foreign(Faulty):
        def findings(self, result: xr.Dataset):
            yield attnlens.Finding(claim="x", holds=True, text="X.", evidence={"file": "\udcff"})

        @attnlens.figure("None")
        def none(self, result: xr.Dataset, figure: Any) -> None:
            raise ValueError("file \udcff")

    run = analyzed(Foreign, tmp_path)
    assert "\udcff" in run.errors["faulty"]
    assert any(f.evidence == {"file": "\udcff"} for f in run.findings)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (attnlens.Finding(claim="x", holds=True, text="X."), "Yield each attnlens.Finding"),
        (None, "None was returned"),
        ([("claim", "x")], "is no Finding"),
    ],
)
def test_findings_that_are_none_are_named(tmp_path: Path, returned: object, said: str) -> None:
    class Returns(Faulty):
        def findings(self, result: xr.Dataset):
            return returned

    run = attnlens.analyze(make_store(twins=0), [Returns], out=tmp_path / "run")
    entry = run.record["analyses"][0]["error"]
    assert said in entry["message"] + entry["hint"]


def test_leaving_the_interpreter_costs_the_analysis_alone(tmp_path: Path) -> None:
    class Leaves(Faulty):
        def compute(self, store: Any) -> xr.Dataset:
            sys.exit("enough")

    assert analyzed(Leaves, tmp_path).errors == {"faulty": "enough"}


def test_options_and_titles_that_cannot_be_written_cost_the_analysis_alone(tmp_path: Path) -> None:
    class Odd(Faulty):
        """ """

        class Options(attnlens.Options):
            model_config = {"arbitrary_types_allowed": True}
            anything: Any = object()

    assert list(analyzed(Odd, tmp_path).errors) == ["faulty"]


@pytest.mark.parametrize("returned", [{"a": 1}, None])
def test_a_table_that_is_none_is_named(tmp_path: Path, returned: object) -> None:
    class Table(Faulty):
        @attnlens.table("Numbers")
        def numbers(self, result: xr.Dataset):
            return returned

    said = f"{type(returned).__name__} was returned instead of a pandas.DataFrame"
    assert said in analyzed(Table, tmp_path).errors["faulty"]


def test_highlights_that_are_none_are_named(tmp_path: Path) -> None:
    class Lit(Faulty):
        @attnlens.highlight("Tokens")
        def tokens(self, result: xr.Dataset):
            return attnlens.Highlight(label="a", tokens=["b"], weights=[1.0])

    assert "Yield each attnlens.Highlight" in analyzed(Lit, tmp_path).errors["faulty"]


def test_a_figure_on_which_nothing_was_drawn_is_an_error(tmp_path: Path) -> None:
    class Blank(Faulty):
        @attnlens.figure("Nothing")
        def nothing(self, result: xr.Dataset, figure: Any) -> None:
            figure.subplots(1, 2)

    assert "drew nothing" in analyzed(Blank, tmp_path).errors["faulty"]


@pytest.mark.parametrize("draw", ["text", "image", "table", "legend"])
def test_a_figure_of_words_pictures_or_tables_alone_is_drawn(draw: str) -> None:
    class Drawn(Faulty):
        @attnlens.figure("Something")
        def something(self, result: xr.Dataset, figure: Any) -> None:
            if draw == "text":
                figure.subfigures(1, 2)[1].text(0.5, 0.5, "words")
            elif draw == "image":
                figure.subplots().imshow(np.eye(2))
            elif draw == "table":
                figure.subplots().table([["1"]])
            else:
                figure.legend(*([figure.subplots().plot([1, 2])[0]], ["line"]))

    Drawn().draw("something", xr.Dataset({"a": 1}))


BAD_NAMES = [
    "../../evil", "store.attn", "report.html", "run.json", "<b>", "a b", "A", "1st", "a_b", "", "-",
    "n" * 300, "a/b", 3, None,
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_NAMES)
def test_a_name_that_is_no_folder_of_its_own_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    class Named(Sound):
        name = bad

    for given in (Named, Named()):
        with pytest.raises(BrokenPluginError, match="name") as caught:
            attnlens.analyze(make_store(twins=0), [given], out=tmp_path / "run")
        assert "head-distance" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_class_that_lacks_something_is_refused_with_what_to_write(tmp_path: Path) -> None:
    class Nameless(attnlens.Analysis):
        def compute(self, store: Any) -> xr.Dataset: ...

    class Idle(attnlens.Analysis):
        name = "idle"

    class Comma(Sound):
        requires = "pattern.entropy"  # type: ignore[assignment]

    class Late(Sound):
        @property
        def requires(self) -> Any:
            return ["pattern"]

    class Foreign(Sound):
        Options = dict  # type: ignore[assignment]

    class Bursts(Sound):
        def __init__(self, **options: Any) -> None:
            raise RuntimeError("no luck")

    for bad, kind, said in [
        (Nameless, BrokenPluginError, "Nameless cannot be used: it has no name"),
        (Idle, BrokenPluginError, "no compute method"),
        (Comma, NeedError, r"with the comma"),
        (Late, NeedError, "not a tuple of strings"),
        (Foreign, BrokenPluginError, "attnlens.Options"),
        (Bursts, BrokenPluginError, "'sound' cannot be made: RuntimeError: no luck"),
        (dict, BrokenPluginError, "Derive a class from attnlens.Analysis"),
        (7, BrokenPluginError, "7 is no analysis"),
    ]:
        with pytest.raises(kind, match=said):
            attnlens.analyze(make_store(twins=0), [bad], out=tmp_path / "run")  # type: ignore[list-item]


def test_an_estimate_of_memory_that_fails_is_noted(tmp_path: Path) -> None:
    class Guess(Sound):
        def memory(self, facts: Any, tokens: int) -> int:
            raise ZeroDivisionError("division by zero")

    run = attnlens.run("demo", [Guess], samples=1, length=4, out=tmp_path / "run")
    assert not run.errors
    assert any("sound cannot tell its memory: ZeroDivisionError" in n for n in run.record["notes"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"claim": "Bad Claim"}, "claim='Bad Claim' is not valid: write text of the form"),
        ({"holds": "perhaps"}, "write true or false"),
        ({"text": ""}, "text of length 1 or more"),
        ({"title": "x"}, "there is no title"),
        ({"evidence": 3}, "a table"),
        ({"null": {"a": b""}}, r"null\['a'\] holds b''"),
    ],
)
def test_a_finding_that_is_none_is_refused_with_an_error_of_attnlens(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ResultError, match=said) as caught:
        attnlens.Finding(**{"claim": "x", "holds": True, "text": "X."} | values)
    assert "pydantic" not in str(caught.value)
    with pytest.raises(ResultError, match="text is missing"):
        attnlens.Finding(claim="x", holds=True)  # type: ignore[call-arg]


def test_a_highlight_that_does_not_fit_is_refused_with_an_error_of_attnlens() -> None:
    with pytest.raises(ResultError, match="2 tokens for 1 weights"):
        attnlens.Highlight(label="x", tokens=["a", "b"], weights=[1.0])


@pytest.mark.parametrize("title", ["", None, print])
def test_a_figure_without_its_title_is_refused(title: Any) -> None:
    with pytest.raises(AttnlensError, match=r'Write @attnlens.figure\("What it shows"\)'):
        attnlens.figure(title)


def test_a_table_of_a_finished_run_is_a_frame(tmp_path: Path) -> None:
    class Table(Sound):
        @attnlens.table("Entropies")
        def entropies(self, result: xr.Dataset) -> pd.DataFrame:
            return result["entropy"].to_dataframe()

    run = attnlens.analyze(make_store(twins=0), [Table], out=tmp_path / "run")
    assert isinstance(run.tables["sound.entropies"], pd.DataFrame)
