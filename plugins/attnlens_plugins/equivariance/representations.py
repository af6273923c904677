"""Do two sets of representations agree, up to a rotation? Similarities that no rotation changes.

Each takes two matrices with one row per item (a text, a prompt) and compares the geometry of the
rows: what two prompts with one meaning share, or one prompt in two models. All are invariant under
orthogonal maps and a common scale of either side. All but the debiased CKA are far above 0 for
unrelated rows when there are fewer items than dimensions: read them beside their null.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def cka(x: Any, y: Any, *, debiased: bool = True) -> float:
    """Return the linear centred kernel alignment of two sets of rows.

    Parameters
    ----------
    x, y : float[item, d_model]
        With the same items in the same order; the widths may differ.
    debiased : bool
        Use the unbiased estimator of HSIC, whose mean is 0 for unrelated rows; it needs at least
        four items. The plain one tends to 1 as the items become fewer than the dimensions.

    Returns
    -------
    float
        1 for rows equal up to rotation and scale; the debiased one may be a little below 0. NaN
        where one side does not vary.

    References
    ----------
    Kornblith et al., "Similarity of neural network representations revisited" (2019).
    Song et al., "Feature selection via dependence maximization" (2012), equation 5.
    Murphy, Zylberberg and Fyshe, "Correcting biased centered kernel alignment measures in
    biological and artificial neural networks" (2024).
    """
    k, kk = _kernel(x), _kernel(y)
    if debiased and len(k) < 4:
        return float("nan")
    hsic = _hsic_unbiased if debiased else _hsic_biased
    size = hsic(k, k) * hsic(kk, kk)
    return float(hsic(k, kk) / np.sqrt(size)) if size > 0 else float("nan")


def procrustes(x: Any, y: Any) -> float:
    """Return how well one side, rotated, fits the other: ``|X^T Y|_* / (|X| |Y|)``, in [0, 1].

    ``|.|_*`` is the sum of the singular values, for centred X and Y: one minus half the squared
    distance after the best orthogonal map, of sides scaled to unit norm.

    References
    ----------
    Schönemann, "A generalized solution of the orthogonal Procrustes problem" (1966).
    Williams et al., "Generalized shape metrics on neural representations" (2021).
    """
    a, b = _centred(x), _centred(y)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    if size == 0:
        return float("nan")
    # The singular values of A^T B from thin factors: few items, many dimensions.
    left, right = np.linalg.qr(a.T)[1], np.linalg.qr(b.T)[1]
    return float(np.linalg.svd(left @ right.T, compute_uv=False).sum() / size)


def rsa(x: Any, y: Any) -> float:
    """Return Spearman's correlation of the pairwise distances of the two sides' rows.

    References
    ----------
    Kriegeskorte, Mur and Bandettini, "Representational similarity analysis" (2008).
    """
    from scipy.spatial.distance import pdist
    from scipy.stats import rankdata

    ranks = [rankdata(pdist(np.asarray(side, dtype=np.float64))) for side in (x, y)]
    if any(len(r) < 3 or r.std() == 0 for r in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def gram_similarity(x: Any, y: Any) -> float:
    """Return the cosine of the two Gram matrices ``X X^T`` and ``Y Y^T``, uncentred.

    All that orthogonal maps leave of a set of vectors is in its Gram matrix (Weyl's first
    fundamental theorem for O(n)); the cosine says how much of it is the same, lengths and common
    direction included.
    """
    a = np.asarray(x, dtype=np.float64)
    b = np.asarray(y, dtype=np.float64)
    k, kk = a @ a.T, b @ b.T
    size = float(np.linalg.norm(k) * np.linalg.norm(kk))
    return float((k * kk).sum() / size) if size > 0 else float("nan")


#: Name -> function of two sets of rows.
INVARIANTS: dict[str, Callable[[Any, Any], float]] = {
    "cka": cka,
    "cka_biased": lambda x, y: cka(x, y, debiased=False),
    "procrustes": procrustes,
    "rsa": rsa,
    "gram": gram_similarity,
}


def with_null(x: Any, y: Any, *, shuffles: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return every invariant with what it is when the items are paired at random.

    Parameters
    ----------
    x, y : float[item, d_model]
    shuffles : int
        Random pairings.
    seed : int

    Returns
    -------
    dict from name to dict
        ``value``; ``null``, float64[shuffle], under each pairing; ``null_mean`` and
        ``null_high`` (the 95th percentile) over pairings; and ``p``,
        the share of pairings at least as similar, the true one counted in: at least
        ``1 / (shuffles + 1)``.

    References
    ----------
    Phipson and Smyth, "Permutation p-values should never be zero" (2010).
    """
    y = np.asarray(y)
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(len(y)) for _ in range(shuffles)]
    found = {}
    for name, function in INVARIANTS.items():
        value = function(x, y)
        null = np.array([function(x, y[order]) for order in orders])
        known = null[np.isfinite(null)]
        found[name] = {
            "null": null,
            "value": value,
            "null_mean": float(known.mean()) if known.size else float("nan"),
            "null_high": float(np.quantile(known, 0.95)) if known.size else float("nan"),
            "p": float((1 + (known >= value).sum()) / (1 + known.size)),
        }
    return found


def _centred(x: Any) -> Array:
    a: Array = np.asarray(x, dtype=np.float64)
    return np.asarray(a - a.mean(0))


def _kernel(x: Any) -> Array:
    a = _centred(x)
    return np.asarray(a @ a.T)


def _hsic_biased(k: Array, other: Array) -> float:
    return float((k * other).sum())


def _hsic_unbiased(k: Array, other: Array) -> float:
    n = len(k)
    a, b = (m - np.diag(np.diag(m)) for m in (k, other))
    trace = (a * b).sum()
    sums = a.sum() * b.sum() / ((n - 1) * (n - 2))
    cross = 2 * (a.sum(0) @ b.sum(1)) / (n - 2)
    return float((trace + sums - cross) / (n * (n - 3)))
