"""How many components a tensor supports: split-half reproducibility."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STABLE = 0.7
"""Least factor match of a component with its like in the other half."""


@dataclass(frozen=True)
class RankSelection:
    """Which rank, why, and how sure.

    Attributes
    ----------
    ranks : tuple of int
        Ranks that were tried.
    errors, core_consistency : ndarray
        float64 ``[rank]``, of the fits of the whole tensor.
    stability : ndarray
        float64 ``[rank]``: worst component's factor match between halves, median over the splits.
    per_split : ndarray
        float64 ``[split, rank]``: the same for each split.
    chance : ndarray or None
        float64 ``[rank]``, of non-negative fits: 95 % of fits with shuffled loadings match worse
        than this (median over the splits). Non-negative components always match somewhat.
    chosen : int
        The largest rank whose `stability` exceeds 0.7; the smallest rank tried where none does.
    stable : bool
        Whether any rank did. If not, the tensor shows no components that come back.
    reason : str
        The choice, told in a sentence.
    confidence : float
        In [0, 1]: share of the splits that select `chosen` by themselves; 0 where none is stable.
    split : str
        The mode that was split.
    """

    ranks: tuple[int, ...]
    errors: np.ndarray
    core_consistency: np.ndarray
    stability: np.ndarray
    per_split: np.ndarray
    chance: np.ndarray | None
    chosen: int
    stable: bool
    reason: str
    confidence: float
    split: str


def select(
    ranks: Sequence[int],
    errors: np.ndarray,
    consistency: np.ndarray,
    per_split: np.ndarray,
    chance: np.ndarray | None,
    split: str,
) -> RankSelection:
    """Choose the largest rank of which every component comes back in the other half.

    Core consistency is reported beside it, but does not decide: it need not fall after the true
    rank when noise is white.
    """
    stability = np.median(per_split, axis=0)
    passing = [r for r, s in zip(ranks, stability, strict=True) if s > STABLE]
    count = len(per_split)
    if passing:
        chosen = max(passing)
        at = list(ranks).index(chosen)
        votes = 0
        for row in per_split:
            own = [r for r, s in zip(ranks, row, strict=True) if s > STABLE]
            votes += bool(own) and max(own) == chosen
        reason = (
            f"Rank {chosen} is the largest whose every component comes back in the other half of "
            f"{split!r}: worst factor match {stability[at]:.2f} (above {STABLE} is asked)"
        )
        if at + 1 < len(ranks):
            reason += f", against {stability[at + 1]:.2f} at rank {ranks[at + 1]}"
        else:
            reason += "; it is also the largest rank tried, so that more may be there"
        if chance is not None:
            reason += f"; by chance {chance[at]:.2f}"
        reason += f". {votes} of {count} splits choose it alone."
        confidence = votes / count
    else:
        chosen, confidence = ranks[0], 0.0
        at = int(np.argmax(stability))
        reason = (
            f"No rank is reproducible: at best (rank {ranks[at]}) the worst component matches "
            f"its like in the other half of {split!r} with {stability[at]:.2f}; "
            f"above {STABLE} is asked."
        )
    return RankSelection(
        tuple(ranks),
        errors,
        consistency,
        stability,
        per_split,
        chance,
        chosen,
        bool(passing),
        reason,
        confidence,
        split,
    )
