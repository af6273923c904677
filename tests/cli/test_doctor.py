"""``attnlens doctor`` sees what will go wrong before it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attnlens", "doctor"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def rows(output: str) -> dict[str, tuple[str, str]]:
    """Return what was looked at: its mark and what was seen."""
    found = {}
    for line in output.splitlines():
        mark, _, rest = line.partition("  ")
        what, _, seen = rest.strip().partition("  ")
        if mark.strip() in ("ok", "note", "PROBLEM"):
            found[what] = (mark.strip(), seen.strip())
    return found


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place in which nobody, not even root, can make a folder."""
    file = tmp_path_factory.mktemp("blocked") / "file"
    file.write_text("")
    return file / "x"


@pytest.fixture(scope="module")
def ill(blocked: Path) -> subprocess.CompletedProcess[str]:
    return doctor(
        HF_HOME=str(blocked), HF_HUB_CACHE=str(blocked / "hub"), MPLCONFIGDIR=str(blocked)
    )


def test_a_hub_cache_that_cannot_be_written_is_said(
    ill: subprocess.CompletedProcess[str], blocked: Path
) -> None:
    mark, seen = rows(ill.stdout)["hub cache"]
    assert mark == "note"
    assert "cannot be written" in seen
    assert "set HF_HOME to a writable folder" in ill.stdout


def test_matplotlib_s_folder_has_a_row_and_no_warning_of_its_own(
    ill: subprocess.CompletedProcess[str],
) -> None:
    assert rows(ill.stdout)["figures"][0] == "note"
    assert "Set MPLCONFIGDIR to a writable folder" in ill.stdout
    assert ill.stderr == ""


def test_a_machine_that_is_well_is_told_so_with_all_versions(tmp_path: Path) -> None:
    well = doctor(HF_HOME=str(tmp_path / "hf"), HF_HUB_CACHE=str(tmp_path / "hf" / "hub"))
    found = rows(well.stdout)
    assert found["hub cache"][0] == found["figures"][0] == found["self-test"][0] == "ok"
    for name in ("pandas", "pydantic", "typer", "datasets", "umap-learn", "safetensors",
                 "huggingface-hub", "torch", "transformers"):  # fmt: skip
        assert name in found, name
    assert not (tmp_path / "hf").exists()
