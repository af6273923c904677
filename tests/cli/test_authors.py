"""``plugins new`` and ``doctor``: what an author meets first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnlens.cli import app

runner = CliRunner()


def test_a_new_package_passes_its_tests_with_no_edit(tmp_path: Path) -> None:
    done = runner.invoke(app, ["plugins", "new", "head-focus", "--in", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    package = tmp_path / "attnlens-head-focus"
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests")],
        env={**os.environ, "PYTHONPATH": str(package / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, tests.stdout
    again = runner.invoke(app, ["plugins", "new", "head-focus", "--in", str(tmp_path)])
    assert again.exit_code == 2


@pytest.mark.parametrize("name", ["Head", "1st", "a_b", "cp", "../x", ""])
def test_names_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    done = runner.invoke(app, ["plugins", "new", name, "--in", str(tmp_path)])
    assert done.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_the_doctor_finds_this_machine_well(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 0, done.stdout
    for said in ("Python", "torch", "self-test", "plugin spectrum", "can be written"):
        assert said in done.stdout
