"""The built wheel: what is in it, and that it works where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_a_wheel_holds_what_a_run_needs_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        "attnlens/py.typed", "attnlens_plugins/py.typed", "attnlens/report/report.html.j2",
        "attnlens/report/report.css", "attnlens/report/report.js", "attnlens/demo/text.txt",
        "attnlens/demo/model/model.safetensors", "attnlens/demo/model/tokenizer.json",
    ):  # fmt: skip
        assert needed in names
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"attnlens", "attnlens_plugins"}
    assert wheel.stat().st_size < 10e6


def test_an_installed_wheel_plans_a_run(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--target", site, wheel],
        check=True,
        capture_output=True,
    )  # fmt: skip
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("ATTNLENS")},
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
    }

    def call(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = call("-c", "import attnlens; print(attnlens.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    listed = call("-m", "attnlens", "plugins", "--check")
    assert "cp " in listed
    assert "spectrum " in listed
    planned = call("-m", "attnlens", "run", "--dry-run", "--plugins", "spectrum", "demo")
    assert "pattern" in planned
