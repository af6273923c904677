"""Compression of a tensor that is only ever seen in slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlens.errors import DecompositionError

from ._input import Progress, _to_torch, is_whole, names_of, tell, whole_number
from ._solve import core_sizes
from .compress import Compressed, complete, compress, cross, times

OVERSAMPLE = 10
"""Directions kept in each mode beyond those of the core."""

_HELD = 1 << 24
"""Entries that may be held between the passes and the exact compression."""


def slices_memory(
    shape: Sequence[int], *, rank: int, mode: int, block: int = 1, itemsize: int = 4
) -> int:
    """Peak bytes that `compress_slices` and `cp` of its result need.

    Parameters
    ----------
    shape : sequence of int
        Sizes of the whole tensor.
    rank : int
        Largest rank that will be fitted.
    mode : int
        The sliced mode.
    block : int
        Entries of the sliced mode per slice.
    itemsize : int
        Bytes per number of a slice (float16 is worked on in float32).
    """
    mode %= len(shape)
    sizes = _sketch_sizes(shape, rank, mode)
    one = block * math.prod(n for k, n in enumerate(shape) if k != mode)
    width = max(itemsize, 4)
    # The slice as given and scaled, while the next one is being made; its product with a sketch.
    passing = one * (2 * itemsize + 2 * width)
    passing += max(one // n * c * width for n, c in zip(shape, sizes, strict=True))
    bases = sum(4 * n * c * 8 for n, c in zip(shape, sizes, strict=True) if c < n)
    held = 3 * math.prod(sizes) * 8
    return passing + bases + held


def compress_slices(
    slices: Sequence[Any] | Callable[[], Iterable[Any]],
    *,
    mode: int | str,
    rank: int,
    dims: Sequence[str] | None = None,
    coords: Mapping[Hashable, Any] | None = None,
    length: int | None = None,
    power: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
) -> Compressed:
    """Compress a tensor given as slices along one mode, without ever holding it.

    The large modes get a basis by block power iteration from seeded random directions (the
    randomised range finder, with all its steps as power steps, as a pass over the slices costs more
    than the products). A last pass projects each slice; what is left fits in memory and is
    compressed exactly. Memory: one slice, the bases, and ``n_mode`` times the product of the
    sketch sizes (`slices_memory`). This is cheaper than Gram matrices as soon as a mode has more
    than about four times the directions that are kept, and needs no matrix of ``n_k x n_k``. Modes
    are projected, largest first, until what is left to hold has at most 2**24 entries.

    Parameters
    ----------
    slices : sequence, or callable returning an iterable
        Blocks of the tensor (xarray, numpy or torch), consecutive along `mode` and whole along all
        others. They are gone through ``power + 1`` times and must come the same each time. An
        iterator that is used up by one pass is refused.
    mode : int or str
        The sliced mode; a name where `dims` or the first block has names.
    rank : int
        Largest rank that will be fitted: the core gets ``3 rank`` directions in each mode.
    dims : sequence of str, optional
        Names of the modes, where the blocks do not carry them.
    coords : mapping, optional
        Coordinates for the results' datasets.
    length : int, optional
        Size of the sliced mode in all; without it, one more pass counts.
    power : int
        Number of power steps, at least 1.
    seed : int
        Seed of the random directions.
    progress : callable, optional
        Called as ``progress("compress", passes done, passes in all)``.

    Returns
    -------
    Compressed
        To be given to `cp` in place of a tensor.

    Raises
    ------
    DecompositionError
        Blocks that do not fit together, are not finite, or can be read only once.

    References
    ----------
    N. Halko, P.-G. Martinsson, J. A. Tropp, "Finding structure with randomness", SIAM Rev. 53
    (2011), algorithm 4.4.
    """
    rank, power, seed = (
        whole_number("rank", rank, 1),
        whole_number("power", power, 1),
        whole_number("seed", seed, 0),
    )
    source = _Source(slices, mode, dims)
    generator = torch.Generator().manual_seed(seed)
    length = source.length() if length is None else whole_number("length", length, 1)
    shape = [length if k == source.mode else n for k, n in enumerate(source.shape)]
    bases: dict[int, Tensor] = {}
    for k, count in enumerate(_sketch_sizes(shape, rank, source.mode)):
        if count < shape[k]:
            start = torch.randn(shape[k], count, generator=generator, dtype=torch.float64)
            bases[k] = torch.linalg.qr(start)[0].to(source.device)
            shape[k] = count
    energy = 0.0
    for step in range(power):
        grown = {k: torch.zeros_like(b) for k, b in bases.items()}
        energy = 0.0
        for block in source.blocks(check=step == 0):
            energy += float(torch.linalg.vector_norm(block)) ** 2
            for k, basis in bases.items():
                grown[k] += cross(block, times(block, basis.T.to(block.dtype), k), k)
        for k, total in grown.items():
            # Fewer directions than were asked for: the others are filled, not divided by zero.
            left, strength, _ = torch.linalg.svd(total, full_matrices=False)
            live = int((strength > 1e-14 * strength[0]).sum())
            bases[k] = complete(left[:, :live], left.shape[1])
        tell(progress, "compress", step + 1, power + 1)
    whole = torch.empty(shape, dtype=torch.float64, device=source.device)
    filled = 0
    for block in source.blocks(check=False):
        for k in sorted(bases, key=lambda k: bases[k].shape[1] / bases[k].shape[0]):
            block = times(block, bases[k].T.to(block.dtype), k)
        size = block.shape[source.mode]
        if filled + size <= length:
            whole.narrow(source.mode, filled, size).copy_(block)
        filled += size
    if filled != length:
        raise DecompositionError(
            f"The slices hold {filled} entries of mode {source.dims[source.mode]!r}; {length} were "
            "announced, or came in an earlier pass."
        )
    tell(progress, "compress", power + 1, power + 1)
    if energy == 0.0:
        raise DecompositionError("Every slice is zero: there is nothing to decompose.")
    norm = math.sqrt(energy)
    inner = compress(whole / norm, core_sizes(whole.shape, rank))
    kept = float(torch.linalg.vector_norm(inner.core)) ** 2
    outer = [bases[k] @ b if k in bases else b for k, b in enumerate(inner.bases)]
    return Compressed(
        inner.core,
        outer,
        lost=max(0.0, 1.0 - kept),
        norm=norm * source.scale,
        dims=source.dims,
        coords=dict(coords or {}),
    )


def _sketch_sizes(shape: Sequence[int], rank: int, mode: int) -> list[int]:
    """Sizes of what is held after the passes; only modes that must shrink do."""
    sizes = list(shape)
    for k in sorted(range(len(shape)), key=lambda k: (-shape[k], k)):
        if k != mode and math.prod(sizes) > _HELD:
            sizes[k] = min(shape[k], core_sizes(shape, rank)[k] + OVERSAMPLE)
    return sizes


class _Source:
    """Slices that can be gone through again, checked and in working form."""

    def __init__(
        self,
        slices: Sequence[Any] | Callable[[], Iterable[Any]],
        mode: int | str,
        dims: Sequence[str] | None,
    ) -> None:
        if isinstance(slices, Iterator):
            raise DecompositionError(
                "The slices can be read only once; they are needed several times.",
                hint="Pass a function that returns a fresh iterator, or a sequence.",
            )
        self.slices = slices
        first = next(iter(self._pass()), None)
        if first is None:
            raise DecompositionError("There are no slices.")
        if not 3 <= len(first.shape) <= 4:
            raise DecompositionError(
                f"Slices with 3 or 4 modes are needed, the sliced one included; the first has "
                f"shape {tuple(first.shape)}."
            )
        self.dims = names_of(first, dims)
        if isinstance(mode, str):
            if mode not in self.dims:
                raise DecompositionError(f"mode={mode!r} is none of {list(self.dims)}.")
            mode = self.dims.index(mode)
        if not is_whole(mode) or not -len(self.dims) <= mode < len(self.dims):
            raise DecompositionError(f"mode={mode!r}: the slices have {len(self.dims)} modes.")
        self.mode = mode % len(self.dims)
        self.shape = tuple(int(n) for n in first.shape)
        data = self._convert(first)
        self.device = data.device
        largest = float(data.abs().max())
        self.scale = largest if math.isfinite(largest) and largest > 0 else 1.0

    def _pass(self) -> Iterable[Any]:
        return self.slices() if callable(self.slices) else self.slices

    def length(self) -> int:
        """Size of the sliced mode, by a pass over the slices."""
        return sum(int(raw.shape[self.mode]) for raw in self._pass())

    @staticmethod
    def _convert(block: Any) -> Tensor:
        half = str(getattr(block, "dtype", "")).split(".")[-1] in ("float16", "bfloat16")
        data = _to_torch(getattr(block, "values", block) if hasattr(block, "dims") else block)
        return data.float() if half else data

    def blocks(self, *, check: bool) -> Iterator[Tensor]:
        """Each block, divided by the scale."""
        for number, raw in enumerate(self._pass()):
            shape = list(raw.shape)
            if len(shape) == len(self.shape):
                shape[self.mode] = self.shape[self.mode]
            if tuple(shape) != self.shape:
                raise DecompositionError(
                    f"Slice {number} has shape {tuple(raw.shape)}, the first {self.shape}; they "
                    f"may differ along mode {self.dims[self.mode]!r} alone."
                )
            data = self._convert(raw)
            if check and not bool(torch.isfinite(data).all()):
                place = np.argwhere(~torch.isfinite(data).cpu().numpy())[0]
                where = ", ".join(f"{d}={i}" for d, i in zip(self.dims, place, strict=True))
                raise DecompositionError(f"Slice {number} is not finite at {where}.")
            yield data / self.scale
