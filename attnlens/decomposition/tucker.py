"""Tucker decomposition of labelled tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlens.errors import DecompositionError

from ._input import Labelled, Progress, is_whole, read, tell, whole_number
from .compress import complete, fix_signs, leading, times
from .results import TuckerFit

Ranks = (
    int | float | str | Sequence[int | float | str | None] | Mapping[str, int | float | str | None]
)
"""Sizes of the core, shares of the energy, or "all"; one for all modes, one each, or by name."""

_Wanted = int | float | None
_HINT = 'Give a size of at least 1, a share of the energy between 0 and 1, or "all".'
_SETTLED = 1e-6


def tucker(
    tensor: Any,
    ranks: Ranks | None = None,
    *,
    n_sweeps: int = 500,
    dims: Sequence[str] | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> TuckerFit:
    """Decompose a tensor into a core and an orthonormal factor per mode.

    Sequentially truncated HOSVD, smallest mode first, then sweeps of higher-order orthogonal
    iteration until the error settles, all by Gram matrices. Deterministic.

    Parameters
    ----------
    tensor : DataArray, ndarray or Tensor
        Real and finite, with 2 to 6 modes, of any float, integer or boolean dtype, on any device.
    ranks : int, float, sequence, mapping, or None
        Per mode, in order: an int is a size of the core; a float in (0, 1) a share of the energy,
        met by the smallest number of leading directions of that mode's unfolding. One value serves
        all modes (an int is then capped at each mode's size). None or "all" keeps every direction.
        A mapping from modes, by name or number, gives a partial Tucker decomposition: modes not
        named stay whole.
    n_sweeps : int
        Bound on HOOI sweeps. 0 leaves the HOSVD, whose error lies above the best.
    dims : sequence of str, optional
        Names of the modes, where the tensor does not carry them.
    memory : int, optional
        Bytes that may be used; what is free by default.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.

    Returns
    -------
    TuckerFit

    Raises
    ------
    DecompositionError
        A wrong number of ranks, a rank above its mode's size, a share outside (0, 1), an unknown
        mode, or a tensor that cannot be worked with.

    References
    ----------
    L. De Lathauwer, B. De Moor, J. Vandewalle, "A multilinear singular value decomposition" and
    "On the best rank-1 and rank-(R1, R2, ..., RN) approximation of higher-order tensors", SIAM J.
    Matrix Anal. Appl. 21 (2000).
    """
    n_sweeps = whole_number("n_sweeps", n_sweeps, 0)
    labelled = read(tensor, dims=dims, modes=(2, 6), memory=memory)
    wanted, notes = _wanted(ranks, labelled)
    if labelled.is_zero:
        return _zero(labelled, wanted)
    return _Tucker(labelled, wanted, notes).run(n_sweeps, progress)


class _Tucker:
    """One call of `tucker` on a non-zero tensor of unit norm."""

    def __init__(self, labelled: Labelled, wanted: list[_Wanted], notes: list[str]) -> None:
        self.labelled = labelled
        self.data = labelled.tensor
        self.modes = [k for k, w in enumerate(wanted) if w is not None]
        self.wanted = wanted
        self.notes = notes
        self.spectra: dict[str, np.ndarray] = {}

    def run(self, n_sweeps: int, progress: Progress | None) -> TuckerFit:
        """Decompose."""
        data, modes = self.data, self.modes
        tell(progress, "compress", 0, 1)
        bases, core = self._start()
        tell(progress, "compress", 1, 1)
        error, made = _error(core), 0
        # With nothing cut off, or a single mode, the start is the optimum.
        settled = len(modes) < 2 or all(bases[k].shape[1] == data.shape[k] for k in modes)
        while made < n_sweeps and not settled:
            for mode in modes:
                small = _project(data, {k: b for k, b in bases.items() if k != mode})
                count = bases[mode].shape[1]
                bases[mode] = complete(leading(small, mode, count)[0], count)
                core = times(small, bases[mode].T.to(small.dtype), mode)
            made += 1
            before, error = error, _error(core)
            settled = before - error < _SETTLED
            tell(progress, "sweep", made, n_sweeps)
        core = self._normal_form(bases, core.double())
        if error < 1e-3:  # the expansion of the square has no digits left
            error = _residual(data, core, bases)
        if not settled:
            self.notes.append(
                f"Not converged: within {made} sweeps the error was not seen to fall by less than "
                f"{_SETTLED:.0e} in one. To let it settle, raise n_sweeps ({n_sweeps})."
            )
        return TuckerFit(
            core=self.labelled.rescale(core.cpu().numpy()),
            factors=tuple(
                np.ascontiguousarray(bases[k].cpu().numpy()) if k in bases else None
                for k in range(data.ndim)
            ),
            dims=self.labelled.dims,
            ranks=tuple(core.shape),
            spectra=self.spectra,
            error=error,
            converged=settled,
            n_sweeps=made,
            notes=tuple(self.notes),
            coords=self.labelled.coords,
        )

    def _start(self) -> tuple[dict[int, Tensor], Tensor]:
        """ST-HOSVD; modes whose rank follows from energy are read off the whole tensor."""
        data = self.data
        bases: dict[int, Tensor] = {}
        for mode in self.modes:
            want = self.wanted[mode]
            if isinstance(want, float):
                vectors, energy = leading(data, mode)
                share = (energy / energy.sum()).cpu().numpy()
                self.spectra[self.labelled.dims[mode]] = share
                count = _count(share, want)
                bases[mode] = complete(vectors, count)
        core = _project(data, bases)
        for mode in sorted(self.modes, key=lambda k: (data.shape[k], k)):
            want = self.wanted[mode]
            if isinstance(want, int):
                bases[mode] = complete(leading(core, mode, want)[0], want)
                core = times(core, bases[mode].T.to(core.dtype), mode)
        return bases, core

    def _normal_form(self, bases: dict[int, Tensor], core: Tensor) -> Tensor:
        """Rotate each mode to the principal axes of the core, and fix the signs."""
        for mode in self.modes:
            rotation = complete(leading(core, mode)[0], core.shape[mode])
            rotated = bases[mode] @ rotation
            bases[mode] = fix_signs(rotated)
            signs = (bases[mode] * rotated).sum(0).sign()
            core = times(core, (rotation * signs).T, mode)
        return core


def _project(tensor: Tensor, bases: Mapping[int, Tensor]) -> Tensor:
    """Multiply modes by their transposed bases, the one that shrinks the tensor most first."""
    for mode in sorted(bases, key=lambda k: (bases[k].shape[1] / bases[k].shape[0], k)):
        tensor = times(tensor, bases[mode].T.to(tensor.dtype), mode)
    return tensor


def _error(core: Tensor) -> float:
    return math.sqrt(max(0.0, 1.0 - float(torch.linalg.vector_norm(core)) ** 2))


def _residual(data: Tensor, core: Tensor, bases: Mapping[int, Tensor]) -> float:
    """Norm of the tensor minus the model, by subtraction, slice by slice of the first mode."""
    total = 0.0
    tail = {k: b for k, b in bases.items() if k}
    for i in range(data.shape[0]):
        row = bases[0][i : i + 1] if 0 in bases else None
        model = core[i : i + 1] if row is None else times(core, row, 0)
        for mode, basis in tail.items():
            model = times(model, basis, mode)
        total += float(torch.linalg.vector_norm(data[i] - model[0])) ** 2
    return math.sqrt(total)


def _count(share: np.ndarray, wanted: float) -> int:
    """Directions that hold at least the wanted share (to rounding)."""
    return int(np.searchsorted(np.cumsum(share), wanted * (1 - 1e-12)) + 1)


def _wanted(ranks: Any, labelled: Labelled) -> tuple[list[_Wanted], list[str]]:
    """Bring every accepted form of `ranks` to one value per mode; None leaves a mode whole."""
    dims, shape = labelled.dims, tuple(labelled.tensor.shape)
    count = len(shape)
    notes: list[str] = []

    def one(value: Any, mode: int) -> int | float:
        return _one(value, shape, mode, dims[mode])

    if isinstance(ranks, Mapping):
        by_name = {dims[d] if is_whole(d) and -count <= d < count else d: ranks[d] for d in ranks}
        unknown = [str(d) for d in by_name if d not in dims]
        if unknown:
            raise DecompositionError(
                f"ranks name {unknown}, which the tensor does not have: its modes are {list(dims)}."
            )
        if not ranks:
            raise DecompositionError("ranks={}: at least one mode is to be named.")
        if len(by_name) < len(ranks):
            raise DecompositionError(f"ranks={dict(ranks)} name a mode twice: {list(dims)}.")
        named = [one(by_name[d], k) if d in by_name else None for k, d in enumerate(dims)]
        return named, notes
    if ranks is None or isinstance(ranks, str | float | np.floating):
        return [one(ranks, k) for k in range(count)], notes
    if is_whole(ranks):
        capped = [f"{d!r} ({n})" for d, n in zip(dims, shape, strict=True) if n < ranks]
        if capped and ranks > 0:
            notes.append(f"Rank {ranks} was capped at the size of {', '.join(capped)}.")
        return [one(min(int(ranks), n), k) for k, n in enumerate(shape)], notes
    try:
        values = list(ranks)
    except TypeError:
        raise DecompositionError(f"ranks={ranks!r} is not understood.", hint=_HINT) from None
    if len(values) != count:
        raise DecompositionError(
            f"{count} ranks needed, {len(values)} given: ranks={values} for modes {list(dims)}."
        )
    return [one(v, k) for k, v in enumerate(values)], notes


def _one(value: Any, shape: tuple[int, ...], mode: int, name: str) -> int | float:
    """One mode's rank: a size, or a share of the energy."""
    size = shape[mode]
    if value is None or (isinstance(value, str) and value == "all"):
        return min(size, math.prod(shape) // size)
    if isinstance(value, float | np.floating) and 0 < value < 1:
        return float(value)
    if is_whole(value) and value >= 1:
        if value > size:
            raise DecompositionError(
                f"Rank {value} is above the size {size} of mode {name!r}; the shape is {shape}.",
                hint=f"Give at most {size}.",
            )
        return int(value)
    raise DecompositionError(f"Rank {value!r} of mode {name!r} is not understood.", hint=_HINT)


def _zero(labelled: Labelled, wanted: list[_Wanted]) -> TuckerFit:
    """Give a zero tensor a zero core and seeded orthonormal factors."""
    shape = tuple(labelled.tensor.shape)
    sizes = [
        n if w is None else 1 if isinstance(w, float) else w
        for n, w in zip(shape, wanted, strict=True)
    ]
    none = torch.zeros(0, dtype=torch.float64)
    return TuckerFit(
        core=np.zeros(sizes),
        factors=tuple(
            None if w is None else complete(none.new_zeros(n, 0), c).numpy()
            for n, w, c in zip(shape, wanted, sizes, strict=True)
        ),
        dims=labelled.dims,
        ranks=tuple(sizes),
        spectra={},
        error=0.0,
        converged=True,
        n_sweeps=0,
        notes=("The tensor is zero: its core is zero and its factors are seeded and arbitrary.",),
        coords=labelled.coords,
    )
