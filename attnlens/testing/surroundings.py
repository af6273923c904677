"""What an analysis must leave as it was: the process it runs in, its folder, its own class."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class _Setting(NamedTuple):
    """Something of the process that whoever runs in it shares with everybody."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _settings() -> list[_Setting]:
    import matplotlib
    import torch

    return [
        _Setting("the environment variables", lambda: dict(os.environ), _put_environment),
        _Setting("the working directory", os.getcwd, os.chdir),
        _Setting("Python's global random state", random.getstate, random.setstate),
        _Setting("numpy's global random state", _numpy_state, np.random.set_state),
        _Setting("numpy's error settings", np.geterr, lambda kept: np.seterr(**kept)),
        _Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        _Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
        _Setting("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
        _Setting(
            "torch's global random state",
            lambda: torch.get_rng_state().tolist(),
            lambda kept: torch.set_rng_state(torch.tensor(kept, dtype=torch.uint8)),
        ),
        _Setting(
            "matplotlib's settings",
            _matplotlib_settings,
            lambda kept: dict.update(matplotlib.rcParams, kept),
        ),
        _Setting("the figures that pyplot holds", _open_figures, _close_figures),
    ]


def _put_environment(kept: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(kept)


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return (name, np.asarray(keys).tolist(), *rest)


def _matplotlib_settings() -> dict[str, Any]:
    import matplotlib

    # Importing pyplot, as other libraries do, settles the backend.
    kept = matplotlib.rcParams.copy()
    return {name: kept[name] for name in kept if not name.startswith("backend")}


def _open_figures() -> list[int]:
    pyplot = sys.modules.get("matplotlib.pyplot")
    return list(pyplot.get_fignums()) if pyplot else []


def _close_figures(kept: list[int]) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    for number in set(_open_figures()) - set(kept):
        pyplot.close(number)  # type: ignore[union-attr]


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put back, at the end, whatever was changed of the process."""
    before = [(setting, setting.get()) for setting in _settings()]
    try:
        yield
    finally:
        for setting, was in before:
            if setting.get() != was:
                setting.put(was)


@contextlib.contextmanager
def watched(*, anywhere: bool = False) -> Iterator[list[str]]:
    """List, at the end, what was changed of the process, printed or written.

    Parameters
    ----------
    anywhere : bool
        List what was written wherever it lies, rather than in the working directory alone.
    """
    changes: list[str] = []
    before = [(setting, setting.get()) for setting in _settings()]
    folder = Path.cwd()
    with contextlib.redirect_stdout(io.StringIO()) as printed, _writing() as written:
        yield changes
    for setting, was in before:
        now = setting.get()
        if now != was:
            changes.append(f"changed {setting.name}{_keys(was, now)}")
    if printed.getvalue().strip():
        changes.append(f"printed {printed.getvalue().strip()[:60]!r}")
    changes += [
        f"wrote {path}"
        for path in dict.fromkeys(written)
        if anywhere or path.is_relative_to(folder)
    ]


def _keys(was: Any, now: Any) -> str:
    if not isinstance(was, dict):
        return ""
    missing = object()
    names = [n for n in {**was, **now} if was.get(n, missing) != now.get(n, missing)]
    return f" {', '.join(names)}"


#: Lists that are being filled with the paths that are written.
_listening: list[list[Path]] = []

_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _hear(event: str, args: tuple[Any, ...]) -> None:
    """Note a file that is opened for writing, made, moved or removed; an audit hook."""
    if not _listening:
        return
    if event == "open":
        path, _, flags = args
        if not (flags or 0) & _TO_WRITE:
            return
    elif event in ("os.mkdir", "os.remove", "os.rename"):
        path = args[0]
    else:
        return
    if isinstance(path, (str, bytes, os.PathLike)):
        place = Path(os.fsdecode(path)).absolute()
        # Python itself keeps what it compiled there.
        if "__pycache__" not in place.parts and place != Path(os.devnull):
            for heard in _listening:
                heard.append(place)


@cache
def _start_hearing() -> None:
    # An audit hook cannot be removed: it is added once, and does nothing unless somebody listens.
    sys.addaudithook(_hear)


@contextlib.contextmanager
def _writing() -> Iterator[list[Path]]:
    _start_hearing()
    heard: list[Path] = []
    _listening.append(heard)
    try:
        yield heard
    finally:
        # Lists that are equal are not the same.
        del _listening[next(i for i, one in enumerate(_listening) if one is heard)]


def class_state(kind: type, base: type) -> dict[str, Any]:
    """Return the attributes of a class and of those that it derives from, down to `base`."""
    return {
        f"{owner.__name__}.{name}": repr(value) if isinstance(value, (list, dict, set)) else value
        for owner in kind.__mro__
        if owner not in base.__mro__
        for name, value in vars(owner).items()
        if not (name.startswith("__") or name == "_abc_impl")
    }


def changed_state(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name the attributes in which two states of a class differ."""
    missing = object()

    def same(was: Any, now: Any) -> bool:
        return was is now or (isinstance(now, str) and was == now)

    names = {**before, **after}
    return [n for n in names if not same(before.get(n, missing), after.get(n, missing))]
