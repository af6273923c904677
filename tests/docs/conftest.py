"""The documentation's files, and its generator as a module."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attnlens

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "api" not in p.parts)


@pytest.fixture(scope="session")
def generate() -> Any:
    """Return ``docs/generate.py`` as a module."""
    spec = importlib.util.spec_from_file_location("attnlens_docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let runs and captures be small unless the example says otherwise, in a new folder."""
    monkeypatch.chdir(tmp_path)
    few = {"samples": 2, "length": 16}
    monkeypatch.setattr(attnlens, "run", functools.partial(attnlens.run, twins=1, **few))
    monkeypatch.setattr(attnlens, "capture", functools.partial(attnlens.capture, **few))
    yield
