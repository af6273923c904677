"""Non-negative CP: hierarchical alternating least squares, batched, and its starts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def hals(rhs: Tensor, normal: Tensor, current: Tensor) -> Tensor:
    """Improve one non-negative factor, one component at a time.

    References
    ----------
    N. Gillis, F. Glineur, "Accelerated multiplicative updates and hierarchical ALS algorithms for
    nonnegative matrix factorization", Neural Computation 24 (2012).
    """
    new = current.clone()
    scale = normal.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(normal.dtype).tiny)
    weights = normal / scale[..., None]
    target = rhs / scale[..., None]
    # One pass: extrapolation outside gains more than solving the subproblem further does.
    for r in range(new.shape[1]):
        step = target[:, r] - torch.bmm(weights[:, r : r + 1], new)[:, 0]
        new[:, r] = (new[:, r] + step).clamp_min_(0)
    return new


def positive_start(rng: np.random.Generator, shape: tuple[int, ...], rank: int) -> list[Tensor]:
    """Factors ``[component, n_k]`` of squared normal entries: non-negative, far from collinear."""
    rows = [torch.from_numpy(rng.standard_normal((rank, n)) ** 2) for n in shape]
    return [r / r.norm(dim=1, keepdim=True) for r in rows]


def positive_part(factors: list[Tensor]) -> list[Tensor]:
    """Non-negative factors near unconstrained ones.

    Each column keeps the side, positive or negative, with more energy, and a floor of a tenth of
    its mean, so that no entry starts exactly at the bound.
    """
    out = []
    for factor in factors:
        plus, minus = factor.clamp_min(0), (-factor).clamp_min(0)
        side = torch.where(
            plus.norm(dim=1, keepdim=True) >= minus.norm(dim=1, keepdim=True), plus, minus
        )
        side = side + 0.1 * side.mean(1, keepdim=True) + 1e-12
        out.append(side / side.norm(dim=1, keepdim=True))
    return out
