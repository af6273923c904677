"""Orthogonal compression: a small core and one orthonormal basis per mode."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1 << 22


@dataclass
class Compressed:
    """A tensor as a core in orthonormal bases: ``tensor ~ core x_1 bases[0] ... x_N bases[-1]``.

    Attributes
    ----------
    core : Tensor
        float64 ``[c_1, ..., c_N]``.
    bases : list of Tensor
        float64 ``[n_k, c_k]`` with orthonormal columns, strongest direction first.
    lost : float
        Share of the tensor's squared norm that the bases leave out.
    norm : float
        What the core is to be multiplied by; the tensor without its lost part has norm
        ``norm * |core|``.
    dims : tuple of str
        Names of the modes.
    coords : mapping
        Coordinates of the modes, as xarray takes them.
    """

    core: Tensor
    bases: list[Tensor]
    lost: float = 0.0
    norm: float = 1.0
    dims: tuple[str, ...] = ()
    coords: Mapping[Hashable, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the modes that the core stands for."""
        return tuple(b.shape[0] for b in self.bases)


def unfold(tensor: Tensor, mode: int) -> Tensor:
    """Mode-`mode` unfolding ``[n_mode, product of the others]``."""
    return tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1)


def times(tensor: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """Multiply a mode of a tensor by ``matrix`` ``[m, n_mode]``, without copying the tensor."""
    left = 1
    for n in tensor.shape[:mode]:
        left *= n
    block = tensor.reshape(left, tensor.shape[mode], -1)
    shape = (*tensor.shape[:mode], matrix.shape[0], *tensor.shape[mode + 1 :])
    if block.shape[2] == 1:
        return (block[:, :, 0] @ matrix.T).reshape(shape)
    return torch.matmul(matrix, block).reshape(shape)


def cross(left: Tensor, right: Tensor, mode: int) -> Tensor:
    """Return ``left_(mode) right_(mode)^T`` in float64, summed block by block without copies.

    The tensors have the same shape but for `mode`.
    """
    outer = math.prod(left.shape[:mode])
    a = left.reshape(outer, left.shape[mode], -1)
    b = right.reshape(outer, right.shape[mode], -1)
    if a.shape[2] == 1:
        return (a[:, :, 0].T @ b[:, :, 0]).double()
    if outer == 1:
        return (a[0] @ b[0].T).double()
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=left.device)
    for x, y in zip(a, b, strict=True):
        total += x @ y.T
    return total


def gram(tensor: Tensor, mode: int) -> Tensor:
    """Return ``X_(mode) X_(mode)^T`` in float64, block by block, whatever the dtype."""
    if tensor.dtype == torch.float64:
        return cross(tensor, tensor, mode)
    outer = math.prod(tensor.shape[:mode])
    block = tensor.reshape(outer, tensor.shape[mode], -1)
    total = torch.zeros(block.shape[1], block.shape[1], dtype=torch.float64, device=tensor.device)
    if block.shape[2] == 1:
        block = block.reshape(-1, block.shape[1]).T[None]
    width = max(1, _BLOCK // block.shape[1])
    for part in block:
        for piece in part.split(width, dim=1):
            wide = piece.double()
            total.addmm_(wide, wide.T)
    return total


def fix_signs(columns: Tensor) -> Tensor:
    """Make the largest-magnitude entry of each column positive (the first of near-equals)."""
    size = columns.abs()
    near = size >= (1 - 1e-6) * size.amax(0, keepdim=True)
    first = near.to(torch.int8).argmax(0, keepdim=True)
    sign = torch.where(columns.gather(0, first) < 0, -1.0, 1.0).to(columns.dtype)
    return columns * sign


def leading(tensor: Tensor, mode: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Leading left singular vectors and all squared singular values of an unfolding.

    Works from the Gram matrix of whichever side is smaller. Squared singular values under
    ``eps * size`` of the largest are rounding.

    Returns
    -------
    basis : Tensor
        float64 ``[n_mode, r]``; r is `rank` or the numerical rank, whichever is smaller.
    energy : Tensor
        float64, squared singular values, descending.
    """
    n = tensor.shape[mode]
    rest = tensor.numel() // n
    if n <= rest or n <= 64:
        values, vectors = torch.linalg.eigh(gram(tensor, mode))
        values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
        side = None
    else:
        side = unfold(tensor, mode).double()
        values, vectors = torch.linalg.eigh(side.T @ side)
        values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    floor = torch.finfo(torch.float64).eps * 4 * max(len(values), 8)
    numerical = max(1, int((values > floor * values[0]).sum()))
    keep = numerical if rank is None else min(rank, numerical)
    basis = vectors[:, :keep]
    if side is not None:
        # Orthonormal to rounding even where the small singular values lost their digits.
        basis, upper = torch.linalg.qr(side @ basis)
        basis = basis * torch.where(upper.diagonal() < 0, -1.0, 1.0).to(basis.dtype)
    return fix_signs(basis), values


def complete(basis: Tensor, count: int, seed: int = 0) -> Tensor:
    """Append seeded orthonormal columns until there are `count` of them."""
    have = basis.shape[1]
    if have >= count:
        return basis[:, :count]
    generator = torch.Generator().manual_seed(seed)
    extra = torch.randn(basis.shape[0], count - have, generator=generator, dtype=torch.float64)
    extra = extra.to(basis)
    for _ in range(2):  # twice is enough
        extra = extra - basis @ (basis.T @ extra)
    return torch.cat([basis, fix_signs(torch.linalg.qr(extra)[0])], dim=1)


def compress(tensor: Tensor, ranks: Sequence[int]) -> Compressed:
    """Sequentially truncated HOSVD, smallest mode first.

    Parameters
    ----------
    tensor : Tensor
        ``[n_1, ..., n_N]``.
    ranks : sequence of int
        Largest size of the core in each mode.

    References
    ----------
    N. Vannieuwenhoven, R. Vandebril, K. Meerbergen, "A new truncation strategy for the higher-order
    singular value decomposition", SIAM J. Sci. Comput. 34 (2012).
    """
    core = tensor
    bases: list[Tensor | None] = [None] * tensor.ndim
    lost = 0.0
    total: float | None = None
    for mode in sorted(range(tensor.ndim), key=lambda k: (tensor.shape[k], k)):
        basis, energy = leading(core, mode, ranks[mode])
        total = float(energy.sum()) if total is None else total
        lost += float(energy[basis.shape[1] :].sum())
        core = times(core, basis.T.to(core.dtype), mode)
        bases[mode] = basis
    share = lost / total if total else 0.0
    return Compressed(core.double().contiguous(), [b for b in bases if b is not None], share)
