"""``plugins new`` and ``doctor``: what an author meets first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnlens.cli import app
from attnlens.errors import UnknownPluginError
from attnlens.hookspecs import OBSERVERS
from attnlens.plugins import discover, find

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


@pytest.mark.parametrize("name", ["Head", "1st", "a_b", "cp", "../x", "", "none", "n" * 61])
def test_names_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    done = runner.invoke(app, ["plugins", "new", name, "--in", str(tmp_path)])
    assert done.exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["plugins", "taken"])
def test_a_package_that_would_hide_an_installed_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "attnlens_taken.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    done = runner.invoke(app, ["plugins", "new", name, "--in", str(tmp_path / "new")])
    assert done.exit_code == 2
    assert f"attnlens_{name}" in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_new_packages_workflow_can_take_attnlens_from_elsewhere(tmp_path: Path) -> None:
    runner.invoke(app, ["plugins", "new", "head-focus", "--in", str(tmp_path)])
    workflow = tmp_path / "attnlens-head-focus" / ".github" / "workflows" / "test.yml"
    assert "vars.ATTNLENS || 'attnlens'" in workflow.read_text()


def test_an_observer_is_explained_as_one(install) -> None:
    install("observer")
    (plugin,) = [p for p in discover(OBSERVERS) if p.distribution == "attnlens-observer"]
    done = runner.invoke(app, ["plugins", "show", plugin.name])
    assert done.exit_code == 0, done.stderr
    assert "an observer" in done.stdout
    assert "attnlens_after_analysis" in done.stdout
    assert f"--no-plugin {plugin.name}" in done.stdout
    with pytest.raises(UnknownPluginError, match="is an observer, not an analysis"):
        find(plugin.name, discover())


def test_the_doctor_finds_this_machine_well(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 0, done.stdout
    for said in ("Python", "torch", "self-test", "plugin spectrum", "can be written"):
        assert said in done.stdout
