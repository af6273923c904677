"""Which layers, heads and positions of a model were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from attnlens.errors import OptionError

if TYPE_CHECKING:
    from attnlens.models import ModelFacts


def kv_heads(facts: ModelFacts, heads: Sequence[int] | None) -> tuple[int, ...]:
    """Return the key-value heads that some query heads read (``h // group``)."""
    group = facts.n_heads // facts.n_kv_heads
    wanted = range(facts.n_heads) if heads is None else heads
    return tuple(sorted({head // group for head in wanted}))


def chosen_indices(what: str, chosen: Iterable[int] | None, size: int) -> tuple[int, ...] | None:
    """Return chosen layers or heads, rising; None for all.

    Parameters
    ----------
    what : {"layer", "head"}
        For messages.
    chosen : iterable of int or None
        Negative ones count from the end.
    size : int
        How many the model has.

    Raises
    ------
    OptionError
        If one does not exist, or none was chosen.
    """
    if chosen is None:
        return None
    wanted = sorted({int(i) for i in chosen})
    if not wanted:
        raise OptionError(f"No {what} was chosen.")
    for index in wanted:
        if not -size <= index < size:
            raise OptionError(
                f"{what} {index} does not exist.", hint=f"The model has {what}s 0 to {size - 1}."
            )
    return tuple(sorted({index % size for index in wanted}))


def chosen_positions(
    chosen: Iterable[int] | Literal["last"] | None, lengths: Sequence[int]
) -> tuple[int, ...] | None:
    """Return chosen positions in the order of the text; None for all.

    Those counted from the end stay negative where prompts differ in length.

    Parameters
    ----------
    chosen : iterable of int, or "last", or None
    lengths : sequence of int
        Of all prompts.

    Raises
    ------
    OptionError
        If one does not exist in every prompt, or none was chosen.
    """
    if chosen is None:
        return None
    if isinstance(chosen, str) and chosen != "last":
        raise OptionError(f"positions {chosen!r} is neither 'last' nor a list of positions.")
    wanted = [-1] if isinstance(chosen, str) else [int(p) for p in chosen]
    if not wanted:
        raise OptionError("No position was chosen.")
    shortest = min(lengths)
    for position in wanted:
        if not -shortest <= position < shortest:
            raise OptionError(
                f"position {position} does not exist in every prompt.",
                hint=f"The shortest prompt has {shortest} tokens.",
            )
    if max(lengths) == shortest:
        wanted = [position % shortest for position in wanted]
    return tuple(sorted(set(wanted), key=lambda p: (p < 0, p)))
