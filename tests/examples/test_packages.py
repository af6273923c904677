"""The example packages: installed as a user would, and tested from their own folders."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = ["attnlens-distance", "attnlens-tensorboard"]

#: Stands in for tensorboardX: writes what it is given as lines of JSON.
STAND_IN = """
import json, pathlib

class SummaryWriter:
    def __init__(self, folder):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        self.file = open(pathlib.Path(folder, "events.jsonl"), "a")

    def _write(self, kind, tag, step, **more):
        self.file.write(json.dumps({"kind": kind, "tag": tag, "step": step, **more}) + "\\n")

    def add_scalar(self, tag, value, step):
        self._write("scalar", tag, step, value=value)

    def add_histogram(self, tag, values, step):
        self._write("histogram", tag, step, n=len(values))

    def add_image(self, tag, pixels, step, dataformats):
        self._write("image", tag, step, shape=pixels.shape)

    def close(self):
        self.file.close()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which both packages are installed."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--target", folder, *(EXAMPLES / name for name in PACKAGES)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return folder


def call(*command: str | Path, site: Path, cwd: Path, **more: str) -> str:
    environment: Mapping[str, str] = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "ATTNLENS"))},
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_its_own_tests_pass_from_its_own_folder(name: str, site: Path) -> None:
    folder = EXAMPLES / name
    tested = call("pytest", "-q", "-p", "no:cacheprovider", "tests", site=site, cwd=folder)
    assert " passed" in tested
    assert " failed" not in tested


def test_a_run_lists_uses_and_observes_them(site: Path, tmp_path: Path) -> None:
    stand_in = tmp_path / "stand-in"
    (stand_in / "tensorboardX").mkdir(parents=True)
    (stand_in / "tensorboardX" / "__init__.py").write_text(STAND_IN)
    both = Path(f"{stand_in}{os.pathsep}{site}")

    listed = call("attnlens", "plugins", "--check", site=both, cwd=tmp_path)
    rows = {line.split()[0]: line for line in listed.splitlines() if line.strip()}
    assert rows["distance"].rstrip().endswith("ok")
    assert "observer" in rows["tensorboard"]
    assert "distance.near" in call(
        "attnlens", "plugins", "show", "distance", site=both, cwd=tmp_path
    )

    call(
        "attnlens", "run", "--plugins", "distance", "-o", "distance.near=2", "--samples", "2",
        "--length", "24", "--twins", "1", "--out", "out", "demo",
        site=both, cwd=tmp_path, ATTNLENS_TENSORBOARD=str(tmp_path / "events"),
    )  # fmt: skip
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    (entry,) = record["analyses"]
    assert entry["status"] == "ok"
    assert entry["options"]["near"] == 2
    claims = {f["claim"]: f for f in record["findings"]}
    assert claims["previous-token-heads"]["holds"], "the demo model has a previous-token head"
    assert (tmp_path / "out" / "distance" / "figures" / "profile.png").is_file()
    if importlib.util.find_spec("tensorboard"):  # which the observer prefers
        return
    lines = (tmp_path / "events" / "demo" / "events.jsonl").read_text().splitlines()
    events = {(e["kind"], e["tag"]): e for e in map(json.loads, lines)}
    assert ("scalar", "distance/distance") in events
    assert ("scalar", "distance/distance_twin") in events
    assert ("image", "distance/profile") in events
