"""From a compressed tensor to the best factors of every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ._als import Problem, Solution, descend, least_squares
from ._input import Progress, tell
from ._starts import eigen_start, normal_start
from .compress import Compressed
from .nonnegative import hals, positive_part, positive_start

_SCOUT_TOL = 1e-6
_SCOUT_SWEEPS = 60
_FINALISTS = 3
COARSER = 300
"""Tolerance on the whole tensor, where a sweep costs far more, over that on the core."""
_BATCH = 1 << 24
"""Elements of the largest temporary of a batch."""


@dataclass
class Best:
    """The best of a rank's restarts."""

    factors: list[Tensor]
    """``[component, n_k]`` float64, in the tensor's own space."""
    restart_errors: np.ndarray
    converged: bool
    n_sweeps: int
    error: float = float("nan")
    """Relative error on the whole tensor, where the expansion of the square gives it exactly."""


@dataclass(frozen=True)
class Settings:
    """What the restarts of every rank share."""

    n_restarts: int
    seed: int
    nonnegative: bool
    max_iter: int
    tol: float
    polish_sweeps: int | None = None
    """Bound on sweeps on the whole tensor; None for what is left of `max_iter`."""


def solve(
    packed: Compressed,
    ranks: Sequence[int],
    settings: Settings,
    *,
    warm: list[Tensor] | None = None,
    progress: Progress | None = None,
) -> dict[int, Best]:
    """Fit every rank from every start on the compressed tensor.

    All restarts run to a loose tolerance; the best few of each rank go on to `settings.tol`.

    Parameters
    ----------
    packed : Compressed
        A tensor of unit norm; what its bases leave out is counted in the errors.
    ranks : sequence of int
        Distinct ranks.
    warm : list of Tensor, optional
        Factors ``[component, n_k]`` that take the place of the first start (one rank only).
    """
    found: dict[int, Best] = {}
    done, total = 0, len(ranks)
    for band in _bands(packed, sorted(ranks), settings.n_restarts, settings.nonnegative):
        core = _truncate(packed, max(band)) if not settings.nonnegative else packed
        found |= _solve_band(core, band, settings, warm)
        done += len(band)
        tell(progress, "fit", done, total)
    return found


def _bands(
    packed: Compressed, ranks: list[int], n_restarts: int, nonnegative: bool
) -> list[list[int]]:
    """Group ranks of like size, so that padding stays low and small ranks get small cores."""
    largest = _column(packed, nonnegative)
    bands: list[list[int]] = []
    for rank in ranks:
        if bands:
            band = [*bands[-1], rank]
            fits = sum(band) * n_restarts * largest <= _BATCH
            if fits and (rank <= 4 or rank <= 2 * band[0]):
                bands[-1] = band
                continue
        bands.append([rank])
    return bands


def _column(packed: Compressed, nonnegative: bool) -> int:
    """Elements that one component adds to the largest temporaries of a batch."""
    column = packed.core.numel() // min(packed.core.shape)
    return max(column, 4 * sum(packed.shape)) if nonnegative else column


def core_sizes(shape: Sequence[int], rank: int) -> list[int]:
    """Sizes of the core on which `rank` components are fitted."""
    return [min(n, max(3 * rank, 8)) for n in shape]


def _truncate(packed: Compressed, rank: int) -> Compressed:
    sizes = core_sizes(packed.core.shape, rank)
    core = packed.core[tuple(slice(n) for n in sizes)].contiguous()
    bases = [b[:, :n] for b, n in zip(packed.bases, sizes, strict=True)]
    return Compressed(core, bases)


def _starts(
    packed: Compressed, rank: int, settings: Settings, warm: list[Tensor] | None
) -> list[list[Tensor]]:
    """One start per restart; the draws depend on the seed, the rank and the restart alone."""
    core = packed.core.cpu()
    out = []
    for restart in range(settings.n_restarts):
        if restart == 0 and warm is not None:
            out.append(warm)
            continue
        rng = np.random.default_rng([settings.seed, rank, restart])
        eigen = eigen_start(rng, core, rank) if restart % 2 == 0 else None
        if not settings.nonnegative:
            out.append(normal_start(rng, tuple(core.shape), rank) if eigen is None else eigen)
        elif eigen is None:
            out.append(positive_start(rng, packed.shape, rank))
        else:
            full = [f @ b.cpu().T for f, b in zip(eigen, packed.bases, strict=True)]
            out.append(positive_part(full))
    return out


def _solve_band(
    packed: Compressed, band: list[int], settings: Settings, warm: list[Tensor] | None
) -> dict[int, Best]:
    device = packed.core.device
    width = max(band)
    if warm is not None and not settings.nonnegative:
        warm = [w @ b.cpu() for w, b in zip(warm, packed.bases, strict=True)]
    jobs = [(rank, s) for rank in band for s in _starts(packed, rank, settings, warm)]
    ranks = torch.tensor([rank for rank, _ in jobs], device=device)
    problem = Problem(packed.core, 1.0, packed.bases if settings.nonnegative else None)
    factors = [
        torch.stack([_pad(start[k], width) for _, start in jobs]).to(device)
        for k in range(problem.order)
    ]
    first = min(settings.max_iter, _SCOUT_SWEEPS)
    largest = _column(packed, settings.nonnegative)
    step = max(1, _BATCH // (width * largest))
    parts = [
        run(problem, [f[i : i + step] for f in factors], ranks[i : i + step], settings, first)
        for i in range(0, len(jobs), step)
    ]
    scout = parts[0] if len(parts) == 1 else _join(parts)
    count = settings.n_restarts
    loss = torch.where(torch.isfinite(scout.loss), scout.loss, torch.inf).view(-1, count)
    order = torch.sort(loss, dim=1, stable=True).indices[:, :_FINALISTS]
    chosen = (order + count * torch.arange(len(band), device=device)[:, None]).reshape(-1)
    left = settings.max_iter - first
    if left > 0:
        final = run(
            problem, [f[chosen] for f in scout.factors], ranks[chosen], settings, left, fine=True
        )
        final.sweeps += scout.sweeps[chosen]
    else:
        final = Solution(
            [f[chosen] for f in scout.factors],
            scout.loss[chosen],
            torch.zeros_like(scout.converged[chosen]),
            scout.sweeps[chosen],
        )
    errors = scout.loss.clone()
    errors[chosen] = torch.minimum(final.loss, errors[chosen])
    out = {}
    keep = order.shape[1]
    for i, rank in enumerate(band):
        best = i * keep + int(final.loss[i * keep : (i + 1) * keep].argmin())
        rows = [f[best, :rank] for f in final.factors]
        if not settings.nonnegative:
            rows = [f @ b.T for f, b in zip(rows, packed.bases, strict=True)]
        out[rank] = Best(
            rows,
            errors[i * count : (i + 1) * count].sqrt().cpu().numpy(),
            bool(final.converged[best]),
            whole_sweeps(final.sweeps[best]),
        )
    return out


def run(
    problem: Problem,
    factors: list[Tensor],
    ranks: Tensor,
    settings: Settings,
    sweeps: int | Tensor,
    *,
    fine: bool = False,
) -> Solution:
    """Descend with the update that the constraint asks for."""
    return descend(
        problem,
        factors,
        ranks,
        update=hals if settings.nonnegative else least_squares,
        nonnegative=settings.nonnegative,
        max_sweeps=sweeps,
        tol=settings.tol if fine else max(settings.tol, _SCOUT_TOL),
    )


def polish(
    tensor: Tensor,
    found: dict[int, Best],
    settings: Settings,
    progress: Progress | None = None,
) -> None:
    """Go on from the best factors of every rank on the whole tensor, in place."""
    coarser = replace(settings, tol=COARSER * settings.tol)
    most = settings.max_iter if settings.polish_sweeps is None else settings.polish_sweeps
    order = tensor.ndim
    budget = {rank: min(most, settings.max_iter - best.n_sweeps) for rank, best in found.items()}
    for rank, sweeps in budget.items():
        if sweeps < 1:  # nothing is known of the whole tensor then
            found[rank].converged = False
    ranks = sorted(rank for rank, sweeps in budget.items() if sweeps >= 1)
    largest = tensor.numel() // min(tensor.shape)
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and (sum(groups[-1]) + rank) * largest <= 2 * _BATCH:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    problem = Problem(tensor, 1.0)
    done = 0
    for group in groups:
        width = max(group)
        start = [
            torch.stack([_pad(found[r].factors[k], width) for r in group]) for k in range(order)
        ]
        counts = torch.tensor(group, device=tensor.device)
        left = torch.tensor([budget[r] for r in group], device=tensor.device)
        result = run(problem, start, counts, coarser, left, fine=True)
        for i, rank in enumerate(group):
            best = found[rank]
            best.factors = [f[i, :rank] for f in result.factors]
            best.converged = bool(result.converged[i])
            best.n_sweeps += whole_sweeps(result.sweeps[i])
            # In float64 the expansion is good to 1e-15 of the components' energy.
            norms = torch.stack([f.square().sum(1) for f in best.factors])
            loss, energy = float(result.loss[i]), float(norms.prod(0).sum())
            if tensor.dtype == torch.float64 and loss > 1e-6 * max(1.0, energy):
                best.error = math.sqrt(loss)
        done += len(group)
        tell(progress, "polish", done, len(ranks))


def whole_sweeps(sweeps: Tensor) -> int:
    """Sweeps that were begun: a round updates all modes but one."""
    return math.ceil(float(sweeps) - 1e-6)


def _pad(rows: Tensor, width: int) -> Tensor:
    out = rows.new_zeros(width, rows.shape[1])
    out[: rows.shape[0]] = rows
    return out


def _join(parts: list[Solution]) -> Solution:
    return Solution(
        [torch.cat(fs) for fs in zip(*(p.factors for p in parts), strict=True)],
        torch.cat([p.loss for p in parts]),
        torch.cat([p.converged for p in parts]),
        torch.cat([p.sweeps for p in parts]),
    )
