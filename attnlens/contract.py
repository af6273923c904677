"""What a class must have before a run can do anything with it."""

from __future__ import annotations

import inspect
import re
from typing import Any, NoReturn

from attnlens.analysis import Analysis
from attnlens.errors import BrokenPluginError
from attnlens.options import Options

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST_NAME = 60


def is_name(text: object) -> bool:
    """Return whether an analysis may be called this: its name is an option's and a folder's."""
    return (
        isinstance(text, str) and len(text) <= _LONGEST_NAME and _NAME.fullmatch(text) is not None
    )


def check_class(kind: Any, who: str = "") -> None:
    """Refuse a class with which no run could do anything.

    Parameters
    ----------
    kind : type
        What is to be an analysis.
    who : str, optional
        How the message begins; ``"The analysis CLASS"`` by default.

    Raises
    ------
    BrokenPluginError
        If it is no subclass of :class:`Analysis`, or lacks `compute`, a proper name or the right
        base of its options.
    NeedError
        If `requires` is no tuple, or names nothing that exists.
    """

    def refuse(what: str, hint: str | None) -> NoReturn:
        beginning = who or f"The analysis {getattr(kind, '__name__', repr(kind))}"
        raise BrokenPluginError(f"{beginning} cannot be used: {what}.", hint=hint)

    if not (inspect.isclass(kind) and issubclass(kind, Analysis)):
        refuse(f"{kind!r} is no analysis", "Derive a class from attnlens.Analysis.")
    if inspect.isabstract(kind):
        refuse(f"{kind.__name__} has no compute method", "Write `def compute(self, store)`.")
    name = getattr(kind, "name", None)
    if not is_name(name):
        refuse(
            f"its analysis calls itself {name!r}" if name else "it has no name",
            f"Set `name` to at most {_LONGEST_NAME} lower-case letters, digits and hyphens, as in "
            '"head-distance".',
        )
    if not (inspect.isclass(kind.Options) and issubclass(kind.Options, Options)):
        refuse(
            f"its Options is {kind.Options!r}",
            "Derive it from attnlens.Options: class Options(attnlens.Options).",
        )
    if not isinstance(inspect.getattr_static(kind, "requires"), property):
        kind.needs(kind.__new__(kind))
