"""CP decomposition of labelled tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from attnlens.errors import DecompositionError

from ._input import Labelled, Progress, is_whole, read, whole_number, yes_or_no
from ._job import Job
from ._solve import Settings
from .compress import Compressed
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
    polish_sweeps: int | None = ...,
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
    polish_sweeps: int | None = ...,
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
    polish_sweeps: int | None = None,
    init: Any = None,
    dims: Sequence[str] | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> CPFit | CPScan:
    """Decompose a tensor into a sum of outer products.

    The tensor is compressed to a small core by a sequentially truncated HOSVD; every rank and
    every restart is fitted there in one batch by accelerated alternating least squares
    (hierarchical, with `nonnegative`); the best fit of each rank is expanded and polished on the
    whole tensor.

    Parameters
    ----------
    tensor : DataArray, ndarray, Tensor or Compressed
        Real and finite, with 3 or 4 modes, of any float, integer or boolean dtype, on any device.
        Never modified.
    rank : int, iterable of int, or "auto"
        Number of components. Several ranks give a `CPScan`; "auto" tries 1 to `max_rank` and
        selects by split-half reproducibility.
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
        Bound on sweeps in all, on the core and on the whole tensor.
    tol : float
        Converged when the relative error falls by less than this per sweep on the core, and by less
        than 300 times this on the whole tensor, where a sweep costs far more.
    polish_sweeps : int, optional
        Bound on sweeps on the whole tensor; by default they go on until the fit settles or
        `max_iter` is used up. 0 leaves the fit in the compressed space.
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
    settings = Settings(
        n_restarts=whole_number("n_restarts", n_restarts, 1),
        seed=whole_number("seed", seed, 0),
        nonnegative=yes_or_no("nonnegative", nonnegative),
        max_iter=whole_number("max_iter", max_iter, 1),
        tol=_tolerance(tol),
        polish_sweeps=None
        if polish_sweeps is None
        else whole_number("polish_sweeps", polish_sweeps, 0),
    )
    n_splits, max_rank = (
        whole_number("n_splits", n_splits, 1),
        whole_number("max_rank", max_rank, 1),
    )
    single = is_whole(rank)
    ranks = _ranks(rank, max_rank)
    if isinstance(tensor, Compressed):
        # The core is scaled to the unit norm of the tensor, lost part included.
        labelled = Labelled(tensor.core, tensor.dims, dict(tensor.coords), (tensor.norm, 1.0))
        job = Job(labelled, settings, progress, tensor)
    else:
        labelled = read(tensor, dims=dims, nonnegative=nonnegative, memory=memory)
        job = Job(labelled, settings, progress)
    names = job.labelled.dims
    if single:
        warm = None if init is None else _warm(init, job.shape, ranks[0], nonnegative)
        return job.fit(ranks, warm)[ranks[0]]
    if init is not None:
        raise DecompositionError("init= starts one rank; a scan of several cannot use it.")
    if split is None and isinstance(rank, str):
        split = names[-1]
    mode = None if split is None else _mode(split, names)
    fits = job.fit(ranks)
    return CPScan(fits, None if mode is None else job.select(fits, mode, n_splits))


def _tolerance(tol: Any) -> float:
    number = isinstance(tol, int | float | np.integer | np.floating) and not isinstance(tol, bool)
    if not (number and math.isfinite(tol) and tol >= 0):
        raise DecompositionError(f"tol={tol!r}: a finite number of at least 0 is needed.")
    return float(tol)


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
    if not values or not all(is_whole(v) and v >= 1 for v in values):
        raise DecompositionError(
            f"rank={rank!r}: whole numbers of at least 1 are needed.",
            hint='Give a number, several, or "auto".',
        )
    return sorted({int(v) for v in values})


def _mode(split: str | int, dims: tuple[str, ...]) -> int:
    if isinstance(split, str):
        if split not in dims:
            raise DecompositionError(f"split={split!r} is not a mode of the tensor: {list(dims)}.")
        return dims.index(split)
    if not is_whole(split) or not -len(dims) <= split < len(dims):
        raise DecompositionError(
            f"split={split!r} is not a mode of the tensor: {list(dims)}.",
            hint=f"Give a name, or a number under {len(dims)}.",
        )
    return split % len(dims)


def _warm(init: Any, shape: tuple[int, ...], rank: int, nonnegative: bool) -> list[Tensor]:
    """Copy the caller's factors into rows ``[component, n_k]``."""
    weights = getattr(init, "weights", None)
    try:
        factors = [np.array(f, dtype=np.float64) for f in getattr(init, "factors", init)]
    except (TypeError, ValueError):
        raise DecompositionError(
            f"init={init!r} holds no factors.",
            hint="Give a CPFit, a CPTensor or one array [n_k, rank] per mode, or leave it out.",
        ) from None
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
