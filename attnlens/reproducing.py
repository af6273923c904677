"""How a run that was started from Python is started again: from a shell, or by the same call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlens.analysis import Analysis
from attnlens.corpora import CorpusSpec, as_corpus
from attnlens.errors import AttnlensError
from attnlens.plugins import discover, find, load_analysis

#: Arguments that decide nothing about the numbers.
_ASIDE = frozenset({"out", "overwrite", "resume", "command", "progress", "on_plan"})

#: Arguments that the shell takes as they are, and those that are switches there.
_PLAIN = (
    "samples", "length", "seed", "twins", "batch_size", "revision", "device", "dtype",
    "device_map",
)  # fmt: skip
_SWITCHES = ("verify_device", "trust_remote_code")

#: The option that names what each kind of corpus is read from.
_SOURCES = {"file": "--text-file", "dataset": "--dataset", "tokens": "--tokens"}

_MOST_TEXT = 4096


class _UnsayableError(Exception):
    """A value that has no form on the command line."""


def again(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Say how to call a function of the runner again.

    Parameters
    ----------
    function : callable
        ``attnlens.run`` or ``attnlens.analyze``.
    given : mapping
        Its arguments by name; others may be among them.

    Returns
    -------
    dict
        ``command``, the words of a shell command, where all arguments can be said in one; else
        ``command`` is empty and ``call`` is the Python call, in which a value that cannot be
        written stands by its name and is described behind it.
    """
    subject, *_ = parameters = inspect.signature(function).parameters
    asked = {
        name: given[name]
        for name, parameter in parameters.items()
        if name == subject or (name not in _ASIDE and not _same(given[name], parameter.default))
    }
    try:
        words = list(_options(asked, subject))
    except _UnsayableError:
        return {"command": [], "call": _call(f"attnlens.{function.__name__}", asked, subject)}
    return {"command": ["attnlens", function.__name__, *words, str(asked[subject])]}


def _same(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (str, int, list, tuple)) and value == default)


# -- a shell command ----------------------------------------------------------------------------


def _options(asked: Mapping[str, Any], subject: str) -> Iterator[str]:
    """Yield the words of the options, or raise where an argument cannot be said."""
    if not isinstance(asked[subject], (str, Path)):
        raise _UnsayableError
    names, own = _plugins(asked.get("plugins"))
    if names:
        yield from ("--plugins", ",".join(names))
    for plugin, options in {**(asked.get("options") or {}), **own}.items():
        for name, value in options.items():
            yield from ("-o", f"{plugin}.{name}={_text(value)}")
    for name in asked.get("disabled") or ():
        yield from ("--no-plugin", str(name))
    if "corpus" in asked:
        yield from _corpus(asked["corpus"], asked)
    for name in _PLAIN:
        if name in asked:
            if not isinstance(asked[name], (str, int)):
                raise _UnsayableError
            yield from (_flag(name), str(asked[name]))
    yield from (_flag(name) for name in _SWITCHES if asked.get(name))
    for name in ("layers", "heads", "positions"):
        if name in asked:
            yield from (_flag(name), _numbers(asked[name]))
    for name, dtype in (asked.get("dtypes") or {}).items():
        if dtype not in ("float16", "float32"):
            raise _UnsayableError
        yield from ("--store-dtype", f"{name}={dtype}")
    if "lean" in asked:
        yield "--lean" if asked["lean"] else "--no-lean"


def _plugins(given: Any) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the names of analyses, and the options of those that were given as objects."""
    names: list[str] = []
    options: dict[str, dict[str, Any]] = {}
    for item in given or ():
        if isinstance(item, str):
            names.append(item)
            continue
        kind: type[Analysis] = item if isinstance(item, type) else type(item)
        try:
            installed = load_analysis(find(kind.name, discover())) is kind
        except AttnlensError:
            installed = False
        if not installed:
            raise _UnsayableError
        names.append(kind.name)
        if isinstance(item, Analysis):
            chosen = item.options.model_dump(mode="json", exclude_unset=True)
            options[kind.name] = chosen
    return names, options


def _corpus(value: Any, asked: Mapping[str, Any]) -> Iterator[str]:
    try:
        spec = as_corpus(value)
    except AttnlensError:
        raise _UnsayableError from None
    if isinstance(value, CorpusSpec) and spec.seed != asked.get("seed", 0):
        raise _UnsayableError
    if spec.arrays is not None or spec.period is not None:
        raise _UnsayableError
    if spec.texts:
        if sum(map(len, spec.texts)) > _MOST_TEXT:
            raise _UnsayableError
        for text in spec.texts:
            yield from ("--text", text)
    elif spec.source is not None:
        yield from (_SOURCES[spec.name], spec.source)
    else:
        yield from ("--corpus", spec.name)
    if spec.chunk is not None:
        if spec.name != "file":
            raise _UnsayableError
        yield from ("--chunk", str(spec.chunk))
    for name in ("samples", "length"):
        number = getattr(spec, name)
        if number is not None and name not in asked:
            yield from (_flag(name), str(number))
    if spec.bos is not None:
        yield "--bos" if spec.bos else "--no-bos"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: Any) -> str:
    if isinstance(value, (str, Path)):
        return str(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise _UnsayableError from None


def _numbers(value: Any) -> str:
    if isinstance(value, str):
        return value
    numbers = [int(n) for n in value]
    if any(n < 0 for n in numbers):
        raise _UnsayableError
    return ",".join(map(str, numbers))


# -- a Python call ------------------------------------------------------------------------------


def _call(function: str, asked: Mapping[str, Any], subject: str) -> str:
    """Write the call, one argument a line where something has to be described."""
    lines, described = [], False
    for name, value in asked.items():
        try:
            written, about = _written(value), ""
        except _UnsayableError:
            written, about, described = name, f"  # {_described(value)}", True
        lines.append((f"{written}," if name == subject else f"{name}={written},") + about)
    if described:
        return "\n".join([f"{function}(", *(f"    {line}" for line in lines), ")"])
    return f"{function}({' '.join(lines).removesuffix(',')})"


def _written(value: Any) -> str:
    """Write a value as Python has it, or raise where that is long or impossible."""
    if isinstance(value, Path):
        text = f"Path({str(value)!r})"
    elif isinstance(value, type):
        text = value.__name__
    elif value is None or isinstance(value, (str, int, float, Analysis)):
        text = repr(value)
    elif isinstance(value, Mapping):
        pairs = [f"{name!r}: {_written(item)}" for name, item in value.items()]
        text = f"{{{', '.join(pairs)}}}"
    elif isinstance(value, Sequence):
        text = f"[{', '.join(map(_written, value))}]"
    else:
        raise _UnsayableError
    if len(text) > _MOST_TEXT:
        raise _UnsayableError
    return text


def _described(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}"
    return type(value).__name__ + (f" of {len(value)}" if hasattr(value, "__len__") else "")
