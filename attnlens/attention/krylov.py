"""Leading singular triplets and spectral sums of a matrix known only by its products.

Everything here works on one matrix at a time: an n x n operator that multiplies columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy.linalg
import scipy.stats
import torch
from torch import Tensor

#: Columns beyond the rank asked for: they make a miss of a leading direction improbable.
OVERSAMPLING = 16

#: Rows of a tall matrix that are decomposed at a time.
_ROWS = 2048

#: Share of the way from half the steps to all of them by which a quadrature is extrapolated.
_REMAINING = 0.6


class Operator(Protocol):
    """A square matrix that multiplies columns."""

    n: int
    dtype: torch.dtype
    device: torch.device

    def matmul(self, x: Tensor) -> Tensor:
        """Return A X, x [n, column]."""

    def rmatmul(self, y: Tensor) -> Tensor:
        """Return A^T Y, y [n, column]."""


@dataclass(frozen=True)
class Triplets:
    """Leading singular triplets: u [n, k], s [k] float64, v [n, k], error [k] float64."""

    u: Tensor
    s: Tensor
    v: Tensor
    error: Tensor


def leading(a: Operator, rank: int, n_iter: int, generator: torch.Generator) -> Triplets:
    """Return the leading triplets by a randomised block Krylov method.

    The left space holds A W, (A A^T) A W, ... up to power `n_iter` of a Gaussian block W; the
    matrix is projected on it and decomposed there, which gives Ritz values that never exceed the
    exact ones. Without its last block the same space gives the values of one iteration less:
    the distance between the two is what the error bar is made of.

    References
    ----------
    Musco, C. and Musco, C. Randomized block Krylov methods for stronger and faster approximate
    singular value decomposition. NeurIPS (2015).
    """
    width = min(a.n, rank + OVERSAMPLING)
    columns = min(a.n, width * (n_iter + 1))
    y = a.matmul(_normal(a, width, generator))
    # These two are the largest things in memory; everything else is a block or a part of rows.
    basis, projected = (torch.empty(a.n, columns, dtype=a.dtype, device=a.device) for _ in range(2))
    for at in range(0, columns, width):
        y = _orthonormal(y[:, : columns - at], basis[:, :at])
        basis[:, at : at + width] = y
        y = a.rmatmul(y)
        projected[:, at : at + width] = y
        if at + width < columns:
            y = a.matmul(_orthonormal(y))
    del y
    small = _triangle(projected)
    _, s, right = decompose(small)
    u = basis @ right.mT[:, :rank]
    # A^T u is s v: orthonormal once scaled, and where s is 0 any completion will do.
    v, scales = torch.linalg.qr(projected @ right.mT[:, :rank])
    v = torch.where(scales.diagonal() < 0, -v, v)
    before = max(rank, basis.shape[1] - width)
    earlier = singular_values(small[:, :before])
    s, earlier = s[:rank].double(), earlier[:rank].double()
    return Triplets(u, s, v, _error(s, earlier, n_iter, a))


def _normal(a: Operator, width: int, generator: torch.Generator) -> Tensor:
    """Draw normal numbers, [n, width], in float64 whatever the operator's dtype, part by part."""
    out = torch.empty(a.n, width, dtype=a.dtype, device=a.device)
    for part in out.split(_ROWS):  # type: ignore[no-untyped-call]
        part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    return out


def _error(s: Tensor, earlier: Tensor, n_iter: int, a: Operator) -> Tensor:
    """Error bar of Ritz values from those of one iteration less."""
    rounding = 64 * torch.finfo(a.dtype).eps * s.amax()
    if n_iter == 0:
        # Nothing to compare with: the values of a single pass are known to a factor only.
        return s + rounding
    return 2.0 * (s - earlier).abs() + rounding


def _orthonormal(x: Tensor, others: Tensor | None = None) -> Tensor:
    """Return an orthonormal basis of columns, orthogonal to others that are orthonormal.

    Where nothing but rounding is left of a column, that is scaled up and made orthogonal again.
    """
    q: Tensor = torch.linalg.qr(x)[0]
    if others is not None and others.shape[1]:
        for _ in range(3):
            q = torch.linalg.qr(q - others @ (others.mT @ q))[0]
    return q


def _triangle(x: Tensor) -> Tensor:
    """Return the triangular factor of a tall matrix, from those of its parts.

    References
    ----------
    Demmel, J., Grigori, L., Hoemmen, M. and Langou, J. Communication-optimal parallel and
    sequential QR and LU factorizations. SIAM J. Sci. Comput. 34 (2012).
    """
    step = max(_ROWS, x.shape[1])
    rows = (x[at : at + step] for at in range(0, x.shape[0], step))
    parts = [torch.linalg.qr(part, mode="r")[1] for part in rows]
    triangle: Tensor = torch.linalg.qr(torch.cat(parts), mode="r")[1]
    return triangle


def decompose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S, V^T of [..., row, column] matrices; by another algorithm if one fails."""
    try:
        u, s, vt = torch.linalg.svd(x, full_matrices=False)
    except RuntimeError:
        u, s, vt = _fallback(x, vectors=True)
    return u, s, vt


def singular_values(x: Tensor) -> Tensor:
    """Return all singular values of [..., row, column] matrices, in falling order."""
    try:
        s: Tensor = torch.linalg.svdvals(x)
        return s
    except RuntimeError:
        return _fallback(x, vectors=False)[1]


def _fallback(x: Tensor, vectors: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose by LAPACK's gesvd in float64: slower, and it converges where gesdd fails."""
    flat = x.detach().to("cpu", torch.float64).reshape(-1, *x.shape[-2:]).numpy()
    found = [
        scipy.linalg.svd(m, full_matrices=False, compute_uv=True, lapack_driver="gesvd")
        for m in flat
    ]
    u, s, vt = (
        torch.from_numpy(np.stack(part)).reshape(*x.shape[:-2], *part[0].shape).to(x)
        for part in zip(*found, strict=True)
    )
    return (u, s, vt) if vectors else (u[..., :0], s, vt[..., :0])


@dataclass(frozen=True)
class Quadrature:
    """Spectral measure of a matrix: exact where it was deflated, sampled elsewhere.

    Attributes
    ----------
    top, top_error : Tensor, [k]
        Leading singular values and their error bars.
    nodes, weights : Tensor, [probe, step]
        Gauss quadrature of each probe's measure over the remaining singular values; the weights
        of a probe sum to 1.
    short_nodes, short_weights : Tensor, [probe, half the steps]
        The same after half the steps, to see how far the quadrature has converged.
    rest : int
        Number of the remaining singular values.
    frobenius2 : float
        Sum of all squared singular values, known exactly.
    """

    top: Tensor
    top_error: Tensor
    nodes: Tensor
    weights: Tensor
    short_nodes: Tensor
    short_weights: Tensor
    rest: int
    frobenius2: float

    def sum(self, f: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """Return the sum of f over all singular values and its error bar.

        Each probe gives an unbiased estimate; their regression on the probes' own sums of
        squares, whose exact mean is known, takes most of the variance out.
        """
        value = f(self.top).sum()
        doubt = (f(self.top + self.top_error) - f(self.top)).abs().sum()
        found = self.join(value, doubt, f(self.nodes), f(self.short_nodes))
        return float(found[0]), float(found[1])

    def join(
        self, value: Tensor, doubt: Tensor, nodes: Tensor, short_nodes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return sums and error bars of several functions at once.

        Parameters
        ----------
        value, doubt : Tensor, [...]
            What the deflated singular values give, and how sure that is.
        nodes, short_nodes : Tensor, [..., probe, step]
            The functions at the nodes.
        """
        if self.rest == 0:
            return value, doubt
        y = self.rest * (self.weights * nodes).sum(-1)
        short = self.rest * (self.short_weights * short_nodes).sum(-1)
        # Small singular values are many and sqrt is steep at 0: the quadrature approaches its
        # limit like 1/steps or faster, from one side. Half the steps tell how far it has to go:
        # at most about 1.2 times the way between the two. Go half of that; the rest is doubt.
        way = _REMAINING * (y - short)
        y = y + way
        x = self.rest * (self.weights * self.nodes**2).sum(-1)
        known = max(0.0, self.frobenius2 - float((self.top**2).sum()))
        centred, distance = x - x.mean(), x.mean() - known
        spread = (centred**2).sum().clamp_min(torch.finfo(x.dtype).tiny)
        mean = y.mean(-1)
        slope = (centred * (y - mean[..., None])).sum(-1) / spread
        residual = y - mean[..., None] - slope[..., None] * centred
        # Two parameters were fitted; the regression widens the interval by its own distance.
        freedom = max(1, len(x) - 2)
        variance = (residual**2).sum(-1) / freedom * (1 / len(x) + distance**2 / spread)
        sampling = _student(freedom) * variance.sqrt()
        return value + mean - slope * distance, sampling + way.mean(-1).abs() + doubt


def _student(freedom: int) -> float:
    """Return the 99 % two-sided point of Student's t: more than asked for, against skewness."""
    return float(scipy.stats.t.ppf(0.995, freedom))


def quadrature(
    a: Operator,
    frobenius2: float,
    *,
    n_probes: int,
    n_steps: int,
    n_deflate: int,
    generator: torch.Generator,
) -> Quadrature:
    """Sample the spectral measure by stochastic Lanczos quadrature.

    The leading singular space is taken out first and counted exactly, then Golub-Kahan
    bidiagonalisation of what is left runs from `n_probes` random directions at once.

    References
    ----------
    Ubaru, S., Chen, J. and Saad, Y. Fast estimation of tr(f(A)) via stochastic Lanczos
    quadrature. SIAM J. Matrix Anal. Appl. 38 (2017).
    """
    top = leading(a, n_deflate, 3, generator)
    rest = a.n - n_deflate
    n_steps = min(n_steps, rest)

    def project(x: Tensor) -> Tensor:
        return x - top.v @ (top.v.mT @ x)

    v = torch.randn(a.n, n_probes, generator=generator, dtype=torch.float64)
    v = project(project(v.to(a.device, a.dtype)))
    v = v / torch.linalg.vector_norm(v, dim=0)
    u = torch.zeros_like(v)
    beta = torch.zeros(n_probes, dtype=a.dtype, device=a.device)
    tiny = 16 * torch.finfo(a.dtype).eps * float(top.s[0])
    diagonal, above = [], []
    for _ in range(n_steps):
        u = a.matmul(v) - beta * u
        alpha = torch.linalg.vector_norm(u, dim=0)
        # A direction that has come to its end stays at zero: its measure is exact by then.
        u = torch.where(alpha > tiny, u / alpha, 0.0)
        diagonal.append(torch.where(alpha > tiny, alpha, 0.0))
        v = project(a.rmatmul(u) - diagonal[-1] * v)
        beta = torch.linalg.vector_norm(v, dim=0)
        v = torch.where(beta > tiny, v / beta, 0.0)
        beta = torch.where(beta > tiny, beta, 0.0)
        above.append(beta)
    d = torch.stack(diagonal, -1).cpu().double()
    e = torch.stack(above, -1).cpu().double()
    short = max(1, n_steps // 2)
    return Quadrature(
        top.s.cpu(),
        top.error.cpu(),
        *_gauss(d, e),
        *_gauss(d[:, :short], e[:, :short]),
        rest,
        frobenius2,
    )


def _gauss(diagonal: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and weights [probe, step] of upper bidiagonal matrices."""
    b = torch.diag_embed(diagonal)
    steps = diagonal.shape[-1]
    if steps > 1:
        b = b + torch.diag_embed(above[:, : steps - 1], offset=1)
    _, nodes, vt = decompose(b)
    return nodes, vt[..., 0] ** 2


def top_share(q: Quadrature, ks: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """Return the share of the first k singular values in the sum of their powers, and its error.

    The sum of the k largest f is the smallest value over t of ``k t + sum max(f - t, 0)``, and at
    its minimum an error of the spectral sum is the error of the result.
    """
    total, total_error = q.sum(lambda s: s**power)
    largest = max(float(q.top.max()) if q.top.numel() else 0.0, float(q.nodes.max()), 1e-300)
    levels, _ = torch.cat(
        (q.top, torch.tensor([0.0]), largest * torch.logspace(-6, 0, 481, dtype=torch.float64))
    ).sort()
    t = (levels**power)[:, None]
    top, more = q.top**power, (q.top + q.top_error) ** power
    value, more = ((x - t).clamp_min(0.0).sum(-1) for x in (top, more))
    over = [(x**power - t[..., None]).clamp_min(0.0) for x in (q.nodes, q.short_nodes)]
    sums, errors = q.join(value, more - value, *over)
    bounds = ks.double()[:, None] * levels**power + sums
    best = bounds.argmin(-1)
    share = bounds.gather(-1, best[:, None])[:, 0] / total
    # The sum is convex in t: its minimum is below the best level by less than its neighbours are
    # above.
    near = torch.stack((best - 1, best + 1), -1).clamp(0, len(levels) - 1)
    step = (bounds.gather(-1, near) - bounds.gather(-1, best[:, None])).amax(-1)
    kink = _kink(q, power, (levels**power)[best])
    error = errors[best] + step + kink
    # What was deflated is counted, not sampled.
    known = torch.cat((torch.zeros(1, dtype=torch.float64), (q.top**power).cumsum(0)))
    above = torch.cat((known[:1], ((q.top + q.top_error) ** power).cumsum(0)))
    few = ks < len(known)
    at = ks.clamp_max(len(known) - 1)
    share = torch.where(few, known[at] / total, share)
    error = torch.where(few, above[at] - known[at], error) / total
    # The next ones are at most the last that was deflated, and at least the mean of what is left.
    more = ks - at
    low = (known[-1] + more * (total - known[-1]).clamp_min(0.0) / max(q.rest, 1)) / total
    high = (above[-1] + more * (above[-1] - above[-2])) / total
    bounded = torch.where(few, share, share.clamp(low, high.clamp_max(1.0)))
    most = torch.maximum((bounded - low).abs(), (high.clamp_max(1.0) - bounded).abs())
    error = torch.where(few, error, error.minimum(most)) + bounded * total_error / total
    return bounded.clamp(0.0, 1.0), error


def _kink(q: Quadrature, power: float, levels: Tensor) -> Tensor:
    """Return what a quadrature may miss of ``sum max(s^power - t, 0)`` at each level t.

    Between the two nodes around t it does not know on which side the weight lies. A triangle over
    that gap, under the larger of their weights, is a fourth of the rectangle.
    """
    rising, weights = (q.nodes**power).flip(-1).contiguous(), q.weights.flip(-1)
    zero = torch.zeros_like(rising[:, :1])
    edges, inside = torch.cat((zero, rising), -1), torch.cat((zero, weights), -1)
    t = levels.expand(len(edges), -1).contiguous()
    above = torch.searchsorted(rising, t, right=True) + 1
    last = edges.shape[-1] - 1
    high, low = edges.gather(-1, above.clamp_max(last)), edges.gather(-1, above - 1)
    weight = inside.gather(-1, above.clamp_max(last)).maximum(inside.gather(-1, above - 1))
    return q.rest * (0.25 * (high - low) * weight).mean(0)


def effective_rank(q: Quadrature) -> tuple[float, float]:
    """Return exp of the entropy of the normalised singular values, and its error.

    With S = sum s and L = sum s ln s it is ``S exp(-L / S)``; the error is that of the spectral
    sum of its linearisation.
    """

    def s_ln_s(s: Tensor) -> Tensor:
        product: Tensor = torch.special.xlogy(s, s)
        return product

    total, _ = q.sum(lambda s: s)
    if total <= 0:
        return 0.0, 0.0
    log_sum, _ = q.sum(s_ln_s)
    value = total * math.exp(-log_sum / total)
    by_total, by_log = value * (1 + log_sum / total) / total, -value / total
    _, error = q.sum(lambda s: by_total * s + by_log * s_ln_s(s))
    return value, error
