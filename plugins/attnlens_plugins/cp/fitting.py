"""Fits of a compressed tensor: every rank, its stability over halves, and the choice of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import attnlens
from attnlens_plugins.cp.tensors import Compressed, Floats

#: Least factor match of a rank's worst component between halves of the data.
STABLE = 0.7
#: Share of the halvings in which it must match so.
MOST_SPLITS = 0.8
#: Starts of a half's fits: they are many, and only their best matters.
_HALF_RESTARTS = 4
_HALF_SWEEPS = 150
#: Sweeps on the core beyond its own compression: while ranks are compared, and of the one chosen.
_POLISH = 10
FINE = 300


@dataclass
class Fit:
    """One CP fit in the tensor's own space.

    Attributes
    ----------
    weights : ndarray [component]
    factors : list of ndarray [n_k, component]
        Unit columns; the first over the heads.
    error : float
        Norm of the residual over that of the whole tensor, what compression left out included.
    explained : ndarray [row]
        Share of each head's energy that the fit describes.
    core_consistency, min_cosine : float
    degenerate, converged : bool
    restart_errors : ndarray [restart]
        On the compressed tensor.
    notes : tuple of str
    """

    weights: Floats
    factors: list[Floats]
    error: float
    explained: Floats
    core_consistency: float
    min_cosine: float
    degenerate: bool
    converged: bool
    restart_errors: Floats
    notes: tuple[str, ...]


def fit_ranks(
    tensor: Compressed,
    ranks: list[int],
    *,
    n_restarts: int,
    seed: int,
    nonnegative: bool,
    joint: bool = False,
    polish: int = _POLISH,
) -> dict[int, Fit]:
    """Fit every rank.

    Parameters
    ----------
    tensor : Compressed
    ranks : list of int
    n_restarts, seed : int
    nonnegative : bool
    joint : bool
        Give layers and head numbers a mode each.
    polish : int
        Sweeps at most, after those on the engine's own compression of the core.
    """
    core = tensor.core
    dims: tuple[str, ...] = tensor.dims
    if joint:
        core = core.reshape(len(np.unique(tensor.layer)), -1, *core.shape[1:])
        dims = ("layer", *dims)
    scan = attnlens.decomposition.cp(
        core,
        ranks,
        n_restarts=n_restarts,
        seed=seed,
        nonnegative=nonnegative,
        polish_sweeps=polish,
        dims=dims,
    )
    return {rank: _report(tensor, scan[rank], joint) for rank in ranks}


def _report(tensor: Compressed, found: Any, joint: bool) -> Fit:
    factors = [np.asarray(f) for f in found.factors]
    weights = np.asarray(found.weights)
    if joint:
        rows = (factors[0][:, None] * factors[1][None]).reshape(len(tensor.layer), -1)
        factors = [rows, *factors[2:]]
    scaled = factors[0] * weights
    # The model lies in the bases, so that products with the core are those with the tensor.
    cross = np.einsum("hab,ar,br->hr", tensor.core, *factors[1:], optimize=True)
    gram = (factors[1].T @ factors[1]) * (factors[2].T @ factors[2])
    size = np.einsum("hr,rs,hs->h", scaled, gram, scaled)
    left = tensor.energy - 2 * (scaled * cross).sum(1) + size
    total = float(tensor.energy.sum())
    share = np.divide(left, tensor.energy, out=np.zeros_like(left), where=tensor.energy > 0)
    return Fit(
        weights,
        positive_peaks([tensor.expand(f, k) for k, f in enumerate(factors)]),
        float(np.sqrt(max(left.sum(), 0.0) / total)) if total > 0 else 0.0,
        np.where(tensor.energy > 0, 1.0 - share, 0.0),
        float(found.core_consistency),
        float(found.degeneracy.min_cosine),
        bool(found.degeneracy.degenerate),
        bool(found.converged),
        np.asarray(found.restart_errors),
        # How much is explained is said of the whole tensor, and not of its core.
        tuple(n for n in found.notes if "explains" not in n),
    )


def positive_peaks(factors: list[Floats]) -> list[Floats]:
    """Fix signs: in every mode but the last, the entry of largest magnitude is positive.

    The engine's rule, applied again where factors have left the compressed space. Of entries within
    a millionth of the largest the first decides.
    """
    carried = np.ones(factors[0].shape[1])
    found = []
    for factor in factors[:-1]:
        size = np.abs(factor)
        first = (size >= (1 - 1e-6) * size.max(0)).argmax(0)
        sign = np.where(factor[first, np.arange(factor.shape[1])] < 0, -1.0, 1.0)
        found.append(factor * sign)
        carried *= sign
    return [*found, factors[-1] * carried]


def stability(
    tensor: Compressed,
    ranks: list[int],
    *,
    n_splits: int,
    seed: int,
    nonnegative: bool,
    joint: bool = False,
) -> npt.NDArray[np.float64] | None:
    """Match the components of two halves of the data, at every rank.

    Each rank is fitted by itself, so that its match does not depend on which others are tried.

    Returns
    -------
    ndarray [split, rank] or None
        Factor match of the worst component over the modes that the halves share; NaN where a
        rank has already failed in too many splits to be chosen. None where the data cannot be
        halved.
    """
    if tensor.halves is None:
        return None
    table = np.full((n_splits, len(ranks)), np.nan)
    compared = list(tensor.compared)
    if joint:  # the mode of heads has become two
        compared = [m for k in compared for m in ((0, 1) if k == 0 else (k + 1,))]
    for i in range(n_splits):
        halves = list(tensor.halves(i))
        if joint:
            n_layers = len(np.unique(tensor.layer))
            halves = [half.reshape(n_layers, -1, *half.shape[1:]) for half in halves]
        for j, rank in enumerate(ranks):
            if (table[:i, j] <= STABLE).sum() > n_splits - _needed(n_splits):
                continue
            table[i, j] = _match(halves, rank, compared, seed, nonnegative)
    return table


def _match(
    halves: list[Floats], rank: int, modes: list[int], seed: int, nonnegative: bool
) -> float:
    """Match the components of two halves; 0 where one of them does not fill the rank."""
    if not all(np.any(half) for half in halves):
        return 0.0
    left, right = (
        attnlens.decomposition.cp(
            half,
            rank,
            n_restarts=_HALF_RESTARTS,
            seed=seed,
            nonnegative=nonnegative,
            polish_sweeps=0,
            max_iter=_HALF_SWEEPS,
            tol=1e-5,
        )
        for half in halves
    )
    if not ((left.weights > 0).all() and (right.weights > 0).all()):
        return 0.0
    return float(attnlens.decomposition.factor_match(left, right, modes=modes).min)


def _needed(n_splits: int) -> int:
    """Return in how many of the halvings a rank must come back."""
    return math.ceil(MOST_SPLITS * n_splits - 1e-9)


@dataclass(frozen=True)
class Choice:
    """Which rank, why, and how sure.

    Attributes
    ----------
    rank : int
    stable : bool
        Whether every component comes back in the other half, in most splits.
    confidence : float
        Share of the splits in which it does.
    reason : str
    """

    rank: int
    stable: bool
    confidence: float
    reason: str


def choose_rank(ranks: list[int], table: npt.NDArray[np.float64] | None, what: str) -> Choice:
    """Choose the largest rank of which every component comes back in four of five halvings.

    The worst matches of a rank that a model does not support scatter from 0 to 1, so that a
    median above the threshold is often luck; that of four in five seldom is.

    Parameters
    ----------
    ranks : list of int
    table : ndarray [split, rank] or None
        Of :func:`stability`.
    what : str
        What was halved.
    """
    if table is None:
        return Choice(
            ranks[0], False, 0.0, f"Rank {ranks[0]}: there are too few {what}s to check it."
        )
    n_splits, needed = len(table), _needed(len(table))
    passed = (table > STABLE).sum(axis=0)
    typical = np.nanmedian(table, axis=0)
    tried = np.isfinite(table).sum(axis=0)

    def told(i: int) -> str:
        return (
            f"in {passed[i]} of {tried[i]} random halvings of the {what}s (typical worst match "
            f"{typical[i]:.2f}; above {STABLE} counts, and {needed} of {n_splits} are asked)"
        )

    passing = np.flatnonzero(passed >= needed)
    at = int(passing[-1]) if len(passing) else 0
    confidence = float(passed[at] / tried[at])
    if len(ranks) == 1:
        reason = f"Rank {ranks[0]} was asked for; every component comes back {told(0)}."
    elif not len(passing):
        best = int(np.argmax(passed / tried + 1e-3 * typical))
        reason = (
            f"No rank is stable: at best, at rank {ranks[best]}, every component comes back "
            f"{told(best)}. Rank {ranks[0]}, the smallest tried, is shown."
        )
    else:
        reason = f"Rank {ranks[at]} is the largest of which every component comes back {told(at)}"
        if at + 1 < len(ranks):
            after = f"{passed[at + 1]} of {tried[at + 1]}"
            reason += f"; rank {ranks[at + 1]} does in {after}."
        else:
            reason += "; it is the largest rank tried, so that more may be there."
    return Choice(ranks[at], bool(len(passing)), confidence, reason)
