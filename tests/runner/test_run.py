"""A run, whole: the printed plugin on a small model, and what happens when something fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import attnlens
from attnlens.errors import NeedError, OutputError, UsageError
from tests.modelzoo import tiny


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50, (4, 12))


class Entropy(attnlens.Analysis):
    """Mean entropy of each head."""

    name = "entropy"
    requires = ("pattern.entropy",)

    def compute(self, store) -> xr.Dataset:
        return xr.Dataset({"entropy": store["pattern.entropy"].mean("prompt")})

    @attnlens.figure("Entropy")
    def grid(self, result, figure):
        attnlens.figures.head_grid(figure, result["entropy"], label="nats")


class Fails(attnlens.Analysis):
    """Raises."""

    name = "fails"
    requires = ("pattern.entropy",)

    def compute(self, store) -> xr.Dataset:
        raise ZeroDivisionError("nothing to divide by")


class Follower(attnlens.Analysis):
    """Reads the result of another analysis."""

    name = "follower"
    requires = ("analysis:entropy",)

    def compute(self, store) -> xr.Dataset:
        return store.results["entropy"] * 2


class Sneaky(attnlens.Analysis):
    """Reads what it did not declare."""

    name = "sneaky"
    requires = ("pattern.entropy",)

    def compute(self, store) -> xr.Dataset:
        return xr.Dataset({"z": store["z"]})


class BadFigure(Entropy):
    """Its figure fails; its numbers do not."""

    name = "badfigure"

    @attnlens.figure("Cannot be drawn")
    def impossible(self, result, figure):
        raise ValueError("no ink")


def test_the_printed_plugin_runs_from_model_to_report(install, gpt2, tokens, tmp_path) -> None:
    install("lookback")
    run = attnlens.run(
        gpt2, ["lookback"], corpus=tokens, out=tmp_path / "run", twins=0, command=["attnlens", "x"]
    )
    # The mean distance, computed here from Hugging Face's own patterns.
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(gpt2, attn_implementation="eager").eval()
    with torch.no_grad():
        patterns = model(torch.tensor(tokens), output_attentions=True).attentions
    n = tokens.shape[1]
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    for layer, pattern in enumerate(patterns):
        p = pattern.double().numpy()
        expected = np.zeros(p.shape[1])
        for offset in range(n):
            on = distance == offset
            expected += offset * p[:, :, on].mean(axis=(0, 2))
        got = run["lookback"]["distance"].sel(layer=layer).values
        np.testing.assert_allclose(got, expected / n, rtol=1e-5)

    assert not run.errors
    assert (tmp_path / "run" / "report.html").is_file()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["findings"] == [
        {
            "analysis": "lookback",
            "claim": "long-range-heads",
            "holds": True,
            "text": "...",
            "evidence": {"heads": 3},
            "null": {"heads": 0},
        }
    ]
    (entry,) = record["analyses"]
    assert entry["distribution"] == "attnlens-lookback"
    assert entry["options"] == {"normalize": True}
    assert (tmp_path / "run" / entry["figures"][0]["png"]).is_file()
    assert (tmp_path / "run" / entry["tables"][0]["csv"]).is_file()
    assert list(run.figures) == ["lookback.distance"]
    assert len(run.tables["lookback.furthest"]) == 3
    provenance = json.loads(run["lookback"].attrs["attnlens"])
    assert provenance["seed"] == 0
    assert len(provenance["weights_hash"]) == 64
    assert provenance["prompts_hash"]


def test_head_names_in_tables_are_no_numbers(gpt2, tokens, tmp_path) -> None:
    class Named(Entropy):
        name = "named"

        @attnlens.table("Heads by name")
        def names(self, result):
            return pd.DataFrame({"head": ["0.1", "0.10"], "value": [1.0, 2.0]})

    run = attnlens.run(gpt2, [Named], corpus=tokens, out=tmp_path / "r", twins=0)
    page = run.report.read_text(encoding="utf-8")
    assert ">0.10<" in page
    assert run.record["analyses"][0]["tables"][0]["text"] == ["head"]


def test_options_reach_the_analysis(install, gpt2, tokens, tmp_path) -> None:
    install("lookback")
    one = attnlens.run(gpt2, ["lookback"], corpus=tokens, out=tmp_path / "a", twins=0)
    two = attnlens.run(
        gpt2,
        ["lookback"],
        corpus=tokens,
        out=tmp_path / "b",
        twins=0,
        options={"lookback": {"normalize": "false"}},
    )
    xr.testing.assert_allclose(one["lookback"] * tokens.shape[1], two["lookback"])


def test_one_failure_costs_nothing_else(gpt2, tokens, tmp_path) -> None:
    class Late(Entropy):
        """Comes after the failure."""

        name = "late"

    run = attnlens.run(gpt2, [Entropy, Fails, Late], corpus=tokens, out=tmp_path / "r", twins=0)
    assert set(run) == {"entropy", "late"}
    assert run.errors == {"fails": "nothing to divide by"}
    assert "ZeroDivisionError" in (tmp_path / "r" / "fails" / "traceback.txt").read_text()
    assert "nothing to divide by" in (tmp_path / "r" / "report.html").read_text()
    states = {e["name"]: e["status"] for e in run.record["analyses"]}
    assert states == {"entropy": "ok", "fails": "failed", "late": "ok"}


def test_a_failing_figure_leaves_the_numbers(gpt2, tokens, tmp_path) -> None:
    run = attnlens.run(gpt2, [BadFigure], corpus=tokens, out=tmp_path / "r", twins=0)
    assert "no ink" in run.errors["badfigure"]
    assert list(run.figures) == ["badfigure.grid"]
    assert np.isfinite(run["badfigure"]["entropy"]).all()


def test_an_analysis_sees_only_what_it_declared(gpt2, tokens, tmp_path) -> None:
    run = attnlens.run(gpt2, [Sneaky], corpus=tokens, out=tmp_path / "r", twins=0)
    assert "did not declare" in run.errors["sneaky"]


def test_results_of_other_analyses_come_first(gpt2, tokens, tmp_path) -> None:
    run = attnlens.run(gpt2, [Follower, Entropy], corpus=tokens, out=tmp_path / "r", twins=0)
    xr.testing.assert_allclose(run["follower"], run["entropy"] * 2)


def test_a_dependent_of_a_failure_is_skipped_with_the_reason(gpt2, tokens, tmp_path) -> None:
    class Broken(Fails):
        """Fails under the name that another reads."""

        name = "entropy"

    run = attnlens.run(gpt2, [Broken, Follower], corpus=tokens, out=tmp_path / "r", twins=0)
    entry = next(e for e in run.record["analyses"] if e["name"] == "follower")
    assert entry["status"] == "skipped"
    assert "entropy" in entry["notes"][0]


def test_analyses_that_require_each_other_are_refused_before_anything_runs(tmp_path) -> None:
    class A(Entropy):
        name = "a"
        requires = ("analysis:b",)

    class B(Entropy):
        name = "b"
        requires = ("analysis:a",)

    with pytest.raises(UsageError, match="require each other"):
        attnlens.run("no-such-model", [A, B], out=tmp_path / "r")


def test_what_is_not_a_dataset_is_refused(gpt2, tokens, tmp_path) -> None:
    class Array(Entropy):
        name = "array"

        def compute(self, store):
            return store["pattern.entropy"]

    run = attnlens.run(gpt2, [Array], corpus=tokens, out=tmp_path / "r", twins=0)
    assert "DataArray" in run.errors["array"]


def test_an_analysis_works_on_a_store_alone_in_a_notebook(gpt2, tokens, tmp_path) -> None:
    store = attnlens.capture(gpt2, tokens, statistics=["pattern.entropy"], activations=[])
    result = Entropy().compute(store)
    run = attnlens.run(gpt2, [Entropy], corpus=tokens, out=tmp_path / "r", twins=0)
    xr.testing.assert_allclose(result, run["entropy"].drop_attrs())


def test_a_store_is_analysed_later_and_lacks_are_named(gpt2, tokens, tmp_path) -> None:
    attnlens.capture(
        gpt2, tokens, activations=[], statistics=["pattern.entropy"], out=tmp_path / "s.attn"
    )
    run = attnlens.analyze(tmp_path / "s.attn", [Entropy], out=tmp_path / "r")
    assert not run.errors

    class NeedsMore(Entropy):
        name = "more"
        requires = ("z", "pattern@repeated-random", "q_rot?")

    run = attnlens.analyze(tmp_path / "s.attn", [NeedsMore], out=tmp_path / "r2")
    for lacking in ("z", "pattern@repeated-random"):
        assert lacking in run.errors["more"]
    assert "q_rot" not in run.errors["more"]


def test_a_live_model_is_asked_for_by_name(gpt2, tokens, tmp_path) -> None:
    class Acts(attnlens.Analysis):
        """Acts on the model."""

        name = "acts"
        requires = ("model",)

        def compute(self, store) -> xr.Dataset:
            return xr.Dataset({"layers": store.model.facts.n_layers})

    run = attnlens.run(gpt2, [Acts], corpus=tokens, out=tmp_path / "r", twins=0)
    assert int(run["acts"]["layers"]) == 2
    attnlens.capture(gpt2, tokens, activations=["z"], out=tmp_path / "s.attn")
    later = attnlens.analyze(tmp_path / "s.attn", [Acts], out=tmp_path / "r2")
    assert "attnlens run" in (later.record["analyses"][0]["error"]["hint"])


def test_twins_meet_the_same_needs(gpt2, tokens, tmp_path) -> None:
    class Twinned(Entropy):
        name = "twinned"
        requires = ("pattern.entropy", "twin")

        def compute(self, store) -> xr.Dataset:
            twins = [t["pattern.entropy"].mean("prompt") for t in store.twins]
            return xr.Dataset({"twins": xr.concat(twins, "twin")})

    run = attnlens.run(gpt2, [Twinned], corpus=tokens, out=tmp_path / "r", twins=2)
    twins = run["twinned"]["twins"]
    assert twins.sizes["twin"] == 2
    assert not np.allclose(twins[0], twins[1])


def test_optional_needs_are_met_where_they_can_be(gpt2, tokens, tmp_path) -> None:
    class Optional(attnlens.Analysis):
        """Takes what there is."""

        name = "optional"
        requires = ("pattern.entropy", "v?", "twin")

        def compute(self, store) -> xr.Dataset:
            return xr.Dataset({"v": int("v" in store), "twins": len(store.twins)})

    run = attnlens.run(gpt2, [Optional], corpus=tokens, out=tmp_path / "r", twins=0)
    assert not run.errors
    assert (int(run["optional"]["v"]), int(run["optional"]["twins"])) == (1, 0)
    attnlens.capture(
        gpt2, tokens, activations=[], statistics=["pattern.entropy"], out=tmp_path / "s.attn"
    )
    later = attnlens.analyze(tmp_path / "s.attn", [Optional], out=tmp_path / "r2")
    assert int(later["optional"]["v"]) == 0


def test_folders_that_hold_something_else_are_left_alone(gpt2, tokens, tmp_path) -> None:
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(OutputError):
            attnlens.run(gpt2, [Entropy], corpus=tokens, out=precious, overwrite=overwrite)
    assert (precious / "chapter.tex").read_text() == "x"
    with pytest.raises(OutputError, match="is a file"):
        attnlens.run(gpt2, [Entropy], corpus=tokens, out=precious / "chapter.tex")


def test_an_earlier_run_is_replaced_only_when_asked(gpt2, tokens, tmp_path) -> None:
    out = tmp_path / "deep" / "er"
    attnlens.run(gpt2, [Entropy], corpus=tokens, out=out, twins=0)
    with pytest.raises(OutputError, match="not empty"):
        attnlens.run(gpt2, [Entropy], corpus=tokens, out=out, twins=0)
    attnlens.run(gpt2, [Entropy], corpus=tokens, out=out, twins=0, overwrite=True)


def test_an_earlier_run_outlives_a_model_that_cannot_be_loaded(gpt2, tokens, tmp_path) -> None:
    out = tmp_path / "run"
    run = attnlens.run(gpt2, [Entropy], corpus=tokens, out=out, twins=0)
    before = run.report.read_bytes()
    with pytest.raises(attnlens.errors.AttnlensError):
        attnlens.run(tmp_path / "nowhere", [Entropy], corpus=tokens, out=out, overwrite=True)
    assert run.report.read_bytes() == before
    with pytest.raises(attnlens.errors.UsageError, match="to be read"):
        attnlens.analyze(out, [Entropy], out=out, overwrite=True)
    assert run.report.read_bytes() == before


def test_paths_need_not_be_ascii(gpt2, tokens, tmp_path) -> None:
    out = tmp_path / "dir with space ü東" / "x"
    run = attnlens.run(gpt2, [Entropy], corpus=tokens, out=out, twins=0)
    assert run.report.is_file()
    assert not run.errors


def test_same_seed_same_bytes(gpt2, tokens, tmp_path) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {
            str(p.relative_to(folder)): p.read_bytes()
            for place in ("store.attn/units", "entropy/result.zarr", "entropy/figures")
            for p in sorted((folder / place).rglob("*"))
            if p.is_file()
        }

    for name in ("a", "b"):
        attnlens.run(gpt2, [Entropy], corpus=tokens, out=tmp_path / name, twins=0)
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert first.keys() == second.keys()
    assert [k for k in first if first[k] != second[k]] == []


def test_observers_are_told_and_cannot_spoil_the_run(install, gpt2, tokens, tmp_path) -> None:
    install("observer", "observer_broken")
    run = attnlens.run(gpt2, [Entropy, Fails], corpus=tokens, out=tmp_path / "r", twins=0)
    seen = sys.modules["attnlens_observer"].seen
    assert seen == [
        ("before", "entropy"),
        ("after", "entropy", ["entropy"]),
        ("before", "fails"),
        ("failed", "fails", "ZeroDivisionError"),
    ]
    assert set(run) == {"entropy"}
    assert any("I do not want to watch" in note for note in run.record["notes"])


def test_a_run_is_a_mapping_that_says_what_it_lacks(gpt2, tokens, tmp_path) -> None:
    run = attnlens.run(gpt2, [Entropy, Fails], corpus=tokens, out=tmp_path / "r", twins=0)
    again = attnlens.open_run(tmp_path / "r")
    xr.testing.assert_identical(run["entropy"], again["entropy"])
    with pytest.raises(KeyError, match="nothing to divide by"):
        again["fails"]
    with pytest.raises(KeyError, match="no such analysis"):
        again["cp"]
    assert "entropy: ok" in repr(again)
    assert again.store["pattern.entropy"].sizes["head"] == 4
    assert "<script>" not in again._repr_html_()


def test_a_run_in_a_notebook_leads_to_all_that_it_holds(
    gpt2, tokens, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = attnlens.run(gpt2, [Entropy], corpus=tokens, out="my runs/<a>", twins=0)
    shown = run._repr_html_()
    assert "<a href='my%20runs/%3Ca%3E/report.html'" in shown
    assert "<code>run[...]</code></th><td style='text-align:left'><code>entropy</code>" in shown
    assert "<code>entropy.grid</code>" in shown
    assert "<code>run.tables[...]</code></th><td style='text-align:left'>none" in shown
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    far = attnlens.open_run("../my runs/<a>")._repr_html_()
    assert f"<a href='{(tmp_path / 'my runs').as_uri()}/%3Ca%3E/report.html'" in far


def test_a_need_that_exists_nowhere_is_refused_at_once() -> None:
    class Wrong(Entropy):
        name = "wrong"
        requires = ("patern",)

    with pytest.raises(NeedError, match="patern") as caught:
        attnlens.run("no-such-model", [Wrong])
    assert "'pattern'" in str(caught.value)


def test_the_plan_tells_what_an_analysis_will_hold(gpt2, tokens, tmp_path) -> None:
    class Big(Entropy):
        name = "big"

        def memory(self, facts, tokens):
            return 2**30 * facts.n_layers if tokens == 48 else 0

    plans = []
    attnlens.run(gpt2, [Big], corpus=tokens, out=tmp_path / "r", twins=0, on_plan=plans.append)
    assert "big: about 2.0 GiB of memory while it computes." in str(plans[0])
