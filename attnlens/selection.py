"""Which analyses to run, with which options, in which order. Settled before any model loads."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlens.activations import nearest
from attnlens.analysis import Analysis
from attnlens.contract import check_class
from attnlens.errors import (
    AttnlensError,
    BrokenPluginError,
    OptionError,
    UnknownPluginError,
    UsageError,
)
from attnlens.needs import Need
from attnlens.plugins import Plugin, check_disabled, discover, enabled, find, load_analysis


@dataclass(frozen=True)
class Selected:
    """One analysis that will run.

    Attributes
    ----------
    analysis : Analysis
    distribution, version : str
        Where it comes from; empty for a class handed over in Python.
    """

    analysis: Analysis
    distribution: str = ""
    version: str = ""

    @property
    def name(self) -> str:
        """The analysis's name."""
        return self.analysis.name

    @property
    def needs(self) -> list[Need]:
        """What it asks for."""
        return self.analysis.needs()


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Read options from a TOML file with a table for each analysis.

    Raises
    ------
    OptionError
        If the file cannot be read, or holds something else than tables.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"The file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"The file {path} is not valid TOML: {error}.") from error
    for name, value in content.items():
        if not isinstance(value, dict):
            raise OptionError(
                f"In {path}, {name!r} stands outside a table.",
                hint=f"Options stand in the table of their analysis, as in [cp] and {name} = ...",
            )
    return content


def read_assignments(assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read ``plugin.option=value`` items.

    Raises
    ------
    OptionError
        If an item has another form.
    """
    options: dict[str, dict[str, Any]] = {}
    for item in assignments:
        target, equals, value = item.partition("=")
        plugin, dot, option = target.strip().rpartition(".")
        if not (equals and dot and plugin and option):
            raise OptionError(
                f"{item!r} is not of the form PLUGIN.OPTION=VALUE.", hint="For example cp.rank=8."
            )
        options.setdefault(plugin, {})[option] = value
    return options


def select(
    wanted: Sequence[str | Analysis | type[Analysis]],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    disabled: Iterable[str] = (),
) -> list[Selected]:
    """Load what was asked for, and what that requires, in an order in which it can run.

    Parameters
    ----------
    wanted : sequence
        Names (``name`` or ``distribution:name``), classes or instances.
    options : mapping from analysis name to options, optional
    disabled : iterable of str

    Raises
    ------
    PluginError
        If a selected plugin cannot be used.
    UsageError
        If a name, an option or a value is wrong.
    """
    options = {name: dict(given) for name, given in (options or {}).items()}
    disabled = tuple(disabled)
    check_disabled(disabled)
    installed = enabled(discover(), disabled)
    chosen: dict[str, Selected] = {}
    for item in wanted:
        one = _make(item, options, installed)
        if one.name in chosen:
            raise UsageError(f"The analysis {one.name!r} was chosen twice.")
        chosen[one.name] = one

    queue = list(chosen.values())
    while queue:
        for need in queue.pop().needs:
            if need.kind == "analysis" and need.name not in chosen:
                chosen[need.name] = _make(need.name, options, installed)
                queue.append(chosen[need.name])

    for name in options:
        if name not in chosen and not any(
            s.distribution + ":" + s.name == name for s in chosen.values()
        ):
            near = nearest(name, chosen)
            raise OptionError(
                f"Options were given for {name!r}, which does not run.",
                hint=(f"Did you mean {near!r}? " if near else "") + f"Chosen: {', '.join(chosen)}.",
            )
    return _ordered(chosen)


def _make(
    item: str | Analysis | type[Analysis],
    options: Mapping[str, Mapping[str, Any]],
    installed: Sequence[Plugin],
) -> Selected:
    if isinstance(item, Analysis):
        check_class(type(item))
        if options.get(item.name):
            raise OptionError(f"{item.name} was given as an instance, with its options in it.")
        return Selected(item)
    if not isinstance(item, str):
        check_class(item)
        return Selected(_build(item, options.get(item.name, {})))
    plugin = find(item, installed)
    given = {**options.get(plugin.name, {}), **options.get(plugin.qualified, {})}
    return Selected(_build(load_analysis(plugin), given), plugin.distribution, plugin.version)


def _build(kind: type[Analysis], options: Mapping[str, Any]) -> Analysis:
    """Make an analysis; what its own code raises is said to be its own."""
    try:
        analysis = kind(**options)
        analysis.needs()
    except AttnlensError:
        raise
    except Exception as error:
        raise BrokenPluginError(
            f"The analysis {kind.name!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return analysis


def _ordered(chosen: Mapping[str, Selected]) -> list[Selected]:
    order: list[Selected] = []
    state: dict[str, str] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if state.get(name) == "done":
            return
        if state.get(name) == "open":
            raise UsageError(f"Analyses require each other: {' -> '.join((*trail, name))}.")
        state[name] = "open"
        for need in chosen[name].needs:
            if need.kind == "analysis":
                visit(need.name, (*trail, name))
        state[name] = "done"
        order.append(chosen[name])

    for name in chosen:
        visit(name, ())
    return order


def default_names(disabled: Iterable[str] = ()) -> list[str]:
    """Return the names of the built-in analyses that are installed and not disabled."""
    names = [p.name for p in enabled(discover(), disabled) if p.distribution == "attnlens"]
    if not names:
        raise UnknownPluginError("No analysis is installed or enabled.")
    return names
