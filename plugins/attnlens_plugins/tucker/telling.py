"""Interactions in words: which heads, on which tokens, write which direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import attnlens
from attnlens_plugins.cp.tensors import Floats
from attnlens_plugins.cp.words import top_tokens

#: Least share of a factor's largest entry for a head to be named.
_NAMED = 0.4


def describe_heads(factor: Floats, names: Sequence[str]) -> list[str]:
    """Name the heads that make up each column, those of opposite sign after "against"."""
    found = []
    for column in factor.T:
        order = np.argsort(-np.abs(column), kind="stable")
        strong = [i for i in order if abs(column[i]) >= _NAMED * abs(column[order[0]])]
        plus = [names[i] for i in strong if column[i] > 0][:4]
        minus = [names[i] for i in strong if column[i] < 0][:4]
        rest = len(strong) - len(plus) - len(minus)
        text = "heads " if len(plus) != 1 else "head "
        text += ", ".join(plus)
        if minus:
            text += f" against {', '.join(minus)}"
        found.append(text + (f" and {rest} more" if rest > 0 else ""))
    return found


def _quoted(token: str) -> str:
    return f"“{attnlens.figures.visible_token(token)}”"


def describe_tokens(factor: Floats, text: Sequence[str]) -> list[str]:
    """Name the tokens on which each column is largest; say when it is on all alike."""
    tops = top_tokens(factor, text, 4)
    found = []
    for r, column in enumerate(factor.T):
        size = np.abs(column)
        if np.abs(column.mean()) > 0.9 * np.sqrt(np.mean(column**2)):
            found.append("all tokens alike")
            continue
        signs = [
            " ".join(_quoted(token) for token, value in tops[r] if (value > 0) == positive)
            for positive in (True, False)
        ]
        share = float((size > 0.5 * size.max()).mean())
        where = "few tokens" if share < 0.02 else "tokens"
        named = " against ".join(words for words in signs if words)
        found.append(f"{where} such as {named}")
    return found


def describe_positions(factor: Floats, positions: Any, what: str) -> list[str]:
    """Say at which positions each column is large."""
    found = []
    for column in factor.T:
        weight = column**2 / max(float((column**2).sum()), 1e-300)
        middle = float((weight * positions).sum())
        spread = float(np.sqrt((weight * (positions - middle) ** 2).sum()))
        found.append(f"{what} about position {middle:.0f} (±{spread:.0f})")
    return found


def describe_directions(words: Any, what: str) -> list[str]:
    """Name directions by the tokens of either end, as `what` puts it."""
    found = []
    for c in range(words.shape[0]):
        up, down = (" ".join(_quoted(str(t)) for t in words[c, end, :3]) for end in (0, 1))
        found.append(what.format(up, down))
    return found


def sentence(parts: Sequence[str], share: float, sign: float) -> str:
    """Tell one interaction."""
    heads, second, third = parts
    turned = "" if sign > 0 else " (with the opposite sign)"
    return f"{heads[0].upper()}{heads[1:]}, {second}: {third}{turned}; {share:.1%} of the energy."
