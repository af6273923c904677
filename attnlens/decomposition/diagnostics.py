"""How good a CP fit is, and whether its components can be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compress import times

DEGENERATE_COSINE = -0.85
"""Product of the cosines over all modes under which two components cancel each other."""
DEGENERATE_ENERGY = 10.0
"""Energy of the components over the tensor's, above which they cancel each other."""

_BLOCK = 1 << 18


@dataclass(frozen=True)
class Degeneracy:
    """Signs that components blow up and cancel.

    Attributes
    ----------
    min_cosine : float
        Least product over the modes of two components' cosines, in [-1, 1]; 1 for one component.
    energy : float
        Sum of the squared weights over the tensor's squared norm; 1 when components are orthogonal
        and the fit is exact.
    degenerate : bool
        `min_cosine` under -0.85 or `energy` above 10: do not interpret or cluster the components.
    """

    min_cosine: float
    energy: float
    degenerate: bool


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Cosines ``[component of a, component of b]`` between rows; 0 where a row is zero."""
    tiny = torch.finfo(a.dtype).tiny
    left: Tensor = a / a.norm(dim=1, keepdim=True).clamp_min(tiny)
    right: Tensor = b / b.norm(dim=1, keepdim=True).clamp_min(tiny)
    return left @ right.T


def degeneracy(weights: Tensor, factors: Sequence[Tensor]) -> Degeneracy:
    """Degeneracy signs of components ``[component, n_k]`` of a tensor of unit norm.

    References
    ----------
    W. P. Krijnen, T. K. Dijkstra, A. Stegeman, "On the non-existence of optimal solutions and the
    occurrence of degeneracy in the CANDECOMP/PARAFAC model", Psychometrika 73 (2008).
    """
    energy = float(weights.square().sum())
    live = weights > 0
    product = torch.ones(int(live.sum()), int(live.sum()), dtype=weights.dtype)
    for factor in factors:
        rows = factor[live].cpu()
        product = product * cosines(rows, rows)
    count = product.shape[0]
    lower = torch.tril_indices(count, count, -1)
    least = float(product[lower[0], lower[1]].min()) if count > 1 else 1.0
    return Degeneracy(least, energy, least < DEGENERATE_COSINE or energy > DEGENERATE_ENERGY)


def residual_error(tensor: Tensor, weights: Tensor, factors: Sequence[Tensor]) -> float:
    """Norm of ``tensor - model``, by subtraction, block by block over the first mode.

    Unlike the expansion of the square, this is accurate however small the residual.
    """
    count = len(weights)
    first = (weights[:, None] * factors[0]).to(tensor.dtype)
    middle = factors[1].to(tensor.dtype)
    for factor in factors[2:-1]:
        middle = (middle[:, :, None] * factor.to(tensor.dtype)[:, None, :]).reshape(count, -1)
    last = factors[-1].to(tensor.dtype)
    step = max(1, _BLOCK // (tensor.numel() // tensor.shape[0]))
    total = 0.0
    for i in range(0, tensor.shape[0], step):
        left = (first[:, i : i + step, None] * middle[:, None, :]).reshape(count, -1)
        block = tensor[i : i + step].reshape(left.shape[1], -1)
        rest = torch.addmm(block, left.T, last, beta=-1)
        total += float(torch.linalg.vector_norm(rest)) ** 2
    return math.sqrt(total)


def core_consistency(
    tensor: Tensor, fits: Sequence[tuple[Tensor, Sequence[Tensor]]]
) -> list[float]:
    """Core consistency of several fits, in per cent: 100 when the best core is superdiagonal.

    ``100 (1 - |G - I|^2 / R)`` with ``G = tensor x_k pinv(factor_k)``. The weights go into the
    first factor, as in tensorly-viz (the off-diagonal part depends on where they go). NaN for a fit
    with a component of no weight.

    References
    ----------
    R. Bro, H. A. L. Kiers, "A new efficient method for determining the number of components in
    PARAFAC models", J. Chemometrics 17 (2003).
    """
    order = sorted(range(tensor.ndim), key=lambda k: -tensor.shape[k])
    live = [i for i, (weights, _) in enumerate(fits) if bool((weights > 0).all())]
    inverses = []
    for i in live:
        weights, factors = fits[i]
        scaled = [weights[:, None] * factors[0], *factors[1:]]
        inverses.append([torch.linalg.pinv(f.T).to(tensor.dtype) for f in scaled])
    out = [math.nan] * len(fits)
    if not live:
        return out
    # The one pass over the whole tensor serves all fits.
    head = order[0]
    wide = times(tensor, torch.cat([inverse[head] for inverse in inverses]), head)
    start = 0
    for i, inverse in zip(live, inverses, strict=True):
        rank = len(inverse[head])
        core = wide.narrow(head, start, rank)
        start += rank
        for mode in order[1:]:
            core = times(core, inverse[mode], mode)
        core = core.double().clone()
        index = torch.arange(rank, device=core.device)
        core[(index,) * tensor.ndim] -= 1.0
        out[i] = 100.0 - 100.0 * float(core.square().sum()) / rank
    return out


def canonical(factors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Weights and factors in the one form that attnlens reports.

    Scale: unit-norm factors, weights at least 0. Order: by descending weight. Sign: in
    every mode but the last, the entry of largest magnitude is positive (among entries within 1e-6
    of it, the first); the last mode takes the sign that is left. Nothing here looks at the order of
    the entries unless they tie, so that permuting a mode permutes its factor and no more.

    Parameters
    ----------
    factors : sequence of Tensor
        ``[component, n_k]``. A component with a zero factor gets weight 0.
    """
    norms = torch.stack([f.norm(dim=1) for f in factors])
    # Through logarithms: the product of many norms may leave the range of floating point.
    weights = torch.where((norms > 0).all(0), norms.clamp_min(1e-300).log().sum(0).exp(), 0.0)
    out = [f / n.clamp_min(1e-300)[:, None] for f, n in zip(factors, norms, strict=True)]
    carried = torch.ones_like(weights)
    for k, factor in enumerate(out[:-1]):
        size = factor.abs()
        near = size >= (1 - 1e-6) * size.amax(1, keepdim=True)
        first = near.to(torch.int8).argmax(1, keepdim=True)
        sign = torch.where(factor.gather(1, first)[:, 0] < 0, -1.0, 1.0).to(factor.dtype)
        out[k] = factor * sign[:, None]
        carried = carried * sign
    out[-1] = out[-1] * carried[:, None]
    order = torch.sort(weights, descending=True, stable=True).indices
    return weights[order], [f[order] for f in out]
