"""Runs side by side: planted changes are found and dated, ramps and noise are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import attnlens
from attnlens.cli import app
from attnlens.errors import UsageError
from attnlens.tracking import (
    compare_runs,
    constancy,
    different_prompts,
    find_changes,
    identical_weights,
    line_up,
    step_of,
    track_runs,
)
from attnlens.tracking.changes import passage
from attnlens.tracking.telling import change_findings
from tests.modelzoo import tiny


class Score(attnlens.Analysis):
    """Mean of the largest weight of each head."""

    name = "score"
    requires = ("pattern.max",)

    def compute(self, store) -> xr.Dataset:
        value = store["pattern.max"].mean("prompt")
        return xr.Dataset({"largest": value, "largest_std": value * 0, "model": value.mean()})


def lined(values: np.ndarray, name: str = "a.x") -> xr.Dataset:
    """Values [run, layer, head] as line_up returns them."""
    labels = [f"step{i}" for i in range(len(values))]
    return xr.Dataset(
        {name: (("run", "layer", "head"), values)},
        coords={
            "run": labels,
            "layer": range(values.shape[1]),
            "head": range(values.shape[2]),
            "step": ("run", np.arange(len(values), dtype=float)),
            "weights_hash": ("run", [f"hash{i}" for i in range(len(values))]),
            "prompts_hash": ("run", ["prompts"] * len(values)),
        },
    )


@given(st.integers(2, 10), st.integers(2, 10), st.floats(-5, 5), st.floats(0.1, 5))
def test_a_step_is_found_where_it_is(before: int, after: int, level: float, height: float) -> None:
    series = np.concatenate([np.full(before, level), np.full(after, level + height)])
    found = passage(series, 1)
    assert (found.first, found.last) == (before - 1, before)
    assert found.share == pytest.approx(1.0)
    assert found.fit == pytest.approx(1.0)


def test_planted_births_are_found_and_dated() -> None:
    rng = np.random.default_rng(0)
    values = 0.03 + 0.005 * rng.standard_normal((20, 3, 4))
    values[12:, 1, 2] += 0.9
    values[14:, 2, 0] += 0.6
    values[:, 0, 0] += np.linspace(0, 0.8, 20)  # a ramp is no phase change
    changes = find_changes(lined(values))
    found = {(r["layer"], r["head"]): (r["from"], r["to"]) for r in changes.to_dict("records")}
    assert found == {(1, 2): ("step11", "step12"), (2, 0): ("step13", "step14")}
    for row in changes.to_dict("records"):
        series = values[:, row["layer"], row["head"]]
        assert row["before"] == series[int(row["from"][4:])]
        assert row["after"] == series[int(row["to"][4:])]


@pytest.mark.parametrize("n", [5, 8, 20])
def test_what_all_heads_do_at_once_is_found(n: int) -> None:
    rng = np.random.default_rng(n)
    values = 0.01 * rng.standard_normal((n, 3, 8))
    values[n // 2 :] += 0.8
    changes = find_changes(lined(values))
    assert len(changes) == 24
    assert set(changes["to"]) == {f"step{n // 2}"}


def test_a_slow_passage_is_no_phase_change_and_a_quick_one_is_dated_by_its_width() -> None:
    noise = 0.005 * np.random.default_rng(1).standard_normal((40, 2, 2))
    time = np.arange(40.0)
    slow, quick = noise.copy(), noise.copy()
    slow[:, 0, 1] += 1 / (1 + np.exp(-(time - 20) / 4))
    quick[20, 0, 1] += 0.4
    quick[21:, 0, 1] += 0.8
    assert find_changes(lined(slow)).empty
    (row,) = find_changes(lined(quick)).to_dict("records")
    assert (row["from"], row["to"]) in {("step19", "step20"), ("step20", "step21"),
                                        ("step19", "step21")}  # fmt: skip
    assert row["share"] >= 0.5


CHANCE = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, shape),
    "walk": lambda rng, shape: rng.standard_normal(shape).cumsum(axis=0),
    "two values": lambda rng, shape: rng.integers(0, 2, shape).astype(float),
    "heads of different size": lambda rng, shape: (
        rng.standard_normal(shape) * np.exp(rng.standard_normal((1, *shape[1:])))
    ),
}


@pytest.mark.parametrize("kind", CHANCE)
@pytest.mark.parametrize("n", [3, 5, 8, 20])
def test_chance_makes_no_phase_change(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    claimed = [not find_changes(lined(CHANCE[kind](rng, (n, 3, 8)))).empty for _ in range(40)]
    assert sum(claimed) <= 2


def test_one_spike_is_no_phase_change() -> None:
    for at in (0, 7, 19):
        values = 0.01 * np.random.default_rng(at).standard_normal((20, 2, 2))
        values[at, 1, 1] += 1
        assert find_changes(lined(values)).empty


def test_too_few_runs_are_said_to_be_too_few() -> None:
    (finding,) = change_findings(find_changes(lined(np.eye(4)[:, :, None])), 4)
    assert not finding.holds
    assert "at least 5 are needed" in finding.text


def test_one_stretch_of_training_is_one_finding() -> None:
    values = 0.01 * np.random.default_rng(3).standard_normal((12, 2, 4))
    values[6:, 0, 3] += 1
    other = values + 0.001
    other[6:, 1, 1] -= 2
    other[6:, 0, 3] -= 1  # back at its old level: no change of this quantity
    both = lined(values, "a.x").assign(lined(other, "a.y").data_vars)
    (finding,) = change_findings(find_changes(both), 12)
    assert finding.holds
    assert "Between step5 and step6 head 0.3 changes at once: a.x from" in finding.text or (
        "Between step5 and step6 head 1.1 changes at once: a.y from" in finding.text
    )
    assert set(finding.evidence["heads"]) == {"head 0.3", "head 1.1"}
    assert finding.null["usual change"]


def test_what_stays_and_what_moves() -> None:
    rng = np.random.default_rng(1)
    heads = rng.uniform(1, 2, (1, 3, 4))
    steady = np.repeat(heads, 4, axis=0) * (1 + 0.01 * rng.standard_normal((4, 3, 4)))
    moving = rng.uniform(0, 2, (4, 3, 4))
    both = lined(steady, "a.steady").assign(lined(moving, "a.moving").data_vars)
    table = constancy(both).set_index("quantity")
    assert bool(table.loc["a.steady", "stays"])
    assert not bool(table.loc["a.moving", "stays"])
    assert table.loc["a.steady", "rank_correlation"] > 0.95
    exact = constancy(lined(np.repeat(heads, 4, axis=0)))
    assert exact["variation"][0] == 0
    assert exact["rank_correlation"][0] == pytest.approx(1)


def test_steps_are_read_from_labels() -> None:
    assert step_of("step1000") == 1000
    assert step_of("pythia-160m@step4") == 4
    assert np.isnan(step_of("final"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, attnlens.Run]:
    base = tmp_path_factory.mktemp("runs")
    tokens = np.random.default_rng(0).integers(0, 50, (2, 8))
    first, second = tiny("gpt2", base / "m0"), tiny("gpt2", base / "m1", seed=1)
    made = {}
    for label, model in (("step0", first), ("step1", second), ("step2", second)):
        made[label] = attnlens.run(model, [Score], corpus=tokens, out=base / label, twins=0)
    return made


def test_runs_are_lined_up_by_what_they_share(runs) -> None:
    together = line_up(runs)
    assert set(together.data_vars) == {"score.largest", "score.model"}
    assert together["score.largest"].dims == ("run", "layer", "head")
    for i, run in enumerate(runs.values()):
        np.testing.assert_array_equal(
            together["score.largest"].values[i], run["score"]["largest"].values
        )


def test_identical_weights_are_named(runs, tmp_path: Path) -> None:
    assert ("step1", "step2") in identical_weights(line_up(runs))
    _, report = compare_runs(runs, tmp_path)
    assert "identical weights" in report.read_text(encoding="utf-8")


def test_identical_weights_are_said_on_the_terminal(runs, tmp_path: Path) -> None:
    folders = [str(runs[label].path) for label in ("step1", "step2")]
    done = CliRunner().invoke(app, ["compare", *folders, "--out", str(tmp_path / "c")])
    assert "identical weights" in done.stderr
    found = {f.claim: f.holds for f in attnlens.open_run(tmp_path / "c").findings}
    assert found == {"identical-weights": True, "quantities-stay": False}


def test_different_prompts_are_said(runs, tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 50, (2, 6))
    other = attnlens.run(
        tiny("gpt2", tmp_path / "m", seed=5), [Score], corpus=tokens, out=tmp_path / "r", twins=0
    )
    _, report = compare_runs({"step0": runs["step0"], "other": other}, tmp_path / "c")
    assert "different prompts" in report.read_text(encoding="utf-8")
    assert not different_prompts(line_up(runs))


def test_options_that_cannot_bear_on_finished_runs_are_refused(runs, tmp_path: Path) -> None:
    folders = [str(r.path) for r in runs.values()]
    out = ["--out", str(tmp_path / "t")]
    done = CliRunner().invoke(app, ["track", *folders, "--samples", "3", *out])
    assert done.exit_code == 2
    assert "--samples" in done.stderr
    twice = CliRunner().invoke(app, ["track", folders[0], folders[0], *out])
    assert twice.exit_code == 2
    assert "named twice" in twice.stderr
    assert not (tmp_path / "t").exists()


def test_an_order_of_heads_that_cannot_be_told_does_not_stay() -> None:
    flat = np.ones((3, 2, 4)) * np.array([1.0, 1.01, 1.02])[:, None, None]
    table = constancy(lined(flat))
    assert np.isnan(table["rank_correlation"][0])
    assert not table["stays"][0]


def test_one_run_is_not_enough(runs) -> None:
    with pytest.raises(UsageError, match="at least two"):
        line_up({"step0": runs["step0"]})


def test_a_tracked_training_has_a_report_of_its_own(runs, tmp_path: Path) -> None:
    shuffled = {label: runs[label] for label in ("step2", "step0", "step1")}
    _, report = track_runs(shuffled, tmp_path)
    record = attnlens.open_run(tmp_path)
    assert list(record["track"]["run"].values) == ["step0", "step1", "step2"]
    assert report.is_file()
    assert (tmp_path / record.record["analyses"][0]["figures"][0]["png"]).is_file()


def test_the_commands(runs, tmp_path: Path) -> None:
    runner = CliRunner()
    folders = [str(r.path) for r in runs.values()]
    done = runner.invoke(app, ["compare", *folders, "--out", str(tmp_path / "c")])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "c" / "report.html")
    assert "score.largest" in done.stderr
    done = runner.invoke(app, ["track", *folders, "--out", str(tmp_path / "t")])
    assert done.exit_code == 0, done.stderr
    alone = runner.invoke(app, ["track", folders[0]])
    assert alone.exit_code == 2
    assert "--revisions" in alone.stderr
