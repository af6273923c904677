"""The numbers: what a spectrum of singular values says, and what uniform attention would say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Up to so many positions every singular value is computed, and so the tail can be fitted.
WHOLE = 512

#: Fewest eigenvalues in a tail that is fitted.
_SHORTEST_TAIL = 8


def energy(sigma: Any, power: int) -> Any:
    """Return the cumulative share of ``sigma ** power`` over the last dimension.

    Parameters
    ----------
    sigma : ndarray [..., component]
        Singular values, descending.
    power : {1, 2}
        1 for the nuclear norm's share, 2 for the squared Frobenius norm's.
    """
    raised = sigma**power
    total = raised.sum(-1, keepdims=True)
    return np.cumsum(raised, -1) / np.where(total > 0, total, 1.0)


def effective_rank(sigma: Any) -> Any:
    """Return exp of the Shannon entropy of ``sigma / sum(sigma)``; 0 where all are 0.

    References
    ----------
    Roy and Vetterli, "The effective rank: a measure of effective dimensionality" (2007).
    """
    total = sigma.sum(-1, keepdims=True)
    p = sigma / np.where(total > 0, total, 1.0)
    rank = np.exp(-np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1))
    return np.where(total[..., 0] > 0, rank, 0.0)


def stable_rank(sigma: Any) -> Any:
    """Return ``sum(sigma^2) / sigma_1^2``; 0 where all are 0.

    References
    ----------
    Rudelson and Vershynin, "Sampling from large matrices" (2007).
    """
    first = sigma[..., 0] ** 2
    return np.where(first > 0, (sigma**2).sum(-1) / np.where(first > 0, first, 1.0), 0.0)


def tail_exponent(eigenvalues: Any) -> tuple[float, float]:
    """Fit a power law ``p(x) ~ x^-alpha`` to the upper tail of eigenvalues.

    The maximum-likelihood exponent over x >= x_min is ``1 + m / sum(ln(x / x_min))``; x_min is
    the eigenvalue for which the fit's Kolmogorov-Smirnov distance is least.

    Parameters
    ----------
    eigenvalues : ndarray [component]
        Positive and finite ones are used.

    Returns
    -------
    alpha : float
        NaN with fewer than eight usable eigenvalues, or where they are all alike.
    distance : float
        The Kolmogorov-Smirnov distance between tail and fit: the goodness of fit, 0 best.

    References
    ----------
    Clauset, Shalizi and Newman, "Power-law distributions in empirical data" (2009), eqs. 3.1, 3.9.
    """
    x = np.sort(np.asarray(eigenvalues, dtype=np.float64))
    x = x[np.isfinite(x) & (x > 1e-12 * max(x[-1] if x.size else 0.0, 1e-300))]
    if x.size < _SHORTEST_TAIL or x[-1] / x[0] < 1 + 1e-6:
        return float("nan"), float("nan")
    best = (float("nan"), np.inf)
    logs = np.log(x)
    for start in range(x.size - _SHORTEST_TAIL + 1):
        tail = logs[start:] - logs[start]
        total = tail.sum()
        if total <= 1e-9:
            continue
        alpha = 1 + tail.size / total
        fitted = 1 - np.exp(-(alpha - 1) * tail)
        steps = np.arange(tail.size + 1) / tail.size
        distance = max(np.abs(fitted - steps[:-1]).max(), np.abs(fitted - steps[1:]).max())
        if distance < best[1]:
            best = (float(alpha), float(distance))
    return best if np.isfinite(best[1]) else (float("nan"), float("nan"))


def grid(n: int) -> list[int]:
    """Return at how many singular values the energy is told: 1, 2, 3, 4, 6, 8, 12, ... and n."""
    ks, step = [1, 2, 3], 4
    while step < n:
        ks += [step, step * 3 // 2]
        step *= 2
    return sorted({k for k in [*ks, max(n // 4, 1), n] if k <= n})


def causal_uniform(n: int) -> dict[str, Any]:
    """Return the measures of attention that spreads evenly over the visible keys.

    Row i has i equal weights, so its mean entropy is ``ln(n!) / n`` and its squared Frobenius
    norm the harmonic number ``H_n``. The matrix of beyond 1,024 positions is taken at 1,024, for
    those measures that need its singular values.
    """
    size = min(n, 1024)
    matrix = np.tril(np.ones((size, size))) / np.arange(1, size + 1)[:, None]
    sigma = np.linalg.svd(matrix, compute_uv=False)
    harmonic = float((1 / np.arange(1, n + 1)).sum())
    column = float((1 / np.arange(1, n + 1) ** 2).sum())
    entropy = float(np.log(np.arange(1, n + 1)).mean())
    return {
        "entropy": entropy,
        "renyi2": entropy,
        "entropy_share": 1.0,
        "effective_rank": float(effective_rank(sigma)),
        "stable_rank": harmonic / float(sigma[0]) ** 2,
        "gap": float(1 - sigma[1] / sigma[0]),
        "quarter": float(energy(sigma, 2)[max(size // 4, 1) - 1]),
        "sink": (harmonic - 1) / (n - 1),
        "sink_share": column / harmonic,
        "curve": energy(sigma, 1),
    }


def of_attention(attention: Any, ks: Sequence[int], seed: int) -> dict[str, Any]:
    """Measure one layer's attention.

    Parameters
    ----------
    attention : Attention over [prompt, head, query_pos, key_pos]
        Of two positions or more.
    ks : sequence of int
        Where the cumulative energy is told.
    seed : int
        Of estimates, which serve beyond 512 positions.

    Returns
    -------
    dict from str to ndarray
        Over [prompt, head]: ``entropy`` (nats, mean over rows), ``entropy_share``, ``renyi2``,
        ``effective_rank`` and its error bar ``effective_rank_error``, ``stable_rank``, ``gap``
        (``1 - sigma_2 / sigma_1``), ``quarter`` (share of sigma^2 in the first quarter), ``sink``
        (weight that queries but the first give to the first token), ``sink_share`` (of the squared
        Frobenius norm, that in the first column), ``tail`` and ``tail_distance`` (NaN beyond 512
        positions). Over [prompt, head, k]: ``energy_sigma``, ``energy_sigma2``. Over
        [prompt, head, component]: ``sigma``, at most the 32 largest.
    """
    import torch

    n = attention.n_positions
    rank = attention.effective_rank(seed=seed)
    sigma = attention.singular_values(None if n <= WHOLE else 32, seed=seed)
    quarter = attention.energy([max(n // 4, 1)], power=2.0, seed=seed).value[..., 0]
    first = torch.zeros(n, 1, dtype=attention.dtype, device=attention.device)
    first[0] = 1.0
    column = (attention @ first)[..., 0].double()
    found = {
        "entropy": attention.entropy().double().mean(-1),
        # The first row of causal attention sees one key and has no share.
        "entropy_share": torch.nanmean(attention.entropy_share().double(), -1),
        "renyi2": attention.renyi(2.0).double().mean(-1),
        "effective_rank": rank.value,
        "effective_rank_error": rank.error,
        "stable_rank": attention.stable_rank(seed=seed),
        "gap": 1 - sigma[..., 1] / sigma[..., 0],
        "quarter": quarter,
        "sink": attention.sink().double(),
        "sink_share": column.square().sum(-1) / attention.frobenius2().double(),
        "energy_sigma": attention.energy(ks, power=1.0, seed=seed).value,
        "energy_sigma2": attention.energy(ks, power=2.0, seed=seed).value,
        "sigma": sigma[..., :32],
    }
    measured = {name: value.cpu().numpy() for name, value in found.items()}
    whole = sigma.cpu().numpy() if n <= WHOLE else np.full((*sigma.shape[:-1], 1), np.nan)
    fits = np.array([tail_exponent(s**2) for s in whole.reshape(-1, whole.shape[-1])])
    measured["tail"], measured["tail_distance"] = fits.T.reshape(2, *whole.shape[:-1])
    return measured


def score_rank(q: Any, k: Any) -> Any:
    """Return the effective rank of each head's scores before mask and softmax.

    ``q k^T`` has as its singular values those of ``R_q R_k^T`` with the triangular factors of
    ``q`` and ``k``, so that no n x n matrix is needed; it has at most d_head of them.

    Parameters
    ----------
    q, k : ndarray [prompt, pos, head, d_head]

    Returns
    -------
    ndarray [prompt, head]
    """
    rq = np.linalg.qr(np.moveaxis(q, 2, 1).astype(np.float64), mode="r")
    rk = np.linalg.qr(np.moveaxis(k, 2, 1).astype(np.float64), mode="r")
    core = rq @ np.swapaxes(rk, -1, -2)
    return effective_rank(np.linalg.svd(core, compute_uv=False))


def collapse(residual: Any) -> tuple[Any, Any]:
    """Return how far the tokens' vectors are from all being one vector, or multiples of one.

    Parameters
    ----------
    residual : ndarray [prompt, pos, d_model]

    Returns
    -------
    mean_residual : ndarray [prompt]
        ``|X - 1 mean(X)^T|_F / |X|_F``: 0 where all tokens have one vector.
    rank_one_residual : ndarray [prompt]
        ``sqrt(1 - sigma_1^2 / |X|_F^2)``: 0 where all are multiples of one.

    References
    ----------
    Dong, Cordonnier and Loukas, "Attention is not all you need: pure attention loses rank doubly
    exponentially with depth" (2021), with the Frobenius norm in place of theirs.
    """
    x = np.asarray(residual, dtype=np.float64)
    total = (x**2).sum((-1, -2))
    safe = np.where(total > 0, total, 1.0)
    centred = ((x - x.mean(1, keepdims=True)) ** 2).sum((-1, -2))
    gram = x @ np.swapaxes(x, -1, -2) if x.shape[1] <= x.shape[2] else np.swapaxes(x, -1, -2) @ x
    first = np.linalg.eigvalsh(gram)[..., -1]
    rest = np.clip(1 - first / safe, 0.0, 1.0)
    alive = total > 0
    return np.where(alive, np.sqrt(centred / safe), 0.0), np.where(alive, np.sqrt(rest), 0.0)


def of_weights(weights: Any) -> dict[str, Any]:
    """Measure the maps of each head that its weights make up.

    Parameters
    ----------
    weights : xarray.Dataset
        With ``W_Q``, ``W_K``, ``W_V``, ``W_O``.

    Returns
    -------
    dict from str to ndarray [layer, head]
        Effective and stable rank of ``W_Q W_K^T`` (``qk_``) and ``W_V W_O`` (``ov_``), both
        of at most d_head dimensions and unchanged by any change of a head's basis; and of the
        four matrices themselves.
    """
    arrays = {n: np.asarray(weights[n].values, dtype=np.float64) for n in
              ("W_Q", "W_K", "W_V", "W_O")}  # fmt: skip
    group = arrays["W_Q"].shape[1] // arrays["W_K"].shape[1]
    for name in ("W_K", "W_V"):
        arrays[name] = np.repeat(arrays[name], group, axis=1)
    r = {n: np.linalg.qr(a if n != "W_O" else np.swapaxes(a, -1, -2), mode="r")
         for n, a in arrays.items()}  # fmt: skip
    products = {
        "qk": np.linalg.svd(r["W_Q"] @ np.swapaxes(r["W_K"], -1, -2), compute_uv=False),
        "ov": np.linalg.svd(r["W_V"] @ np.swapaxes(r["W_O"], -1, -2), compute_uv=False),
    }
    found = {}
    for name, sigma in products.items():
        found[f"{name}_effective_rank"] = effective_rank(sigma)
        found[f"{name}_stable_rank"] = stable_rank(sigma)
    for name, factor in r.items():
        sigma = np.linalg.svd(factor, compute_uv=False)
        found[f"{name}_effective_rank"] = effective_rank(sigma)
    return found
