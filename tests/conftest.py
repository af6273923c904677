"""Fixtures that every room shares."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine is no fault of the code: how long an example takes is measured in benchmarks/.
settings.register_profile("attnlens", deadline=None)
settings.load_profile("attnlens")

DISTRIBUTIONS = Path(__file__).parent / "distributions"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Lay out packages of tests/distributions as an installer would; return their folder."""
    site = tmp_path / "site-packages"
    site.mkdir()
    modules: list[str] = []

    def lay_out(*names: str) -> Path:
        for name in names:
            source = DISTRIBUTIONS / name
            project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
            for file in source.glob("*.py"):
                shutil.copy(file, site)
                modules.append(file.stem)
            info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
            )
            lines = []
            for group, entries in project["entry-points"].items():
                lines.append(f"[{group}]")
                lines += [f"{key} = {value}" for key, value in entries.items()]
            (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        return site

    monkeypatch.syspath_prepend(str(site))
    yield lay_out
    for module in modules:
        sys.modules.pop(module, None)
