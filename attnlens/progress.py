"""How long work tells how far it is, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """What the core calls while it works; the command line draws bars, notebooks stay silent."""

    def stage(
        self, text: str, total: int | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Enter one stage of the work; the value is called with the number of steps done."""
        ...

    def note(self, text: str) -> None:
        """Tell something that a person should know."""
        ...


class Silent:
    """Tells nothing."""

    @contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Enter one stage of the work."""
        yield lambda steps: None

    def note(self, text: str) -> None:
        """Drop the note."""
