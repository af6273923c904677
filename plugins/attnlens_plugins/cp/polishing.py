"""Least squares on the tensor itself, from a fit of its compressed core."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attnlens_plugins.cp.fitting import Fit, positive_peaks
from attnlens_plugins.cp.tensors import Compressed, Floats

#: Passes over the tensor at most, and the fall of the error under which there are no more.
SWEEPS = 4
TOLERANCE = 1e-4
#: Updates of heads and features for each pass: they need no further look at the tensor.
_INNER = 5


def polish(tensor: Compressed, fit: Fit) -> Fit:
    """Go on from a fit on the whole tensor, read again block by block.

    With the loadings ``b`` of the tokens at hand, heads and features need of the tensor only its
    sum ``sum_t X[h, t, f] b[t, r]``, which is small. Each pass finds the tokens' loadings by least
    squares, block by block, adds up that sum and improves the other two factors by it.

    A tensor that was never compressed is left as it is, and so is a fit that fills its rank only
    with components of weight 0.

    Parameters
    ----------
    tensor : Compressed
    fit : Fit
        Of the tensor's core, expanded.

    Returns
    -------
    Fit
        Converged where the last pass lowered the error by less than 1e-4.
    """
    if tensor.blocks is None or not (fit.weights > 0).all():
        return fit
    a, c = fit.factors[0] * fit.weights, fit.factors[2]
    energy, total = tensor.energy, float(tensor.energy.sum())
    error, settled = fit.error, False
    for _ in range(SWEEPS):
        gram = (a.T @ a) * (c.T @ c)
        found, summed = [], np.zeros((len(a), len(c), a.shape[1]))
        for block in tensor.blocks():
            products = (block @ c.astype(block.dtype)).astype(np.float64)
            loadings = _solve(np.einsum("htr,hr->tr", products, a), gram)
            found.append(loadings)
            summed += np.swapaxes(block, 1, 2) @ loadings.astype(block.dtype)
        b = np.concatenate(found)
        tokens = b.T @ b
        for _ in range(_INNER):
            a = _solve(np.einsum("hfr,fr->hr", summed, c), (c.T @ c) * tokens)
            c = _solve(np.einsum("hfr,hr->fr", summed, a), (a.T @ a) * tokens)
        cross = np.einsum("hfr,fr->hr", summed, c)
        size = np.einsum("hr,rs,hs->h", a, (c.T @ c) * tokens, a)
        left = energy - 2 * (a * cross).sum(1) + size
        before, error = error, float(np.sqrt(max(left.sum(), 0.0) / total))
        settled = before - error < TOLERANCE
        if settled:
            break
    norms = [np.linalg.norm(f, axis=0) for f in (a, b, c)]
    weights = norms[0] * norms[1] * norms[2]
    order = np.argsort(-weights, kind="stable")
    factors = [(f / n)[:, order] for f, n in zip((a, b, c), norms, strict=True)]
    share = np.divide(left, energy, out=np.zeros_like(left), where=energy > 0)
    return replace(
        fit,
        weights=weights[order],
        factors=positive_peaks(factors),
        error=error,
        explained=np.where(energy > 0, 1.0 - share, 0.0),
        converged=fit.converged and settled,
    )


def _solve(products: Floats, gram: Floats) -> Floats:
    return np.asarray(products @ np.linalg.pinv(gram, hermitian=True))
