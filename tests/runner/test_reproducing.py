"""Every run says how to start it again, wherever it was started from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnlens_plugins.spectrum import Spectrum
from typer.testing import CliRunner

import attnlens
from attnlens.cli import app


class Mine(attnlens.Analysis):
    """Counts the prompts."""

    name = "mine"
    requires = ("pattern.entropy",)

    def compute(self, store: Any) -> Any:
        return store["pattern.entropy"].to_dataset(name="entropy")


def record(tmp_path: Path, **asked: Any) -> dict[str, Any]:
    run = attnlens.run(out=tmp_path / "python", **asked)
    assert not run.errors
    return run.record


@pytest.mark.parametrize(
    "asked",
    [
        {"plugins": [Spectrum(prompts=1)], "corpus": ["it's\u202e me", "--two"], "twins": 1},
        {"plugins": [Spectrum], "options": {"spectrum": {"of": "activations"}}, "seed": 3,
         "corpus": "repeated-random", "layers": [0, 2], "lean": False, "batch_size": 1,
         "dtypes": {"resid_pre": "float32"}, "samples": 2, "length": 12, "twins": 0},
    ],
)  # fmt: skip
def test_the_command_gives_the_same_results(tmp_path: Path, asked: dict[str, Any]) -> None:
    made = record(tmp_path, **asked)
    assert "call" not in made
    program, *words = made["command"]
    assert program == "attnlens"
    out = tmp_path / "shell"
    done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    again = attnlens.open_run(out)
    first = attnlens.open_run(tmp_path / "python")
    assert again.record["analyses"][0]["options"] == made["analyses"][0]["options"]
    assert again.record["corpus"]["hash"] == made["corpus"]["hash"]
    np.testing.assert_array_equal(again["spectrum"]["entropy"], first["spectrum"]["entropy"])


def test_what_no_command_can_say_is_a_call(tmp_path: Path) -> None:
    tokens = np.arange(1, 17).reshape(2, 8)
    made = record(tmp_path, model="demo", plugins=[Mine()], corpus=tokens, twins=0)
    assert made["command"] == []
    assert made["call"] == (
        "attnlens.run(\n    'demo',\n    plugins=[Mine()],\n"
        "    corpus=corpus,  # ndarray (2, 8) of int64\n    twins=0,\n)"
    )
    report = (tmp_path / "python" / "report.html").read_text()
    assert "data-copy" in report
    assert "plugins=[Mine()]" in report


def test_a_call_that_can_be_written_whole_stands_on_one_line(tmp_path: Path) -> None:
    made = record(tmp_path, plugins=[Mine], corpus=Path(__file__), samples=1, length=8, twins=0)
    assert made["call"] == (
        f"attnlens.run('demo', plugins=[Mine], corpus=Path({__file__!r}), samples=1, length=8, "
        "twins=0)"
    )


def test_an_analysis_of_a_store_says_so_too(tmp_path: Path) -> None:
    tokens = np.arange(1, 17).reshape(2, 8)
    store = attnlens.capture("demo", tokens, activations=["pattern"], out=tmp_path / "a.attn")
    by_path = attnlens.analyze(tmp_path / "a.attn", ["spectrum"], out=tmp_path / "one").record
    assert by_path["command"] == [
        "attnlens", "analyze", "--plugins", "spectrum", str(tmp_path / "a.attn")
    ]  # fmt: skip
    held = attnlens.analyze(store, ["spectrum"], out=tmp_path / "two").record
    assert held["call"].startswith("attnlens.analyze(\n    store,  # Store")


def test_a_run_of_the_command_line_keeps_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "demo", "-p", "spectrum", "--samples", "1", "--length", "8", "--twins", "0",
             "--out", str(tmp_path / "run")]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["attnlens", *words])
    assert CliRunner().invoke(app, words).exit_code == 0
    assert json.loads((tmp_path / "run/run.json").read_text())["command"] == ["attnlens", *words]
