"""Matching the components of two CP fits, and what a match means by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from attnlens.errors import DecompositionError

from ._input import is_whole, whole_number


@dataclass(frozen=True)
class FactorMatch:
    """How well the components of two fits agree.

    Attributes
    ----------
    mean : float
        Mean score of the matched pairs.
    min : float
        Score of the worst matched pair.
    scores : ndarray
        float64 ``[pair]``, each in [0, 1].
    pairs : ndarray
        int64 ``[pair, 2]``: component of `a`, component of `b`; by component of `a`. As many
        pairs as the smaller rank.
    unmatched : tuple of ndarray
        Components of `a`, and of `b`, without a partner.
    """

    mean: float
    min: float
    scores: np.ndarray
    pairs: np.ndarray
    unmatched: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class MatchNull:
    """Factor match scores by chance.

    Attributes
    ----------
    mean, min : ndarray
        float64 ``[draw]``: `FactorMatch.mean` and `.min` of each draw, ascending.
    """

    mean: np.ndarray
    min: np.ndarray

    def p_value(self, match: FactorMatch) -> float:
        """Share of draws, the match itself counted, whose worst pair is at least as good."""
        return float((1 + (self.min >= match.min).sum()) / (1 + len(self.min)))


def factor_match(
    a: Any,
    b: Any,
    *,
    modes: Sequence[int] | None = None,
    consider_weights: bool = False,
) -> FactorMatch:
    """Factor match score of two CP fits under the best one-to-one pairing.

    A pair scores the absolute product of its cosines over the modes (the sign of a component is a
    convention). The pairing maximises the sum of scores by the Hungarian method, in polynomial time
    whatever the data. Scores are compared to 12 digits; among equal pairings components keep their
    order (least sum of squared rank differences).

    Parameters
    ----------
    a, b : CPFit, CPTensor or sequence of factors
        Factors ``[n_k, component]``; ranks may differ.
    modes : sequence of int, optional
        Modes to compare, all by default. Compare across halves of the data by leaving out
        the mode that was split.
    consider_weights : bool
        Multiply each pair's score by ``1 - |w_a - w_b| / max(w_a, w_b)``.

    Returns
    -------
    FactorMatch

    Raises
    ------
    DecompositionError
        Different numbers of modes, or factors of different sizes.

    References
    ----------
    E. Acar, D. M. Dunlavy, T. G. Kolda, M. Mørup, "Scalable tensor factorizations for incomplete
    data", Chemometr. Intell. Lab. Syst. 106 (2011).
    """
    left, right = _factors(a), _factors(b)
    return _match(_scores(left, right, _modes(left, right, modes), consider_weights))


def match_null(
    a: Any,
    b: Any,
    *,
    modes: Sequence[int] | None = None,
    n_draws: int = 200,
    seed: int = 0,
) -> MatchNull:
    """Factor match scores after the entries of every factor column were shuffled.

    Non-negative factors have positive cosines whatever they hold, so that a score means little
    without this. Each column of each of `b`'s factors is permuted on its own: the distribution
    of its entries stays, its relation to `a` goes.

    Parameters
    ----------
    a, b, modes
        As in `factor_match`.
    n_draws : int
        Number of shuffles.
    seed : int
        Seed of the shuffles.
    """
    left, right = _factors(a), _factors(b)
    which = _modes(left, right, modes)
    n_draws = whole_number("n_draws", n_draws, 1)
    rng = np.random.default_rng(whole_number("seed", seed, 0))
    mean, least = np.empty(n_draws), np.empty(n_draws)
    for i in range(n_draws):
        mixed = ([rng.permuted(f, axis=0) for f in right[0]], right[1])
        match = _match(_scores(left, mixed, which, False))
        mean[i], least[i] = match.mean, match.min
    return MatchNull(np.sort(mean), np.sort(least))


def align(fit: Any, reference: Any, *, modes: Sequence[int] | None = None) -> list[np.ndarray]:
    """Factors of `fit` in the order, and with the signs, of `reference`.

    Matched components come first, in the reference's order, the others after them. A factor that
    points against the reference's is flipped where an even number of flips allows it.

    Returns
    -------
    list of ndarray
        Factors ``[n_k, component]``, copies.
    """
    left, right = _factors(reference), _factors(fit)
    which = _modes(left, right, modes)
    match = factor_match(reference, fit, modes=modes)
    order = [*match.pairs[:, 1], *match.unmatched[1]]
    out = [f[:, order].copy() for f in right[0]]
    for place, (i, _) in enumerate(match.pairs):
        overlap = [float(left[0][k][:, i] @ out[k][:, place]) for k in which]
        against = [k for k, value in zip(which, overlap, strict=True) if value < 0]
        if len(against) % 2:  # one flip too many: leave the weakest disagreement as it is
            free = [k for k in range(len(out)) if k not in which]
            weakest = min(zip(np.abs(overlap), which, strict=True))[1]
            odd = free[-1] if free else weakest
            against = [k for k in against if k != odd] if odd in against else [*against, odd]
        for k in against:
            out[k][:, place] *= -1
    return out


_Components = tuple[list[np.ndarray], np.ndarray]


def _factors(source: Any) -> _Components:
    """Factors and weights of anything that holds a CP decomposition."""
    weights = None
    if hasattr(source, "factors"):
        weights, source = source.weights, source.factors
    try:
        factors = [np.asarray(f, dtype=np.float64) for f in source]
    except (TypeError, ValueError):
        raise DecompositionError(
            f"{source!r} holds no factors.",
            hint="Give a CPFit, a CPTensor or one array [n_k, component] per mode.",
        ) from None
    if not factors or any(f.ndim != 2 or f.shape[1] != factors[0].shape[1] for f in factors):
        raise DecompositionError(
            f"Factors [n_k, component] of one rank are needed; got shapes "
            f"{[f.shape for f in factors]}."
        )
    for k, factor in enumerate(factors):
        if not np.isfinite(factor).all():
            bad = factor[~np.isfinite(factor)]
            raise DecompositionError(
                f"{len(bad)} of {factor.size} entries of the factor of mode {k} are not finite; "
                f"the first is {bad[0]}."
            )
    if weights is None:
        weights = np.ones(factors[0].shape[1])
    return factors, np.asarray(weights, dtype=np.float64)


def _modes(a: _Components, b: _Components, modes: Sequence[int] | None) -> list[int]:
    if len(a[0]) != len(b[0]):
        raise DecompositionError(f"One fit has {len(a[0])} modes, the other {len(b[0])}.")
    count = len(a[0])
    chosen = list(range(count)) if modes is None else list(modes)
    for k in chosen:
        if not is_whole(k) or not -count <= k < count:
            raise DecompositionError(f"modes={chosen}: whole numbers under {count} are needed.")
        if a[0][k].shape[0] != b[0][k].shape[0]:
            raise DecompositionError(
                f"Mode {k} has {a[0][k].shape[0]} entries in one fit and {b[0][k].shape[0]} "
                "in the other.",
                hint="Leave that mode out with modes=.",
            )
    if not chosen:
        raise DecompositionError("modes=[]: at least one mode is needed to match components.")
    return chosen


def _scores(a: _Components, b: _Components, modes: list[int], weigh: bool) -> np.ndarray:
    score = np.ones((a[0][0].shape[1], b[0][0].shape[1]))
    for k in modes:
        left, right = (
            f / np.maximum(np.linalg.norm(f, axis=0), 1e-300) for f in (a[0][k], b[0][k])
        )
        score *= left.T @ right
    score = np.clip(np.abs(score), 0.0, 1.0)
    if weigh:
        wa, wb = (
            np.abs(w) * np.prod([np.linalg.norm(f, axis=0) for f in fs], axis=0) for fs, w in (a, b)
        )
        top = np.maximum(wa[:, None], wb[None, :])
        gap = np.abs(wa[:, None] - wb[None, :])
        score = score * (1 - np.divide(gap, top, out=np.zeros_like(gap), where=top > 0))
    return score


def _match(score: np.ndarray) -> FactorMatch:
    rows, columns = np.indices(score.shape)
    # Far below the 12th digit, and strictly convex: equal scores keep the components' order.
    distance = (rows - columns) ** 2 / max(score.shape) ** 3
    i, j = linear_sum_assignment(np.round(score, 12) - 1e-13 * distance, maximize=True)
    paired = score[i, j]
    return FactorMatch(
        mean=float(paired.mean()),
        min=float(paired.min()),
        scores=paired,
        pairs=np.stack([i, j], axis=1).astype(np.int64),
        unmatched=(
            np.setdiff1d(np.arange(score.shape[0]), i),
            np.setdiff1d(np.arange(score.shape[1]), j),
        ),
    )
