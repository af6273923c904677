"""One thread that works behind the forward pass, at a bounded distance."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from attnlens.plan.estimates import WAITING


class Background:
    """Run calls one after another on a thread of its own, while the caller goes on.

    At most `depth` calls wait: a caller that is faster than the thread is held back, so memory
    stays bounded. The first error stops the work and is raised in the caller, at its next call or
    on leaving the ``with`` block. If the block is left by an error of its own (an interrupt, say),
    what still waits is dropped; either way nothing runs any more when the block has been left.

    Parameters
    ----------
    depth : int, optional
        How many calls may wait.
    """

    def __init__(self, depth: int = WAITING) -> None:
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=depth)
        self._error: BaseException | None = None
        self._dropping = False
        self._thread = threading.Thread(target=self._work, name="attnlens-writer", daemon=True)

    def _work(self) -> None:
        # Goes on taking after an error, or the caller would wait for ever on a full queue.
        while (call := self._waiting.get()) is not None:
            if not self._dropping:
                try:
                    call()
                except BaseException as error:
                    self._error = error
                    self._dropping = True
            del call

    def submit(self, call: Callable[[], None]) -> None:
        """Hand over one call; waits while `depth` calls are waiting.

        Raises
        ------
        BaseException
            Whatever an earlier call raised.
        """
        self._raise()
        self._waiting.put(call)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._dropping = True
        self._waiting.put(None)
        self._thread.join()
        if kind is None:
            self._raise()
