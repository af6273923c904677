"""Batched, accelerated block coordinate descent for CP: every rank and restart at once.

All fits of a batch share one tensor.  Factors are padded to the largest rank and laid out
``[fit, component, size]``; only the real components enter the large matrix product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Update = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(right-hand side, normal matrix, current factor) -> new factor, all ``[fit, component, .]``."""

_RIDGE = 1e-13
_RESOLUTION = 4e-16
_DONE = 1e-15
"""Loss of a fit that is exact to rounding."""


def least_squares(rhs: Tensor, normal: Tensor, current: Tensor) -> Tensor:
    """Solve the normal equations of one factor, with a vanishing proximal term.

    The proximal term keeps the system definite when components coincide or vanish and, pulling
    towards the current factor instead of zero, does not bias the fixed point.
    """
    ridge = _RIDGE * normal.diagonal(dim1=-2, dim2=-1)
    lower, info = torch.linalg.cholesky_ex(normal + torch.diag_embed(ridge))
    if bool(info.any()):  # indefinite by rounding, or a vanished component: a firmer ridge there
        firm = 1e6 * _RIDGE * normal.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
        firm = firm.clamp_min(torch.finfo(normal.dtype).tiny)
        ridge = torch.where(info[:, None] > 0, ridge + firm, ridge)
        lower = torch.linalg.cholesky_ex(normal + torch.diag_embed(ridge))[0]
    return torch.cholesky_solve(torch.addcmul(rhs, ridge[..., None], current), lower)


@dataclass
class Problem:
    """A tensor seen through orthonormal bases, ready for products with all fits' factors.

    Parameters
    ----------
    core : Tensor
        ``[n_1, ..., n_N]``, of any size: the compressed core or the whole tensor.
    norm2 : float
        Squared norm of the tensor that is being approximated, at least that of `core`.
    bases : sequence of Tensor, optional
        ``[N_k, n_k]`` orthonormal columns. With bases, factors live in the large space
        (where non-negativity means something) and products are made in the small one.
    """

    core: Tensor
    norm2: float
    bases: Sequence[Tensor] | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(self.core.shape)
        self.order = self.core.ndim
        # Small cores keep an unfolding per mode; a large tensor is never copied.
        self.unfolded = (
            [self.core.movedim(k, 0).reshape(n, -1) for k, n in enumerate(self.shape)]
            if self.core.numel() <= 1 << 20
            else None
        )

    def inward(self, factor: Tensor, mode: int) -> Tensor:
        return factor if self.bases is None else factor @ self.bases[mode]

    def outward(self, rows: Tensor, mode: int) -> Tensor:
        return rows if self.bases is None else rows @ self.bases[mode].T

    def contract(self, rows: Tensor, mode: int) -> Tensor:
        """Multiply mode `mode` away: ``[component, n_mode]`` -> ``[component, other modes]``."""
        return self._contract(rows.to(self.core.dtype), mode).to(rows.dtype)

    def _contract(self, rows: Tensor, mode: int) -> Tensor:
        rest = [n for k, n in enumerate(self.shape) if k != mode]
        if self.unfolded is not None:
            return (rows @ self.unfolded[mode]).view(-1, *rest)
        left = 1
        for n in self.shape[:mode]:
            left *= n
        block = self.core.reshape(left, self.shape[mode], -1)
        if left == 1:
            return (rows @ block[0]).view(-1, *rest)
        if block.shape[2] == 1:
            return (rows @ block[:, :, 0].T).view(-1, *rest)
        return torch.matmul(rows, block).movedim(1, 0).reshape(-1, *rest)


def finish(partial: Tensor, rows: dict[int, Tensor], modes: Sequence[int], keep: int) -> Tensor:
    """Multiply away all `modes` of ``[component, modes]`` but `keep`."""
    count = partial.shape[0]
    for mode in reversed([m for m in modes if m > keep]):
        vector = rows[mode]
        partial = torch.bmm(partial.reshape(count, -1, vector.shape[1]), vector[:, :, None])
    for mode in [m for m in modes if m < keep]:
        vector = rows[mode]
        partial = torch.bmm(vector[:, None, :], partial.reshape(count, vector.shape[1], -1))
    return partial.reshape(count, -1)


@dataclass
class Solution:
    """What `descend` returns, per fit."""

    factors: list[Tensor]
    """``[fit, component, n_k]`` per mode; padded components are zero."""
    loss: Tensor
    """Squared error over the tensor's squared norm, by the cheap formula."""
    converged: Tensor
    sweeps: Tensor
    """Full sweeps made, in units of one update of every mode."""


def descend(
    problem: Problem,
    factors: Sequence[Tensor],
    ranks: Tensor,
    *,
    update: Update = least_squares,
    nonnegative: bool = False,
    max_sweeps: int | Tensor = 500,
    tol: float = 1e-8,
) -> Solution:
    """Run accelerated block coordinate descent on a batch of CP fits.

    One round multiplies one mode away by a single matrix product and updates all other modes from
    it, so that N/(N-1) products serve a sweep [1]_. Each update is extrapolated; a round
    that raises the loss is taken back and repeated without extrapolation, with a smaller step [2]_.

    Parameters
    ----------
    problem : Problem
        The tensor.
    factors : sequence of Tensor
        Starting factors ``[fit, component, n_k]``, zero beyond each fit's rank. Not modified.
    ranks : Tensor
        Number of components of each fit, int64 ``[fit]``.
    update : callable
        Solver of one mode's subproblem.
    nonnegative : bool
        Keep extrapolated factors non-negative.
    max_sweeps : int or Tensor
        Bound on the number of sweeps, one for all fits or one each.
    tol : float
        A fit has converged when its relative error fell by less than this per sweep.

    References
    ----------
    .. [1] L. Ma, E. Solomonik, "Efficient parallel CP decomposition with pairwise perturbation and
       multi-sweep dimension tree", IPDPS 2021.
    .. [2] A. M. S. Ang, J. E. Cohen, N. Gillis, L. T. K. Hien, "Accelerating block coordinate
       descent for nonnegative tensor factorization", Numer. Linear Algebra Appl. 28 (2021).
    """
    order, total = problem.order, len(ranks)
    width = factors[0].shape[1]
    device, dtype = factors[0].device, factors[0].dtype
    out = Solution(
        [f.clone() for f in factors],
        torch.full((total,), torch.inf, device=device, dtype=dtype),
        torch.zeros(total, dtype=torch.bool, device=device),
        torch.zeros(total, device=device, dtype=dtype),
    )
    active = torch.arange(total, device=device)
    real = torch.arange(width, device=device) < ranks[:, None]
    point = [f.clone() for f in factors]  # the last accepted iterate
    hat = [f.clone() for f in factors]  # where the next round starts from
    last = [f.clone() for f in factors]  # the last output of each mode's update
    inner = [problem.inward(h, k) for k, h in enumerate(hat)]
    gram = [h @ h.mT for h in hat]
    loss = torch.full((total,), torch.inf, device=device, dtype=dtype)
    beta = torch.full((total,), 0.5, device=device, dtype=dtype)
    ceiling = torch.ones_like(beta)
    calm = torch.zeros_like(beta)
    plain = torch.ones(total, dtype=torch.bool, device=device)
    fill = torch.diag_embed((~real).to(dtype))
    index = real.reshape(-1).nonzero()[:, 0]
    held = order - 1
    per_round = (order - 1) / order
    allowed = torch.as_tensor(max_sweeps, dtype=dtype, device=device).expand(total)
    rounds = (allowed / per_round + 1e-9).floor().clamp_min(1)
    for step in itertools.count(1):
        modes = [k for k in range(order) if k != held]
        rows = {k: inner[k].reshape(-1, inner[k].shape[-1])[index] for k in range(order)}
        partial = problem.contract(rows[held], held)
        jump = torch.where(plain, 0.0 * beta, beta)[:, None, None]
        fresh: dict[int, Tensor] = {}
        final = (held - 1) % order
        for shift in range(1, order):
            mode = (held + shift) % order
            product = finish(partial, rows, modes, mode)
            rhs = product.new_zeros(len(ranks) * width, product.shape[1])
            rhs[index] = product
            rhs = problem.outward(rhs, mode).view(len(ranks), width, -1)
            others = [gram[k] for k in range(order) if k != mode]
            normal = others[0]
            for other in others[1:]:
                normal = normal * other
            new = update(rhs, normal + fill, hat[mode])
            fresh[mode] = new
            if mode == final:
                new_gram = new @ new.mT
                model = normal * new_gram
                value = problem.norm2 - 2 * (rhs * new).sum((1, 2)) + model.sum((1, 2))
                # Components that cancel leave no digits under their own energy's rounding.
                energy = model.diagonal(dim1=1, dim2=2).sum(1)
                value = torch.maximum(value, _RESOLUTION * energy) / problem.norm2
            hat_new = new + jump * (new - last[mode])
            if nonnegative:
                hat_new = hat_new.clamp_min(0)
            if mode == final:
                break
            hat[mode] = hat_new
            gram[mode] = hat_new @ hat_new.mT
            inner[mode] = problem.inward(hat_new, mode)
            rows[mode] = inner[mode].reshape(-1, inner[mode].shape[-1])[index]
        good = value <= loss  # false for NaN
        plain_before, plain = plain, ~good
        bad = plain.nonzero()[:, 0]
        drop = (loss.sqrt() - value.sqrt()) / per_round
        # A round that was taken back says nothing about convergence unless it was a plain one.
        quiet = torch.where(good, drop < tol, plain_before) | (value < _DONE)
        calm = torch.where(quiet, calm + 1, torch.where(good, 0.0 * calm, calm))
        for k in range(order):
            before = point[k]
            point[k] = fresh[k] if k == final else hat[k]
            hat[k] = hat_new if k == final else hat[k]
            last[k] = fresh.get(k, last[k])
            if len(bad):
                # point shares its memory with hat or last: both hold `before` there too.
                rows_before = before[bad]
                for target in (point[k], hat[k], last[k]):
                    target[bad] = rows_before
            if len(bad) or k == final:
                inner[k] = problem.inward(hat[k], k)
                gram[k] = hat[k] @ hat[k].mT
        loss = torch.where(good, value, loss)
        ceiling = torch.where(good, (1.02 * ceiling).clamp_max(1.0), beta)
        beta = torch.where(good, torch.minimum(1.1 * beta, ceiling), beta / 1.5)
        held = final
        done = calm >= 3
        leaving = step >= rounds
        if step % 4 == 0:
            leaving = leaving | done
        if bool(leaving.any()):
            where = active[leaving]
            for k in range(order):
                out.factors[k][where] = point[k][leaving]
            out.loss[where] = loss[leaving]
            out.converged[where] = done[leaving]
            out.sweeps[where] = step * per_round
            stay = ~leaving
            active, rounds = active[stay], rounds[stay]
            if not len(active):
                break
            point, hat, last = ([t[stay] for t in ts] for ts in (point, hat, last))
            inner, gram = ([t[stay] for t in ts] for ts in (inner, gram))
            loss, beta, ceiling, calm = loss[stay], beta[stay], ceiling[stay], calm[stay]
            plain, ranks, real, fill = plain[stay], ranks[stay], real[stay], fill[stay]
            index = real.reshape(-1).nonzero()[:, 0]
    return out
