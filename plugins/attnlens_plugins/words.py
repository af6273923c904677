"""Sentences that several analyses write."""

from __future__ import annotations


def span(low: float, high: float, form: str = "{:.2f}") -> str:
    """Write a range, or its one value where both ends read the same.

    Parameters
    ----------
    low, high : float
    form : str
        How a value is written, such as ``"{:.0%}"``.
    """
    first, last = form.format(low), form.format(high)
    return first if first == last else f"{first} to {last}"


def heads_that(count: int, total: int, phrase: str) -> str:
    """Write what some of all heads do, in the singular where it is one.

    Parameters
    ----------
    count, total : int
    phrase : str
        Begins with a verb in the plural: ``"put half of their attention there"``.
    """
    if count == 1:
        verb, _, rest = phrase.partition(" ")
        verb = {"have": "has", "are": "is"}.get(verb, f"{verb}s")
        phrase = f"{verb} {rest}".replace(" their ", " its ")
    return f"{count} of {total} heads {phrase}"
