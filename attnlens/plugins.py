"""Finding, loading and isolating plugins.

Discovery reads the metadata of installed distributions and imports nothing. Each plugin is loaded
into a plugin manager of its own, so that one which is broken cannot touch another.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from attnlens.activations import nearest
from attnlens.errors import (
    AttnlensError,
    BrokenPluginError,
    NeedError,
    PluginConflictError,
    PluginVersionError,
    UnknownPluginError,
)
from attnlens.hookspecs import (
    ANALYSES,
    API_VERSION,
    OBSERVERS,
    PROJECT,
    AnalysisHooks,
    ObserverHooks,
)

if TYPE_CHECKING:
    import pluggy

    from attnlens.analysis import Analysis

log = logging.getLogger("attnlens")

#: Restricts the plugins: ``cp,spectrum`` allows these alone, ``-bad`` allows all but that.
ENVIRONMENT_VARIABLE = "ATTNLENS_PLUGINS"


@dataclass(frozen=True)
class Plugin:
    """One entry point, as its distribution's metadata describes it. Nothing is imported.

    Attributes
    ----------
    name : str
    distribution, version : str
        The installed package that offers it.
    target : str
        What would be imported.
    group : str
        The entry-point group.
    """

    name: str
    distribution: str
    version: str
    target: str
    group: str
    _entry: metadata.EntryPoint = field(repr=False, compare=False)

    @property
    def qualified(self) -> str:
        """``distribution:name``, which tells two plugins of one name apart."""
        return f"{self.distribution}:{self.name}"

    def load(self) -> Any:
        """Import what the entry point names.

        Raises
        ------
        BrokenPluginError
            Whatever the import raises, ``SystemExit`` included.
        """
        try:
            return self._entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise BrokenPluginError(
                f"The plugin {self.name!r} of {self.distribution} {self.version} cannot be "
                f"imported: {type(error).__name__}: {error}",
                hint=f"Repair or uninstall {self.distribution}, or leave the plugin out with "
                f"--no-plugin {self.name}.",
            ) from error


def discover(group: str = ANALYSES) -> list[Plugin]:
    """List the installed plugins by name, importing none of them.

    Parameters
    ----------
    group : str
        Entry-point group.
    """
    found: dict[tuple[str, str], Plugin] = {}
    for entry in metadata.entry_points(group=group):
        name = entry.dist.metadata["Name"] if entry.dist else "unknown"
        version = entry.dist.version if entry.dist else "0"
        # The first on the path is the one that an import would take.
        found.setdefault(
            (name, entry.name), Plugin(entry.name, name, version, entry.value, group, entry)
        )
    return sorted(found.values(), key=lambda p: (p.name, p.distribution))


def enabled(plugins: Iterable[Plugin], disabled: Iterable[str] = ()) -> list[Plugin]:
    """Leave out what the caller or the environment variable ``ATTNLENS_PLUGINS`` disables."""
    setting = os.environ.get(ENVIRONMENT_VARIABLE)
    words = [] if setting is None else [w.strip() for w in setting.split(",") if w.strip()]
    barred = {*disabled, *(w[1:] for w in words if w.startswith("-"))}
    only = {w for w in words if not w.startswith("-")}
    restrict = bool(only) or setting == ""

    def allowed(plugin: Plugin) -> bool:
        names = {plugin.name, plugin.qualified}
        return not names & barred and (not restrict or bool(names & only))

    return [p for p in plugins if allowed(p)]


def check_disabled(names: Iterable[str]) -> None:
    """Refuse to disable what is not installed: most likely it is misspelt, and would run.

    Raises
    ------
    UnknownPluginError
    """
    installed = [*discover(), *discover(OBSERVERS)]
    known = {name for p in installed for name in (p.name, p.qualified)}
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise UnknownPluginError(
                f"There is no plugin {name!r} to disable.",
                hint=(f"Did you mean {near!r}? " if near else "") + "See `attnlens plugins`.",
            )


def find(name: str, plugins: Sequence[Plugin]) -> Plugin:
    """Return the one plugin of that name.

    Parameters
    ----------
    name : str
        ``name``, or ``distribution:name`` where two distributions offer the same name.
    plugins : sequence of Plugin

    Raises
    ------
    UnknownPluginError
        If there is none; the message names the nearest.
    PluginConflictError
        If there are several.
    """
    matches = [p for p in plugins if name in (p.name, p.qualified)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        who = " and ".join(f"{p.distribution} {p.version}" for p in matches)
        raise PluginConflictError(
            f"The plugin name {name!r} is offered by {who}.",
            hint="Choose one: " + " or ".join(p.qualified for p in matches) + ".",
        )
    if any(name in (p.name, p.qualified) for p in discover()):
        raise UnknownPluginError(
            f"The plugin {name!r} is installed but disabled.",
            hint=f"Look at --no-plugin and at the variable {ENVIRONMENT_VARIABLE}.",
        )
    if any(name in (p.name, p.qualified) for p in discover(OBSERVERS)):
        raise UnknownPluginError(
            f"{name!r} is an observer, not an analysis.",
            hint="It is told about every run and is not chosen; --no-plugin leaves it out. "
            f"`attnlens plugins show {name}` explains it.",
        )
    names = sorted({p.name for p in plugins})
    near = nearest(name, names)
    raise UnknownPluginError(
        f"There is no plugin {name!r}.",
        hint=(f"Did you mean {near!r}? " if near else "")
        + f"Installed: {', '.join(names) or 'none'}. A package of your own is found once it is "
        "installed (pip install -e FOLDER).",
    )


def load_analysis(plugin: Plugin) -> type[Analysis]:
    """Import one plugin and return its analysis.

    Raises
    ------
    BrokenPluginError
        If it cannot be imported, implements no or a misspelt hook, or returns something else
        than an analysis of its own name.
    PluginVersionError
        If it needs a newer interface.
    """
    from attnlens.contract import check_class

    module = plugin.load()
    manager = _manager(AnalysisHooks, plugin, module)
    if not manager.hook.attnlens_register_analysis.get_hookimpls():
        raise _broken(
            plugin,
            "it implements no hook attnlens_register_analysis",
            "Decorate a function of that name with @attnlens.hookimpl.",
        )
    try:
        found: Any = manager.hook.attnlens_register_analysis()
    except AttnlensError:
        raise
    except Exception as error:
        raise _broken(
            plugin, f"attnlens_register_analysis raised {type(error).__name__}: {error}"
        ) from error
    if getattr(found, "requires_api", 0) > API_VERSION:
        raise PluginVersionError(
            f"The plugin {plugin.name!r} of {plugin.distribution} {plugin.version} needs version "
            f"{found.requires_api} of the plugin interface; this attnlens has {API_VERSION}.",
            hint="Upgrade attnlens, or install an older version of the plugin.",
        )
    try:
        check_class(found, _who(plugin))
    except NeedError as error:
        raise _broken(plugin, error.message.removesuffix("."), error.hint) from error
    if found.name != plugin.name:
        raise _broken(
            plugin,
            f"its analysis calls itself {found.name!r}",
            f"The entry point's name and the class's `name` must both be {plugin.name!r}.",
        )
    kind: type[Analysis] = found
    return kind


def load_observer(plugin: Plugin) -> pluggy.PluginManager:
    """Import one observer and return the manager through which it is told.

    Raises
    ------
    BrokenPluginError
        If it cannot be imported or implements a misspelt hook.
    """
    return _manager(ObserverHooks, plugin, plugin.load())


def _manager(spec: type, plugin: Plugin, module: Any) -> pluggy.PluginManager:
    import pluggy

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(spec)
    try:
        manager.register(module, name=plugin.qualified)
        manager.check_pending()
    except Exception as error:
        known = [n for n in vars(spec) if n.startswith("attnlens_")]
        raise _broken(plugin, str(error), f"Hooks: {', '.join(known)}.") from error
    return manager


def _broken(plugin: Plugin, what: str, hint: str | None = None) -> BrokenPluginError:
    return BrokenPluginError(f"{_who(plugin)} cannot be used: {what}.", hint=hint)


def _who(plugin: Plugin) -> str:
    return f"The plugin {plugin.name!r} of {plugin.distribution} {plugin.version}"


class Observers:
    """The observers of one run; a failing observer is reported and costs nothing else.

    Parameters
    ----------
    disabled : iterable of str
        Names to leave out.
    """

    def __init__(self, disabled: Iterable[str] = ()) -> None:
        self._managers: list[tuple[Plugin, pluggy.PluginManager]] = []
        self.notes: list[str] = []
        for plugin in enabled(discover(OBSERVERS), disabled):
            try:
                self._managers.append((plugin, load_observer(plugin)))
            except BrokenPluginError as error:
                self._note(str(error))

    def _note(self, text: str) -> None:
        self.notes.append(text)
        log.warning("%s", text)

    def _tell(self, call: Callable[[Any], Any]) -> None:
        for plugin, manager in self._managers:
            try:
                call(manager.hook)
            except Exception as error:
                self._note(
                    f"The observer {plugin.name!r} of {plugin.distribution} failed: "
                    f"{type(error).__name__}: {error}"
                )

    def before(self, name: str, store: Any) -> None:
        """Tell that an analysis is about to start."""
        self._tell(lambda hook: hook.attnlens_before_analysis(name=name, store=store))

    def after(self, name: str, result: Any) -> None:
        """Tell that an analysis has finished and its result is saved."""
        self._tell(lambda hook: hook.attnlens_after_analysis(name=name, result=result))

    def failed(self, name: str, error: BaseException) -> None:
        """Tell that an analysis failed."""
        self._tell(lambda hook: hook.attnlens_analysis_failed(name=name, error=error))
