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
    find_changes,
    identical_weights,
    line_up,
    step_of,
    track_runs,
)
from attnlens.tracking.changes import best_step
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
        },
    )


@given(st.integers(2, 60))
def test_a_ramp_reaches_three_quarters_of_the_fit(n: int) -> None:
    _, fit = best_step(np.arange(n, dtype=float))
    expected = 0.75 * n**2 / (n**2 - 1) if n % 2 == 0 else 0.75
    assert fit == pytest.approx(expected, abs=1e-9) if n % 2 == 0 else fit <= expected + 0.05


@given(st.integers(1, 30), st.integers(1, 30), st.floats(-5, 5), st.floats(0.1, 5))
def test_a_step_is_found_where_it_is(before: int, after: int, level: float, height: float) -> None:
    series = np.concatenate([np.full(before, level), np.full(after, level + height)])
    index, fit = best_step(series)
    assert index == before
    assert fit == pytest.approx(1.0)


def test_planted_births_are_found_and_dated() -> None:
    rng = np.random.default_rng(0)
    values = 0.03 + 0.005 * rng.standard_normal((20, 3, 4))
    values[12:, 1, 2] += 0.9
    values[14:, 2, 0] += 0.6
    values[:, 0, 0] += np.linspace(0, 0.8, 20)  # a ramp is no phase change
    changes = find_changes(lined(values))
    found = {(r["layer"], r["head"]): (r["from"], r["to"]) for r in changes.to_dict("records")}
    assert found == {(1, 2): ("step11", "step12"), (2, 0): ("step13", "step14")}


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_change_phase(seed: int) -> None:
    noise = np.random.default_rng(seed).standard_normal((20, 4, 4))
    assert find_changes(lined(noise)).empty


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
