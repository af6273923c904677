"""The hooks that plugins implement, and the version of this interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    import xarray as xr

    from attnlens.analysis import Analysis
    from attnlens.view import View

#: Raised when something that plugins rely on changes; see ``Analysis.requires_api``.
API_VERSION: Final = 1

#: Name of the pluggy project, and prefix of every hook.
PROJECT: Final = "attnlens"

#: Entry-point group of analyses: one entry point registers one analysis.
ANALYSES: Final = "attnlens.plugins"

#: Entry-point group of observers, which are loaded on every run.
OBSERVERS: Final = "attnlens.observers"

hookspec = pluggy.HookspecMarker(PROJECT)

#: Decorator that marks a function as the implementation of a hook.
hookimpl = pluggy.HookimplMarker(PROJECT)


class AnalysisHooks:
    """What the module behind an entry point of ``attnlens.plugins`` implements."""

    @hookspec(firstresult=True)
    def attnlens_register_analysis(self) -> type[Analysis]:  # type: ignore[empty-body]
        """Return the :class:`attnlens.Analysis` class that this plugin offers."""


class ObserverHooks:
    """What an observer may implement."""

    @hookspec
    def attnlens_before_analysis(self, name: str, store: View) -> None:
        """Learn that the analysis `name` is about to read `store`."""

    @hookspec
    def attnlens_after_analysis(self, name: str, result: xr.Dataset) -> None:
        """Learn what the analysis `name` found; the result is already saved."""

    @hookspec
    def attnlens_analysis_failed(self, name: str, error: Exception) -> None:
        """Learn that the analysis `name` failed, and why."""
