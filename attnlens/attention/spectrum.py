"""Singular values of attention: exact where the matrix is small, from its products elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from attnlens.attention import krylov
from attnlens.attention.backing import Backing
from attnlens.attention.base import Base
from attnlens.attention.convert import generator, whole_number
from attnlens.attention.results import SVD, Estimate
from attnlens.errors import UsageError

#: Up to this number of positions the matrix is decomposed whole.
SMALL = 512
#: Bytes of one matrix that all its singular values may cost.
_DENSE_BYTES = 4 << 30


class _Head:
    """One head's matrix as `krylov` sees it."""

    def __init__(self, backing: Backing) -> None:
        self.backing = backing
        self.n, self.dtype, self.device = backing.shape[2], backing.dtype, backing.device

    def matmul(self, x: Tensor) -> Tensor:
        """Return A X."""
        return self.backing.matmul(x[None, None])[0, 0]

    def rmatmul(self, y: Tensor) -> Tensor:
        """Return A^T Y."""
        if self.backing.mask.lengths is not None:
            alive = self.backing.mask.visible(self.device)[0, :, None] > 0
            y = torch.where(alive, y, 0.0)
        return self.backing.rmatmul(y[None, None])[0, 0]


class Spectrum(Base):
    """Methods about singular values."""

    def svd(self, rank: int, *, n_iter: int = 2, seed: int = 0) -> SVD:
        """Return the leading singular triplets.

        Matrices of at most 512 positions are decomposed whole, in float64; larger ones by a
        randomised block Krylov method from products alone.

        Parameters
        ----------
        rank : int
            Number of triplets; more than the number of positions counts as that number.
        n_iter : int
            Powers of A A^T: each costs two products and narrows the error.
        seed : int
            Of the random start; the same seed gives the same result on one machine.

        Returns
        -------
        SVD

        Raises
        ------
        UsageError
            The rank is no whole number of at least 1, or `n_iter` none of at least 0.

        References
        ----------
        Musco, C. and Musco, C. Randomized block Krylov methods for stronger and faster
        approximate singular value decomposition. NeurIPS (2015).
        """
        rank = self._rank(rank)
        wide = self._backing.wide
        if self._whole(rank, n_iter):
            u, s, vt = krylov.decompose(self._dense())
            u, s, v = u[..., :rank], s[..., :rank], vt.mT[..., :rank]
            error = 64 * torch.finfo(wide).eps * s.amax(-1, keepdim=True).expand_as(s)
            u, v = _fix_signs(u, v)
            return SVD(
                self._out(u.to(self.dtype)),
                self._out(s),
                self._out(v.to(self.dtype)),
                self._out(error.clone()),
            )
        found = [
            krylov.leading(_Head(head), rank, n_iter, generator(seed)) for head in self._each()
        ]
        u, v = _fix_signs(torch.stack([t.u for t in found]), torch.stack([t.v for t in found]))
        s = torch.stack([t.s for t in found])
        error = torch.stack([t.error for t in found])
        return SVD(self._lead(u), self._lead(s), self._lead(v), self._lead(error))

    def singular_values(self, k: int | None = None, *, n_iter: int = 2, seed: int = 0) -> Tensor:
        """Return singular values in falling order.

        Parameters
        ----------
        k : int, optional
            How many; None for all, which holds one n x n matrix at a time.
        n_iter, seed : int
            As for `svd`, whose error bars apply.

        Returns
        -------
        Tensor, [..., head, component], float64

        Raises
        ------
        UsageError
            k is no whole number of at least 1, or all values were asked of a matrix too large to
            hold.
        """
        if k is not None and not self._whole(self._rank(k), n_iter):
            return self.svd(k, n_iter=n_iter, seed=seed).S
        keep = self.n_positions if k is None else self._rank(k)
        if self.n_positions <= SMALL:
            return self._out(krylov.singular_values(self._dense())[..., :keep])
        size = self.n_positions**2 * 8
        if size > _DENSE_BYTES:
            raise UsageError(
                f"All singular values of {self.n_positions} positions would need matrices of "
                f"{size / 2**30:.0f} GiB.",
                hint="Ask for the first k, or for sums over all of them with spectral_sum.",
            )
        wide = self._backing.wide
        values = [krylov.singular_values(h.dense().to(wide))[0, 0] for h in self._each()]
        return self._lead(torch.stack(values))[..., :keep]

    def stable_rank(self, *, seed: int = 0) -> Tensor:
        """Return the squared Frobenius norm over the largest squared singular value.

        Parameters
        ----------
        seed : int
            Of the random start, where the matrix is not decomposed whole.

        Returns
        -------
        Tensor, [..., head], float64
            NaN where the matrix is zero. Beyond 512 positions the largest singular value comes
            from a block Krylov space of seven powers.
        """
        square = self._once("frobenius2")
        if self._whole(1, 2):
            first = krylov.singular_values(self._dense())[..., 0]
        else:
            values = []
            for head in self._each():
                values.append(krylov.leading(_Head(head), 1, 6, generator(seed)).s[0])
            first = torch.stack(values).view(square.shape)
        return self._out(torch.where(first > 0, square / first**2, math.nan))

    def spectral_sum(
        self,
        f: Callable[[Tensor], Tensor],
        *,
        n_probes: int = 48,
        n_steps: int = 24,
        seed: int = 0,
    ) -> Estimate:
        """Return the sum of f over all n singular values.

        Exact for at most 512 positions; beyond, stochastic Lanczos quadrature on what is left
        once the leading singular space is taken out, with the squared Frobenius norm, which is
        known exactly, as control variate.

        Parameters
        ----------
        f : callable
            From a float64 tensor of singular values to a tensor of that shape; finite at 0.
        n_probes, n_steps : int
            Random directions, and Lanczos steps from each: the error falls as the root of the
            former.
        seed : int

        Returns
        -------
        Estimate, [..., head], float64

        References
        ----------
        Ubaru, S., Chen, J. and Saad, Y. Fast estimation of tr(f(A)) via stochastic Lanczos
        quadrature. SIAM J. Matrix Anal. Appl. 38 (2017).
        """
        if self.n_positions <= SMALL:
            value = f(self._all_values()).sum(-1)
            return Estimate(self._out(value), self._out(torch.zeros_like(value)))
        pairs = [q.sum(f) for q in self._quadratures(n_probes, n_steps, seed)]
        return self._estimates(pairs)

    def effective_rank(self, *, n_probes: int = 48, n_steps: int = 24, seed: int = 0) -> Estimate:
        """Return exp of the entropy of the singular values scaled to sum to 1.

        Parameters
        ----------
        n_probes, n_steps, seed : int
            As for `spectral_sum`.

        Returns
        -------
        Estimate, [..., head], float64
            0 for a matrix of zeros.

        References
        ----------
        Roy, O. and Vetterli, M. The effective rank. EUSIPCO (2007).
        """
        if self.n_positions <= SMALL:
            s = self._all_values()
            share = s / s.sum(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).tiny)
            value = torch.where(s[..., 0] > 0, torch.special.entr(share).sum(-1).exp(), 0.0)
            return Estimate(self._out(value), self._out(torch.zeros_like(value)))
        pairs = [krylov.effective_rank(q) for q in self._quadratures(n_probes, n_steps, seed)]
        return self._estimates(pairs)

    def energy(
        self,
        ks: Sequence[int],
        *,
        power: float = 2.0,
        n_probes: int = 48,
        n_steps: int = 24,
        seed: int = 0,
    ) -> Estimate:
        """Return the share of the first k singular values in the sum of all, to a power.

        Parameters
        ----------
        ks : sequence of int
            Each at least 0.
        power : float
            2 for energy, 1 for the nuclear norm; positive.
        n_probes, n_steps, seed : int
            As for `spectral_sum`.

        Returns
        -------
        Estimate, [..., head, k], float64
            NaN for a matrix of zeros.

        Raises
        ------
        UsageError
            `ks` is no sequence of whole numbers of at least 0, or the power is not positive.
        """
        if not power > 0:
            raise UsageError(f"The power must be positive, not {power}.")
        if not isinstance(ks, Iterable):
            raise UsageError(f"ks must be a sequence, not {ks!r}.", hint=f"Give [{ks!r}].")
        counts = [min(whole_number(k, "Each of ks"), self.n_positions) for k in ks]
        index = torch.tensor(counts, dtype=torch.int64)
        if self.n_positions <= SMALL:
            sums = (self._all_values() ** power).cumsum(-1)
            sums = torch.nn.functional.pad(sums, (1, 0))
            share = sums[..., index.to(sums.device)] / sums[..., -1:]
            return Estimate(self._out(share), self._out(torch.zeros_like(share)))
        pairs = [
            krylov.top_share(q, index, power) for q in self._quadratures(n_probes, n_steps, seed)
        ]
        value = torch.stack([x[0] for x in pairs]).to(self.device)
        error = torch.stack([x[1] for x in pairs]).to(self.device)
        return Estimate(self._lead(value), self._lead(error))

    # ---- how --------------------------------------------------------------------------------

    def _rank(self, rank: int) -> int:
        return min(whole_number(rank, "The number of singular values", 1), self.n_positions)

    def _whole(self, rank: int, n_iter: int) -> bool:
        """Whether to decompose the whole matrix: small, or hardly larger than the Krylov space."""
        space = (rank + krylov.OVERSAMPLING) * (whole_number(n_iter, "n_iter") + 1)
        return self.n_positions <= max(SMALL, space)

    def _dense(self) -> Tensor:
        return self._backing.dense().to(self._backing.wide)

    def _all_values(self) -> Tensor:
        if "singular_values" not in self._cache:
            self._cache["singular_values"] = krylov.singular_values(self._dense())
        return self._cache["singular_values"]

    def _each(self) -> Iterator[Backing]:
        """Yield each head of each prompt as a backing of its own."""
        prompts, heads, _ = self._backing.shape
        for prompt in range(prompts):
            for head in range(heads):
                one = torch.tensor([prompt], device=self.device)
                yield self._backing.part(one, torch.tensor([head], device=self.device))

    def _lead(self, value: Tensor) -> Tensor:
        """Give [prompt x head, ...] the caller's leading dimensions."""
        return value.reshape(*self._batch, *value.shape[1:])

    def _estimates(self, pairs: list[tuple[float, float]]) -> Estimate:
        both = torch.tensor(pairs, dtype=self._backing.wide, device=self.device)
        return Estimate(self._lead(both[:, 0]), self._lead(both[:, 1]))

    def _quadratures(self, n_probes: int, n_steps: int, seed: int) -> list[krylov.Quadrature]:
        # An error bar needs so many.
        whole_number(n_probes, "n_probes", 4)
        whole_number(n_steps, "n_steps", 2)
        key = (n_probes, n_steps, seed)
        if key not in self._measures:
            square = self._once("frobenius2").flatten().tolist()
            self._measures[key] = [
                krylov.quadrature(
                    _Head(head),
                    total,
                    n_probes=n_probes,
                    n_steps=n_steps,
                    n_deflate=16,
                    generator=generator(seed),
                )
                for head, total in zip(self._each(), square, strict=True)
            ]
        return self._measures[key]


def _fix_signs(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Make the entry of largest size in each column of v positive."""
    at = v.abs().argmax(-2, keepdim=True)
    sign = torch.where(v.gather(-2, at) < 0, -1.0, 1.0).to(v.dtype)
    return u * sign, v * sign
