"""An algebraic health check for transformer attention.

``attnlens.run("demo", plugins=["cp", "spectrum"])`` captures what the analyses need in one pass,
runs them, and writes a report. Importing this package imports neither torch nor matplotlib: each
name below is fetched when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlens import decomposition, errors, figures, nulls, testing
    from attnlens.analysis import (
        Analysis,
        Finding,
        Highlight,
        Skip,
        figure,
        highlight,
        table,
    )
    from attnlens.attention import Attention
    from attnlens.corpora import CorpusSpec
    from attnlens.hookspecs import API_VERSION, hookimpl
    from attnlens.models import load_model
    from attnlens.options import Options
    from attnlens.recorder import capture
    from attnlens.runner import analyze, run
    from attnlens.runs import Run, open_run
    from attnlens.statistics import Statistic
    from attnlens.store import Store, open_store

_HOMES = {
    "API_VERSION": "hookspecs",
    "Analysis": "analysis",
    "Attention": "attention",
    "CorpusSpec": "corpora",
    "Finding": "analysis",
    "Highlight": "analysis",
    "Options": "options",
    "Run": "runs",
    "Skip": "analysis",
    "Statistic": "statistics",
    "Store": "store",
    "analyze": "runner",
    "capture": "recorder",
    "figure": "analysis",
    "highlight": "analysis",
    "hookimpl": "hookspecs",
    "load_model": "models",
    "open_run": "runs",
    "open_store": "store",
    "run": "runner",
    "table": "analysis",
}
_MODULES = ("decomposition", "errors", "figures", "nulls", "testing")

__all__ = [
    "API_VERSION",
    "Analysis",
    "Attention",
    "CorpusSpec",
    "Finding",
    "Highlight",
    "Options",
    "Run",
    "Skip",
    "Statistic",
    "Store",
    "analyze",
    "capture",
    "decomposition",
    "errors",
    "figure",
    "figures",
    "highlight",
    "hookimpl",
    "load_model",
    "nulls",
    "open_run",
    "open_store",
    "run",
    "table",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"attnlens.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"attnlens.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name == "__version__":
        from importlib.metadata import version

        return version("attnlens")
    raise AttributeError(f"module 'attnlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
