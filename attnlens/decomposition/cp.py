"""CP decomposition of labelled tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from attnlens.errors import DecompositionError

from ._input import Labelled, Progress, read, tell
from ._solve import Best, Settings, core_sizes, polish, solve
from .align import factor_match
from .compress import Compressed, compress
from .diagnostics import Degeneracy, canonical, core_consistency, degeneracy, residual_error
from .rank import RankSelection, select
from .results import CPFit, CPScan

MAX_RANK = 12
"""Largest rank that ``rank="auto"`` tries unless told otherwise."""


@overload
def cp(
    tensor: Any,
    rank: int,
    *,
    n_restarts: int = ...,
    seed: int = ...,
    nonnegative: bool = ...,
    max_iter: int = ...,
    tol: float = ...,
    polish_sweeps: int = ...,
    init: Any = ...,
    dims: Sequence[str] | None = ...,
    memory: int | None = ...,
    progress: Progress | None = ...,
) -> CPFit: ...
@overload
def cp(
    tensor: Any,
    rank: Literal["auto"] | Iterable[int] = ...,
    *,
    n_restarts: int = ...,
    seed: int = ...,
    nonnegative: bool = ...,
    split: str | int | None = ...,
    n_splits: int = ...,
    max_rank: int = ...,
    max_iter: int = ...,
    tol: float = ...,
    polish_sweeps: int = ...,
    dims: Sequence[str] | None = ...,
    memory: int | None = ...,
    progress: Progress | None = ...,
) -> CPScan: ...
def cp(
    tensor: Any,
    rank: int | Literal["auto"] | Iterable[int] = "auto",
    *,
    n_restarts: int = 10,
    seed: int = 0,
    nonnegative: bool = False,
    split: str | int | None = None,
    n_splits: int = 3,
    max_rank: int = MAX_RANK,
    max_iter: int = 500,
    tol: float = 1e-8,
    polish_sweeps: int = 10,
    init: Any = None,
    dims: Sequence[str] | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> CPFit | CPScan:
    """Decompose a tensor into a sum of outer products.

    The tensor is compressed to a small core by a sequentially truncated HOSVD; every rank and every
    restart is fitted there in one batch by accelerated alternating least squares (hierarchical, with
    `nonnegative`); the best fit of each rank is expanded and polished on the whole tensor.

    Parameters
    ----------
    tensor : DataArray, ndarray or Tensor
        Real and finite, with 3 or 4 modes, of any float, integer or boolean dtype, on any device.
        Never modified.
    rank : int, iterable of int, or "auto"
        Number of components. Several ranks give a `CPScan`; "auto" tries 1 to `max_rank` and selects
        by split-half reproducibility.
    n_restarts : int
        Starts per rank: half from a randomised generalised eigendecomposition of the core, half
        from normal factors (squared, with `nonnegative`).
    seed : int
        Seed of all randomness. The same seed gives the same bytes on one machine.
    nonnegative : bool
        Hold all factors non-negative.
    split : str or int, optional
        Mode to split in halves when selecting a rank: its entries are the independent samples
        (prompts, tokens). With "auto" the last mode by default; with several ranks none, and no
        rank is selected.
    n_splits : int
        Number of random splits.
    max_rank : int
        Largest rank that "auto" tries.
    max_iter : int
        Bound on sweeps on the core.
    tol : float
        Converged when the relative error falls by less than this per sweep.
    polish_sweeps : int
        Bound on sweeps on the whole tensor; 0 leaves the fit in the compressed space.
    init : CPFit, CPTensor or sequence of factors, optional
        Factors ``[n_k, rank]`` that take the place of the first start. Never modified.
    dims : sequence of str, optional
        Names of the modes, where the tensor does not carry them (or to rename them).
    memory : int, optional
        Bytes that may be used; what is free by default.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.

    Returns
    -------
    CPFit or CPScan

    Raises
    ------
    DecompositionError
        The tensor, a rank or an option cannot be worked with; the message says which value.

    See Also
    --------
    compress_slices : for tensors that are never to be held whole.

    References
    ----------
    T. G. Kolda, B. W. Bader, "Tensor decompositions and applications", SIAM Rev. 51 (2009);
    R. Bro, C. A. Andersson, "Improving the speed of multiway algorithms II: compression",
    Chemometr. Intell. Lab. Syst. 42 (1998).
    """
    settings = _settings(n_restarts, seed, nonnegative, max_iter, tol)
    if polish_sweeps < 0 or n_splits < 1:
        raise DecompositionError(
            f"polish_sweeps={polish_sweeps}, n_splits={n_splits}: at least 0 and 1 are needed."
        )
    single = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    ranks = _ranks(rank, max_rank)
    labelled = read(tensor, dims=dims, nonnegative=nonnegative, memory=memory)
    job = _Job(labelled, settings, polish_sweeps, progress)
    if single:
        warm = None if init is None else _warm(init, labelled, ranks[0], nonnegative)
        return job.fit(ranks, warm)[ranks[0]]
    if init is not None:
        raise DecompositionError("init= starts one rank; a scan of several cannot use it.")
    if split is None and isinstance(rank, str):
        split = labelled.dims[-1]
    mode = None if split is None else _mode(split, labelled.dims)
    fits = job.fit(ranks)
    return CPScan(fits, None if mode is None else job.select(fits, mode, n_splits))


class _Job:
    """One call of `cp`: a tensor in working form and the settings of its fits."""

    def __init__(
        self,
        labelled: Labelled,
        settings: Settings,
        polish_sweeps: int,
        progress: Progress | None = None,
    ) -> None:
        self.labelled = labelled
        self.settings = settings
        self.polish_sweeps = polish_sweeps
        self.progress = progress

    def fit(self, ranks: list[int], warm: list[Tensor] | None = None) -> dict[int, CPFit]:
        """Fit every rank."""
        if self.labelled.is_zero:
            return {rank: self._zero(rank) for rank in ranks}
        tell(self.progress, "compress", 0, 1)
        data = self.labelled.tensor
        packed = compress(data, core_sizes(data.shape, max(ranks)))
        tell(self.progress, "compress", 1, 1)
        cap = _largest_rank(packed)
        found = solve(
            packed,
            sorted({min(r, cap) for r in ranks}),
            self.settings,
            warm=warm if max(ranks) <= cap else None,
            progress=self.progress,
        )
        if self.polish_sweeps:
            polish(data, found, self.settings, self.polish_sweeps, self.progress)
        fits = {}
        for i, rank in enumerate(ranks):
            fits[rank] = self._report(found[min(rank, cap)], rank, packed, cap)
            tell(self.progress, "diagnose", i + 1, len(ranks))
        return fits

    def factors(self, ranks: list[int]) -> dict[int, list[np.ndarray]]:
        """Factors ``[n_k, component]`` of every rank, without diagnostics."""
        data = self.labelled.tensor
        packed = compress(data, core_sizes(data.shape, max(ranks)))
        cap = _largest_rank(packed)
        found = solve(packed, sorted({min(r, cap) for r in ranks}), self.settings)
        return {r: [f.T.cpu().numpy() for f in found[r].factors] for r in ranks if r <= cap}

    def select(self, fits: dict[int, CPFit], mode: int, n_splits: int) -> RankSelection:
        """Fit random halves along `mode` and compare their components in all other modes."""
        ranks = list(fits)
        name, size = self.labelled.dims[mode], self.labelled.tensor.shape[mode]
        if size < 4:
            raise DecompositionError(
                f"Mode {name!r} has {size} entries; at least 4 are needed to split it in halves.",
                hint="Name another mode with split=, or give one rank.",
            )
        others = [k for k in range(len(self.labelled.dims)) if k != mode]
        table = np.zeros((n_splits, len(ranks)))
        for i in range(n_splits if not self.labelled.is_zero else 0):
            rng = np.random.default_rng([self.settings.seed, 0, i])
            order = rng.permutation(size)
            halves = [self._half(np.sort(part), mode) for part in np.array_split(order, 2)]
            if all(half is not None for half in halves):
                left, right = (half.factors(ranks) for half in halves if half is not None)
                for j, rank in enumerate(ranks):
                    if rank in left and rank in right:
                        table[i, j] = factor_match(left[rank], right[rank], modes=others).min
            tell(self.progress, "split", i + 1, n_splits)
        return select(
            ranks,
            np.array([f.error for f in fits.values()]),
            np.array([f.core_consistency for f in fits.values()]),
            table,
            name,
        )

    def _half(self, entries: np.ndarray, mode: int) -> _Job | None:
        data = self.labelled.tensor
        part = data.index_select(mode, torch.from_numpy(entries).to(data.device))
        norm = float(part.double().norm())
        if norm == 0:
            return None
        return _Job(Labelled(part / norm, self.labelled.dims), self.settings, 0)

    def _report(self, best: Best, rank: int, packed: Compressed, cap: int) -> CPFit:
        data, settings = self.labelled.tensor, self.settings
        weights, rows = canonical(best.factors)
        error = residual_error(data, weights, rows)
        signs = degeneracy(weights, rows)
        consistency = core_consistency(data, weights, rows)
        notes = []
        small = [
            f"{n} of {d!r}" for n, d in zip(data.shape, self.labelled.dims, strict=True) if n < rank
        ]
        if small:
            notes.append(
                f"Rank {rank} is above a size of the tensor ({', '.join(small)}): the components "
                "of that mode are linearly dependent."
            )
        if cap < rank:
            notes.append(
                f"The tensor has multilinear ranks {packed.ranks}, so that {cap} components "
                f"describe it fully; the other {rank - cap} of {rank} have weight 0 and seeded "
                "random factors."
            )
            weights, rows = _fill(weights, rows, rank, settings.seed)
            consistency = math.nan
        if not best.converged:
            notes.append(f"Not converged after {best.n_sweeps:.0f} sweeps.")
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

    def _zero(self, rank: int) -> CPFit:
        data = self.labelled.tensor
        none = torch.zeros(0, dtype=torch.float64)
        empty = [torch.zeros(0, n, dtype=torch.float64) for n in data.shape]
        weights, rows = _fill(none, empty, rank, self.settings.seed)
        return self._result(
            weights, rows, rank, 0.0, True, 0.0, np.zeros(self.settings.n_restarts),
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
        n_sweeps: float,
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


def _settings(n_restarts: int, seed: int, nonnegative: bool, max_iter: int, tol: float) -> Settings:
    for name, value in (("n_restarts", n_restarts), ("max_iter", max_iter)):
        if value < 1:
            raise DecompositionError(f"{name}={value}: at least 1 is needed.")
    if seed < 0:
        raise DecompositionError(f"seed={seed}: a whole number of at least 0 is needed.")
    if not (math.isfinite(tol) and tol >= 0):
        raise DecompositionError(f"tol={tol}: a finite number of at least 0 is needed.")
    return Settings(int(n_restarts), int(seed), bool(nonnegative), int(max_iter), float(tol))


def _ranks(rank: Any, max_rank: int) -> list[int]:
    """Sorted distinct ranks of any accepted form."""
    if isinstance(rank, str):
        if rank != "auto":
            raise DecompositionError(
                f"rank={rank!r} is not understood.", hint='Give a number, several, or "auto".'
            )
        values: list[Any] = list(range(1, max_rank + 1))
    else:
        values = list(rank) if isinstance(rank, Iterable) else [rank]
    whole = [v for v in values if isinstance(v, int | np.integer) and not isinstance(v, bool)]
    if not values or len(whole) != len(values) or min(whole) < 1:
        raise DecompositionError(
            f"rank={rank!r}: whole numbers of at least 1 are needed.",
            hint='Give a number, several, or "auto".',
        )
    return sorted({int(v) for v in whole})


def _mode(split: str | int, dims: tuple[str, ...]) -> int:
    if isinstance(split, str):
        if split not in dims:
            raise DecompositionError(f"split={split!r} is not a mode of the tensor: {list(dims)}.")
        return dims.index(split)
    if not -len(dims) <= split < len(dims):
        raise DecompositionError(f"split={split}: the tensor has {len(dims)} modes.")
    return split % len(dims)


def _warm(init: Any, labelled: Labelled, rank: int, nonnegative: bool) -> list[Tensor]:
    """Copy the caller's factors into rows ``[component, n_k]``."""
    weights = getattr(init, "weights", None)
    factors = [np.array(f, dtype=np.float64) for f in getattr(init, "factors", init)]
    shape = tuple(labelled.tensor.shape)
    if [f.shape for f in factors] != [(n, rank) for n in shape]:
        raise DecompositionError(
            f"init has factors of shapes {[f.shape for f in factors]}; a fit of rank {rank} to a "
            f"tensor of shape {shape} needs {[(n, rank) for n in shape]}."
        )
    if not all(np.isfinite(f).all() for f in factors):
        raise DecompositionError("init has factors that are not finite.")
    if weights is not None:
        # The scale of a start is irrelevant; the proportions of its components are not.
        values = np.asarray(weights, dtype=np.float64)
        factors[0] = factors[0] * (values / max(np.abs(values).max(), 1e-300))
    rows = [torch.from_numpy(np.ascontiguousarray(f.T)) for f in factors]
    return [r.clamp_min(0) for r in rows] if nonnegative else rows


def _largest_rank(packed: Compressed) -> int:
    """Upper bound on the CP rank: the product of all multilinear ranks but the largest."""
    return math.prod(sorted(packed.core.shape)[:-1])


def _fill(weights: Tensor, rows: list[Tensor], rank: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Add components of weight 0, with seeded non-negative unit-norm factors, up to `rank`."""
    rng = np.random.default_rng([seed, rank])
    out = []
    for factor in rows:
        extra = torch.from_numpy(rng.random((rank - len(weights), factor.shape[1])) + 1e-3)
        extra = (extra / extra.norm(dim=1, keepdim=True)).to(factor)
        out.append(torch.cat([factor, extra]))
    return torch.cat([weights, weights.new_zeros(rank - len(weights))]), out
