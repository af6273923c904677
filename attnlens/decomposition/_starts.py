"""Where the restarts of CP begin."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def normal_start(rng: np.random.Generator, shape: tuple[int, ...], rank: int) -> list[Tensor]:
    """Factors ``[component, n_k]`` of independent normal entries, unit norm.

    Uniform entries would make nearly collinear columns, from which descent misses the optimum.
    """
    rows = [torch.from_numpy(rng.standard_normal((rank, n))) for n in shape]
    return [r / r.norm(dim=1, keepdim=True) for r in rows]


def eigen_start(rng: np.random.Generator, core: Tensor, rank: int) -> list[Tensor] | None:
    """Factors from the generalised eigenvectors of two random mixtures of the core's slices.

    Exact on a noiseless tensor of that rank. The two largest modes carry the eigenproblem; the
    remaining factors follow by least squares. None where fewer than two modes reach `rank`, or
    where the pencil is singular.

    References
    ----------
    E. Sanchez, B. R. Kowalski, "Tensorial resolution: a direct trilinear decomposition",
    J. Chemometrics 4 (1990); S. E. Leurgans, R. T. Ross, R. B. Abel, "A decomposition for
    three-way arrays", SIAM J. Matrix Anal. Appl. 14 (1993).
    """
    order = core.ndim
    modes = sorted(range(order), key=lambda k: (-core.shape[k], k))[:2]
    if min(core.shape[k] for k in modes) < rank:
        return None
    others = [k for k in range(order) if k not in modes]
    flat = core.permute(*modes, *others).reshape(core.shape[modes[0]], core.shape[modes[1]], -1)
    depth = flat.shape[2]
    mix = torch.from_numpy(rng.standard_normal((depth, 2)))
    # The bases are ordered by energy: the leading block is the best rank x rank section.
    first, second = (flat[:rank, :rank] @ mix).unbind(-1)
    try:
        values, vectors = torch.linalg.eig(torch.linalg.solve(second.T, first.T).T)
        left = _real(values, vectors)
        right = torch.linalg.solve(left, second).T
    except RuntimeError:
        return None
    if not (bool(torch.isfinite(left).all()) and bool(torch.isfinite(right).all())):
        return None
    out: list[Tensor] = [torch.empty(0)] * order
    for mode, section in zip(modes, (left, right), strict=True):
        rows = core.new_zeros(rank, core.shape[mode])
        rows[:, :rank] = (section / section.norm(dim=0).clamp_min(1e-300)).T
        out[mode] = rows
    a, b = out[modes[0]], out[modes[1]]
    mixed = torch.einsum("ri,rj,ijd->rd", a, b, flat)
    normal = (a @ a.T) * (b @ b.T)
    eye = torch.eye(rank, dtype=core.dtype)
    depths = torch.linalg.solve(normal + 1e-12 * eye, mixed)
    if len(others) == 1:
        out[others[0]] = depths
        return out
    # Four modes: each row of depths is a matrix that should have rank one.
    grids = depths.reshape(rank, core.shape[others[0]], core.shape[others[1]])
    u, s, vh = torch.linalg.svd(grids, full_matrices=False)
    out[others[0]] = u[:, :, 0] * s[:, :1]
    out[others[1]] = vh[:, 0, :]
    return out


def _real(values: Tensor, vectors: Tensor) -> Tensor:
    """Real basis of the eigenvectors: a complex pair gives its real and imaginary parts."""
    columns = torch.where(values.imag < 0, vectors.imag, vectors.real)
    norms: Tensor = columns.norm(dim=0)
    return columns / norms.clamp_min(1e-300)
