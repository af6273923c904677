"""Running out of memory: one plain message, and before it happens where that can be told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attnlens.errors import OutOfMemoryError
from attnlens.models.facts import ModelFacts

_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad alloc")


@contextmanager
def memory_errors(facts: ModelFacts, doing: str, hint: str) -> Iterator[None]:
    """Turn any way of running out of memory into `OutOfMemoryError`.

    Parameters
    ----------
    facts : ModelFacts
        For the message: name, size, dtype, device.
    doing : str
        What was being done, "loading it".
    hint : str
        What to do about it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        raise OutOfMemoryError(
            f"the memory of {facts.device or 'the device'} ran out while {doing}: {facts.name!r} "
            f"has {human(facts.size)} of {facts.dtype} parameters",
            hint=hint,
        ) from error


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)


def refuse_too_big(facts: ModelFacts, device: str) -> None:
    """Refuse to load a model that the machine's free memory cannot hold.

    Linux ends a process that takes too much without a word, so this is said beforehand.

    Raises
    ------
    OutOfMemoryError
    """
    if device == "cpu":
        import psutil

        free = psutil.virtual_memory().available + psutil.swap_memory().free
    elif device.startswith("cuda") and torch.cuda.is_available():
        free = torch.cuda.mem_get_info(torch.device(device))[0]
    else:
        return
    if facts.size > free:
        raise OutOfMemoryError(
            f"{facts.name!r} has {human(facts.size)} of {facts.dtype} parameters, but only "
            f"{human(free)} of memory is free on {device}",
            hint="Try dtype float16 or bfloat16, a smaller model, or a device map.",
        )


def human(size: float) -> str:
    """Write a number of bytes for people: 548.1 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
