"""One tensor, its fits and what is said about them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attnlens.errors import DecompositionError

from ._input import Labelled, Progress, tell
from ._solve import COARSER, Best, Settings, core_sizes, polish, solve
from .align import factor_match, match_null
from .compress import Compressed, compress, times
from .diagnostics import Degeneracy, canonical, core_consistency, degeneracy, residual_error
from .rank import RankSelection, select
from .results import CPFit

_SPLIT_TOL = 1e-6
_SPLIT_SWEEPS = 150
_NULL_DRAWS = 40
_KEPT = 10
"""One in so many sweeps is kept for the whole tensor, whatever the core needs."""


class Job:
    """A tensor of unit norm, whole or compressed, and the settings of its fits."""

    def __init__(
        self,
        labelled: Labelled,
        settings: Settings,
        progress: Progress | None = None,
        packed: Compressed | None = None,
    ) -> None:
        self.labelled = labelled
        self.settings = settings
        self.progress = progress
        self.packed = packed
        self.shape = tuple(labelled.tensor.shape) if packed is None else packed.shape

    def _solve(self, ranks: list[int], warm: list[Tensor] | None = None) -> dict[int, Best]:
        """Best factors of every rank that the tensor can fill; of the largest such for the rest."""
        tell(self.progress, "compress", 0, 1)
        packed = self.packed
        if packed is None:
            packed = compress(self.labelled.tensor, core_sizes(self.shape, max(ranks)))
        tell(self.progress, "compress", 1, 1)
        # The CP rank is at most the product of all multilinear ranks but the largest.
        cap = math.prod(sorted(packed.core.shape)[:-1])
        warm = warm if max(ranks) <= cap else None
        capped = sorted({min(r, cap) for r in ranks})
        settings = self.settings
        if self._polishes:
            kept = math.ceil(settings.max_iter / _KEPT)
            settings = replace(settings, max_iter=max(settings.max_iter - kept, 1))
        return solve(packed, capped, settings, warm=warm, progress=self.progress)

    @property
    def _polishes(self) -> bool:
        return self.packed is None and self.settings.polish_sweeps != 0

    def fit(self, ranks: list[int], warm: list[Tensor] | None = None) -> dict[int, CPFit]:
        """Fit every rank."""
        if self.labelled.is_zero:
            return {rank: self._zero(rank) for rank in ranks}
        found = self._solve(ranks, warm)
        data = self.labelled.tensor
        if self._polishes:
            polish(data, found, self.settings, self.progress)
        forms = {rank: canonical(best.factors) for rank, best in found.items()}
        tell(self.progress, "diagnose", 0, 1)
        inner = [(w, self._inward(rows)) for w, rows in forms.values()]
        consistency = dict(zip(forms, core_consistency(data, inner), strict=True))
        tell(self.progress, "diagnose", 1, 1)
        fits = {}
        for rank in ranks:
            key = min(rank, max(found))
            fits[rank] = self._report(rank, found[key], forms[key], consistency[key])
        return fits

    def _inward(self, rows: list[Tensor]) -> list[Tensor]:
        """Factors in the space of the tensor at hand."""
        if self.packed is None:
            return rows
        return [f @ b for f, b in zip(rows, self.packed.bases, strict=True)]

    def _error(self, best: Best, weights: Tensor, rows: list[Tensor]) -> float:
        if not math.isnan(best.error):
            return best.error
        inner = self._inward(rows)
        error = residual_error(self.labelled.tensor, weights, inner)
        if self.packed is None:
            return error
        # What the bases left out, and what non-negative components have outside of them.
        model, seen = (torch.stack([f @ f.T for f in fs]).prod(0) for fs in (rows, inner))
        outside = float(weights @ (model - seen) @ weights)
        return math.sqrt(error**2 + self.packed.lost + max(0.0, outside))

    def select(self, fits: dict[int, CPFit], mode: int, n_splits: int) -> RankSelection:
        """Fit random halves along `mode` and compare their components in all other modes."""
        ranks = list(fits)
        name, size = self.labelled.dims[mode], self.shape[mode]
        if size < 4:
            raise DecompositionError(
                f"Mode {name!r} has {size} entries; at least 4 are needed to split it in halves.",
                hint="Name another mode with split=, or give one rank.",
            )
        others = [k for k in range(len(self.shape)) if k != mode]
        table = np.zeros((n_splits, len(ranks)))
        chance = np.zeros_like(table)
        for i in range(n_splits if not self.labelled.is_zero else 0):
            rng = np.random.default_rng([self.settings.seed, 0, i])
            order = rng.permutation(size)
            halves = [self._half(np.sort(part), mode) for part in np.array_split(order, 2)]
            if all(half is not None for half in halves):
                left, right = (half._solve(ranks) for half in halves if half is not None)
                for j, rank in enumerate(ranks):
                    if rank not in left or rank not in right:
                        continue
                    a, b = ([f.T.cpu().numpy() for f in s[rank].factors] for s in (left, right))
                    table[i, j] = factor_match(a, b, modes=others).min
                    if self.settings.nonnegative:
                        null = match_null(a, b, modes=others, n_draws=_NULL_DRAWS, seed=i)
                        chance[i, j] = np.quantile(null.min, 0.95)
            tell(self.progress, "split", i + 1, n_splits)
        return select(
            ranks,
            np.array([f.error for f in fits.values()]),
            np.array([f.core_consistency for f in fits.values()]),
            table,
            np.median(chance, axis=0) if self.settings.nonnegative else None,
            name,
        )

    def _half(self, entries: np.ndarray, mode: int) -> Job | None:
        # Which components come back is settled long before the last digits of their loadings.
        loose = replace(
            self.settings,
            tol=max(self.settings.tol, _SPLIT_TOL),
            max_iter=min(self.settings.max_iter, _SPLIT_SWEEPS),
            polish_sweeps=0,
        )
        data = self.labelled.tensor
        index = torch.from_numpy(entries).to(data.device)
        if self.packed is None:
            part = data.index_select(mode, index)
            bases = None
        else:
            # Half of an orthonormal basis is no longer orthonormal: its triangle joins the core.
            basis, triangle = torch.linalg.qr(self.packed.bases[mode][index])
            part = times(data, triangle, mode)
            bases = [*self.packed.bases]
            bases[mode] = basis
        norm = float(torch.linalg.vector_norm(part))
        if norm == 0:
            return None
        part = part / norm
        packed = None if bases is None else Compressed(part, bases)
        return Job(Labelled(part, self.labelled.dims), loose, packed=packed)

    def _report(
        self,
        rank: int,
        best: Best,
        form: tuple[Tensor, list[Tensor]],
        consistency: float,
    ) -> CPFit:
        weights, rows = form
        cap = len(weights)
        error = self._error(best, weights, rows)
        signs = degeneracy(weights, rows)
        notes = []
        sizes = zip(self.shape, self.labelled.dims, strict=True)
        small = [f"{n} of {d!r}" for n, d in sizes if n < rank]
        if small:
            notes.append(
                f"Rank {rank} is above a size of the tensor ({', '.join(small)}): the components "
                "of that mode are linearly dependent."
            )
        if cap < rank:
            notes.append(
                f"The tensor's multilinear ranks are so low that {cap} component"
                f"{'s describe' if cap > 1 else ' describes'} it fully; the other {rank - cap} of "
                f"{rank} have weight 0 and seeded random factors."
            )
            weights, rows = _fill(weights, rows, rank, self.settings.seed)
            consistency = math.nan
        if not best.converged:
            notes.append(self._unsettled(best.n_sweeps))
        if signs.degenerate:
            notes.append(
                f"Degenerate: two components cancel each other (least triple cosine "
                f"{signs.min_cosine:.3f}, component energy {signs.energy:.3g} times the tensor's). "
                "Do not interpret or cluster them; lower the rank or use nonnegative=True."
            )
        if error > 0.9:
            notes.append(f"The fit explains {100 * (1 - error**2):.1f} % of the tensor's energy.")
        return self._result(
            weights, rows, rank, error, best.converged, best.n_sweeps, best.restart_errors, signs,
            consistency, notes,
        )  # fmt: skip

    def _unsettled(self, sweeps: int) -> str:
        settings = self.settings
        tol = settings.tol * (COARSER if self._polishes else 1)
        if settings.polish_sweeps and sweeps < settings.max_iter:
            remedy = f"raise polish_sweeps ({settings.polish_sweeps})"
        else:
            remedy = f"raise max_iter ({settings.max_iter})"
        return (
            f"Not converged: after {sweeps} sweeps the error still falls by more than {tol:.3g} a "
            f"sweep. To let it settle, {remedy} or tol ({settings.tol:.3g})."
        )

    def _zero(self, rank: int) -> CPFit:
        none = torch.zeros(0, dtype=torch.float64)
        empty = [torch.zeros(0, n, dtype=torch.float64) for n in self.shape]
        weights, rows = _fill(none, empty, rank, self.settings.seed)
        return self._result(
            weights, rows, rank, 0.0, True, 0, np.zeros(self.settings.n_restarts),
            Degeneracy(1.0, 0.0, False), math.nan,
            ["The tensor is zero: every component has weight 0 and seeded random factors."],
        )  # fmt: skip

    def _result(
        self,
        weights: Tensor,
        rows: list[Tensor],
        rank: int,
        error: float,
        converged: bool,
        n_sweeps: int,
        restart_errors: np.ndarray,
        signs: Degeneracy,
        consistency: float,
        notes: list[str],
    ) -> CPFit:
        return CPFit(
            weights=self.labelled.rescale(weights.cpu().numpy()),
            factors=tuple(np.ascontiguousarray(f.T.cpu().numpy()) for f in rows),
            dims=self.labelled.dims,
            error=error,
            converged=converged,
            n_sweeps=n_sweeps,
            restart_errors=restart_errors,
            degeneracy=signs,
            core_consistency=consistency,
            rank=rank,
            nonnegative=self.settings.nonnegative,
            seed=self.settings.seed,
            notes=tuple(notes),
            coords=self.labelled.coords,
        )


def _fill(weights: Tensor, rows: list[Tensor], rank: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Add components of weight 0, with seeded non-negative unit-norm factors, up to `rank`."""
    rng = np.random.default_rng([seed, rank])
    out = []
    for factor in rows:
        extra = torch.from_numpy(rng.random((rank - len(weights), factor.shape[1])) + 1e-3)
        extra = (extra / extra.norm(dim=1, keepdim=True)).to(factor)
        out.append(torch.cat([factor, extra]))
    return torch.cat([weights, weights.new_zeros(rank - len(weights))]), out
