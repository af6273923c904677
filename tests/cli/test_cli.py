"""The command line: exit codes, one clear message, results on stdout alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from attnlens.cli import app
from attnlens.cli.run import conclude
from tests.modelzoo import tiny

runner = CliRunner()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 50, (3, 10)))
    return path


def attnlens(*words: object):
    return runner.invoke(app, [str(word) for word in words])


def test_run_prints_the_report_alone_on_stdout(install, gpt2, tokens, tmp_path) -> None:
    install("lookback")
    out = tmp_path / "run"
    done = attnlens("run", gpt2, "--plugins", "lookback", "--tokens", tokens, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [str(out / "report.html")]
    assert "pattern.by_offset" in done.stderr  # the plan
    quiet = attnlens(
        "run", gpt2, "--plugins", "lookback", "--tokens", tokens, "--out", tmp_path / "q", "-q"
    )
    assert (quiet.exit_code, quiet.stderr) == (0, "")


def test_what_an_analysis_remarks_is_printed(capsys) -> None:
    entry = {"name": "one", "status": "ok", "notes": ["half of the tokens were left out."]}
    done = SimpleNamespace(record={"analyses": [entry]}, findings=[], errors={}, report="r.html")
    conclude(done, quiet=False)
    assert "one: half of the tokens were left out." in capsys.readouterr().err
    conclude(done, quiet=True)
    assert capsys.readouterr().err == ""


def test_a_failing_analysis_gives_exit_code_1_and_keeps_the_others(
    install, gpt2, tokens, tmp_path
) -> None:
    install("lookback", "broken_run")
    done = attnlens(
        "run", gpt2, "--plugins", "lookback,broken-run", "--tokens", tokens, "--out", tmp_path / "r"
    )
    assert done.exit_code == 1
    assert "division of a head by nothing" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "r" / "lookback" / "result.zarr").is_dir()
    assert (tmp_path / "r" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plugins", "lokback"], "Did you mean 'lookback'?"),
        (["--plugins", ","], "--plugins names no analysis"),
        (["--plugins", "lookback", "-o", "lookback.normalise=1"], "Did you mean 'normalize'?"),
        (["--plugins", "lookback", "-o", "lookback.normalize=perhaps"], "perhaps"),
        (["--plugins", "lookback", "-o", "cp.rank=3"], "which does not run"),
        (["--plugins", "lookback", "-o", "rank=3"], "PLUGIN.OPTION=VALUE"),
        (["--plugins", "lookback", "--text", "a", "--corpus", "default"], "cannot be combined"),
        (["--plugins", "lookback", "--chunk", "5"], "--chunk cuts a --text-file"),
        (["--plugins", "lookback", "--layers", "x"], "no number or range"),
        (["--plugins", "lookback", "--store-dtype", "z=int8"], "ACTIVATION=float16"),
        (["--plugins", "lookback", "--corpus", "defalt"], "Did you mean 'default'?"),
        (["--plugins", "lookback", "--no-plugin", "spectrm"], "Did you mean 'spectrum'?"),
        (["--plugins", "cp", "-o", "cp.rank=0"], "not valid: write a number"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_mistakes_are_refused_with_exit_code_2_before_the_model_loads(
    install, tmp_path, words: list[str], said: str
) -> None:
    install("lookback")
    done = attnlens("run", "no-such-model-anywhere", *words, "--out", tmp_path / "r")
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_selected_broken_plugin_is_named_before_the_model_loads(install, tmp_path) -> None:
    install("lookback", "broken_import")
    done = attnlens("run", "no-such-model", "--plugins", "lookback,broken-import")
    assert done.exit_code == 1
    assert "attnlens-broken-import 0.1.0" in done.stderr
    assert "no-such-model" not in done.stderr


def test_a_broken_plugin_that_was_not_selected_does_not_matter(
    install, gpt2, tokens, tmp_path
) -> None:
    install("lookback", "broken_import", "broken_exit", "misspelt")
    done = attnlens(
        "run", gpt2, "--plugins", "lookback", "--tokens", tokens, "--out", tmp_path / "r"
    )
    assert done.exit_code == 0, done.stderr


def test_a_missing_model_gives_exit_code_1(install, tmp_path) -> None:
    install("lookback")
    done = attnlens("run", tmp_path / "no-folder", "--plugins", "lookback", "--out", tmp_path / "r")
    assert done.exit_code == 1
    assert "no-folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_in_the_way_is_refused_before_the_model_loads(install, tmp_path) -> None:
    install("lookback")
    file = tmp_path / "file.txt"
    file.write_text("mine")
    done = attnlens("run", "no-such-model", "--plugins", "lookback", "--out", file)
    assert done.exit_code == 2
    assert "is a file" in done.stderr
    assert file.read_text() == "mine"


def test_plugins_are_listed_and_checked(install) -> None:
    install("lookback", "clashing", "broken_import", "too_new", "observer")
    listed = attnlens("plugins")
    assert listed.exit_code == 0
    for said in ("spectrum", "attnlens-lookback", "1.2.0", "conflict", "observer", "too-new"):
        assert said in listed.stdout
    assert "attnlens_lookback" not in sys.modules
    checked = attnlens("plugins", "--check")
    assert checked.exit_code == 1
    assert "a_package_that_nobody_has" in checked.stdout
    assert "needs version 99" in checked.stdout
    without = attnlens(
        "plugins", "--check", "--no-plugin", "broken-import", "--no-plugin", "too-new"
    )
    assert without.exit_code == 0
    assert "disabled" in without.stdout


def test_plugins_show_explains_one(install) -> None:
    install("lookback")
    shown = attnlens("plugins", "show", "lookback")
    assert shown.exit_code == 0
    for said in (
        "How far back each head looks",
        "pattern.by_offset",
        "lookback.normalize",
        "Divide by the prompt's length.",
        "Mean distance that each head looks back",
        "Heads that look furthest back",
    ):
        assert said in shown.stdout


def test_capture_analyze_plot_and_the_store_commands(install, gpt2, tokens, tmp_path) -> None:
    install("lookback")
    store = tmp_path / "s.attn"
    done = attnlens("capture", gpt2, "-a", "pattern,z", "--tokens", tokens, "--out", store)
    assert (done.exit_code, done.stdout.strip()) == (0, str(store)), done.stderr
    run = tmp_path / "run"
    done = attnlens("analyze", store, "--plugins", "lookback", "--out", run)
    assert done.exit_code == 0, done.stderr
    figure = run / "lookback" / "figures" / "distance.png"
    before = figure.read_bytes()
    figure.unlink()
    (run / "report.html").unlink()
    done = attnlens("plot", run)
    assert done.exit_code == 0, done.stderr
    assert figure.read_bytes() == before
    assert (run / "report.html").is_file()

    info = attnlens("store", "info", store)
    assert info.exit_code == 0
    assert "pattern" in info.stdout
    assert json.loads(attnlens("store", "info", store, "--json").stdout)
    assert attnlens("store", "verify", store, "--deep").exit_code == 0
    exported = tmp_path / "z.npy"
    assert attnlens("store", "export", store, "z", exported).exit_code == 0
    assert np.load(exported).shape == (3, 2, 10, 4, 4)
    victim = next(p for p in (store / "units").rglob("c*") if "pattern" in str(p) and p.is_file())
    victim.unlink()
    broken = attnlens("store", "verify", store)
    assert broken.exit_code == 1
    assert "pattern" in broken.stdout


def test_capture_for_analyses_meets_their_needs(gpt2, tokens, tmp_path) -> None:
    store = tmp_path / "s.attn"
    done = attnlens(
        "capture", gpt2, "--plugins", "spectrum", "--tokens", tokens, "--twins", 2, "--out", store
    )
    assert done.exit_code == 0, done.stderr
    done = attnlens("analyze", store, "--plugins", "spectrum", "--out", tmp_path / "r")
    assert done.exit_code == 0, done.stderr


def test_a_length_beyond_the_context_is_told_with_the_plan(gpt2, tmp_path) -> None:
    wanted = ("--corpus", "repeated-random", "--samples", 1, "--length", 100000)
    said = "100000 tokens are more than the model's context of 16"
    planned = attnlens("capture", gpt2, *wanted, "--dry-run")
    assert said in planned.stdout
    done = attnlens("capture", gpt2, *wanted, "--out", tmp_path / "s.attn")
    assert done.exit_code == 0 and done.stderr.count(said) == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(install, gpt2, tokens, tmp_path) -> None:
    install("lookback")
    out = tmp_path / "r"
    done = attnlens(
        "run", gpt2, "--plugins", "lookback", "--tokens", tokens, "--out", out, "--dry-run"
    )
    assert done.exit_code == 0, done.stderr
    assert "pattern.by_offset" in done.stdout
    assert not out.exists()


def test_a_plan_that_cannot_fit_is_refused_with_advice(tmp_path) -> None:
    """A05: a context of 131,072 tokens, whose patterns would be 64 GiB for each head and layer."""
    folder = tiny("llama", tmp_path / "long", max_position_embeddings=131072)
    tokens = tmp_path / "long.npy"
    np.save(tokens, np.zeros((1, 131072), dtype=np.int32))
    started = time.monotonic()
    done = attnlens("capture", folder, "-a", "pattern", "--no-lean", "--tokens", tokens)
    assert done.exit_code == 1
    assert "--length" in done.stderr
    assert "GiB" in done.stderr or "TiB" in done.stderr
    assert time.monotonic() - started < 60


def _environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **extra}


def test_ctrl_c_leaves_a_store_that_resume_finishes(install, gpt2, tmp_path) -> None:
    """F11 through the command itself; the bytes are compared in tests/recorder."""
    site = install("lookback")
    tokens = tmp_path / "many.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 50, (4000, 16)))
    out = tmp_path / "run"
    words = [
        sys.executable, "-m", "attnlens", "run", str(gpt2), "--plugins", "lookback", "--tokens",
        str(tokens), "--batch-size", "1", "--twins", "0", "--out", str(out),
    ]  # fmt: skip
    environment = _environment(PYTHONPATH=str(site))
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (out / "store.attn" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "--resume" in said
    refused = attnlens("analyze", out / "store.attn", "--plugins", "lookback")
    assert refused.exit_code == 1
    assert "--resume" in refused.stderr
    done = subprocess.run([*words, "--resume"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (out / "report.html").is_file()


def test_help_teaches_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['attnlens', *sys.argv[1:]]\n"
        "from attnlens.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformer_lens', 'matplotlib', 'umap'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for words in (["--help"], ["run", "--help"], ["plugins"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert "attnlens run --plugins cp,spectrum demo" in attnlens("--help").stdout
    assert "cp.rank=8" in attnlens("run", "--help").stdout


def test_plot_needs_no_torch(install, gpt2, tokens, tmp_path) -> None:
    site = install("lookback")
    run = tmp_path / "run"
    done = attnlens("run", gpt2, "--plugins", "lookback,spectrum", "--tokens", tokens, "--out", run)
    assert done.exit_code == 0, done.stderr
    script = (
        "import sys\n"
        "from attnlens.runs import redraw\n"
        "redraw(sys.argv[1])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run)],
        capture_output=True,
        text=True,
        env=_environment(PYTHONPATH=str(site), MPLBACKEND="TkAgg", DISPLAY="localhost:64.0"),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("home", ["/nonexistent"])
def test_no_writable_home_is_needed(install, gpt2, tokens, tmp_path, home: str) -> None:
    """F15, and E06: a locked-down container whose display does not answer."""
    site = install("lookback")
    done = subprocess.run(
        [sys.executable, "-m", "attnlens", "run", str(gpt2), "--plugins", "lookback", "--tokens",
         str(tokens), "--twins", "0", "--out", str(tmp_path / "r")],
        env=_environment(
            HOME=home, PYTHONPATH=str(site), MPLBACKEND="TkAgg", DISPLAY="localhost:64.0"
        ),
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_failed_analysis_is_told_with_what_to_do(gpt2, tokens, tmp_path) -> None:
    store = tmp_path / "s.attn"
    made = attnlens("capture", gpt2, "--tokens", tokens, "-a", "weights", "--out", store)
    assert made.exit_code == 0
    done = attnlens("analyze", store, "-p", "equivariance", "--out", tmp_path / "r")
    assert done.exit_code == 1
    assert "needs the live model" in done.stderr
    assert "Use `attnlens run`" in done.stderr
