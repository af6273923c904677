"""Orthogonal compression: a small core and one orthonormal basis per mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
    ranks : tuple of int
        Numerical rank of each mode, as far as it was looked at.
    """

    core: Tensor
    bases: list[Tensor]
    lost: float = 0.0
    ranks: tuple[int, ...] = field(default=())

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


def gram(tensor: Tensor, mode: int) -> Tensor:
    """Return ``X_(mode) X_(mode)^T`` in float64, summed block by block."""
    left = 1
    for n in tensor.shape[:mode]:
        left *= n
    block = tensor.reshape(left, tensor.shape[mode], -1)
    if block.shape[2] == 1:
        flat = block[:, :, 0].double()
        return flat.T @ flat
    if tensor.dtype == torch.float64 and left == 1:
        return block[0] @ block[0].T
    total = torch.zeros(block.shape[1], block.shape[1], dtype=torch.float64, device=tensor.device)
    for part in block:
        total.addmm_(part.double(), part.double().T)
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
    numerical = [0] * tensor.ndim
    lost = 0.0
    total: float | None = None
    for mode in sorted(range(tensor.ndim), key=lambda k: (tensor.shape[k], k)):
        basis, energy = leading(core, mode, ranks[mode])
        total = float(energy.sum()) if total is None else total
        floor = torch.finfo(torch.float64).eps * 4 * max(len(energy), 8)
        numerical[mode] = max(1, int((energy > floor * energy[0]).sum()))
        lost += float(energy[basis.shape[1] :].sum())
        core = times(core, basis.T.to(core.dtype), mode)
        bases[mode] = basis
    share = lost / total if total else 0.0
    return Compressed(
        core.double().contiguous(), [b for b in bases if b is not None], share, tuple(numerical)
    )
