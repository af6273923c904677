"""What is read off the rows, the keys and the distances of an attention matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnlens.attention.base import Base
from attnlens.attention.convert import ArrayLike, to_tensor, whole_number
from attnlens.attention.results import ByOffset, TopKeys
from attnlens.errors import UsageError


class Reductions(Base):
    """Methods that reduce each head's matrix to numbers per row, key, distance or cell."""

    # ---- rows -------------------------------------------------------------------------------

    def visible(self) -> Tensor:
        """Return how many keys each query sees.

        Returns
        -------
        Tensor, [query_pos] or [..., 1, query_pos], int64
            The second shape where prompts differ (lengths, prefix).
        """
        return self._rule(self._visible)

    def entropy(self) -> Tensor:
        """Return each row's Shannon entropy, ``-sum p ln p``, in nats.

        Returns
        -------
        Tensor, [..., head, query_pos]
        """
        return self._out(self._once("entropy"))

    def entropy_share(self) -> Tensor:
        """Return each row's entropy over the largest possible, ``ln(visible keys)``.

        Returns
        -------
        Tensor, [..., head, query_pos]
            NaN for rows that see fewer than two keys: they have no choice to make.
        """
        seen = self._visible[:, None].to(self._backing.wide)
        most = torch.where(seen > 1, seen.log(), math.nan)
        return self._out(self._once("entropy") / most)

    def renyi(self, alpha: float) -> Tensor:
        """Return each row's Renyi entropy of order alpha, ``ln(sum p^alpha) / (1 - alpha)``.

        Parameters
        ----------
        alpha : float
            Order, at least 0. 0 gives the logarithm of the number of visible keys, 1 the Shannon
            entropy, infinity ``-ln max``.

        Returns
        -------
        Tensor, [..., head, query_pos], nats

        Raises
        ------
        UsageError
            alpha is negative or NaN.

        References
        ----------
        Renyi, A. On measures of entropy and information. Proc. 4th Berkeley Symposium (1961).
        """
        if not alpha >= 0:
            raise UsageError(f"The order of a Renyi entropy is at least 0, not {alpha}.")
        alive = self._visible[:, None] > 0
        if alpha == 0:
            count = self._visible[:, None].clamp_min(1).to(self._backing.wide).log()
            p, h, n = self._backing.shape
            return self._out(count.expand(p, h, n).clone())
        if alpha == 1:
            return self.entropy()
        if math.isinf(alpha):
            top = self._once("max")
            return self._out(torch.where(alive & (top > 0), -top.log(), 0.0).clamp_min(0.0))
        value = self._backing.renyi(float(alpha))
        return self._out(torch.where(alive, value, 0.0).clamp_min(0.0))

    def max(self) -> Tensor:
        """Return each row's largest weight, [..., head, query_pos]."""
        return self._out(self._once("max"))

    def row_logsumexp(self, temperature: float = 1.0) -> Tensor:
        """Return the logarithm of each row's partition function, ``ln sum_j exp(s_ij / T)``.

        Parameters
        ----------
        temperature : float
            T, more than 0.

        Returns
        -------
        Tensor, [..., head, query_pos]
            Minus infinity for rows that see no key. A pattern knows its scores only up to a
            constant per row, and takes ``s = ln p``: 0 at T = 1.

        Raises
        ------
        UsageError
            The temperature is not positive and finite.
        """
        if not 0 < temperature < math.inf:
            raise UsageError(f"A temperature is positive and finite, not {temperature}.")
        return self._out(self._backing.row_lse(1.0 / temperature))

    def frobenius2(self) -> Tensor:
        """Return the squared Frobenius norm: the sum of squared weights, [..., head]."""
        return self._out(self._once("frobenius2"))

    def top_keys(self, k: int) -> TopKeys:
        """Return the k largest weights of each row, and their keys.

        Parameters
        ----------
        k : int
            At least 1; more than the number of positions counts as that number.

        Returns
        -------
        TopKeys

        Raises
        ------
        UsageError
            k is no whole number of at least 1.
        """
        count = min(whole_number(k, "The number of keys", 1), self.n_positions)
        weights, keys = self._backing.top_keys(count)
        rank = torch.arange(weights.shape[-1], device=self.device)
        seen = rank < self._visible[:, None, :, None]
        weights, keys = torch.where(seen, weights, 0.0), torch.where(seen, keys, -1)
        return TopKeys(self._out(weights), self._out(keys))

    # ---- keys and distances -----------------------------------------------------------------

    def received(self) -> Tensor:
        """Return the mean weight each key gets from the queries that can see it.

        Returns
        -------
        Tensor, [..., head, key_pos]
            0 for keys at or beyond a prompt's length.
        """
        viewers = self._backing.mask.viewers(self.device)[:, None]
        return self._out(self._once("column_sums") / viewers.clamp_min(1))

    def received_sums(self) -> tuple[Tensor, Tensor]:
        """Return each key's total weight, and the number of queries that can see it.

        Returns
        -------
        tuple of Tensor
            [..., head, key_pos], and [key_pos] or [..., 1, key_pos] int64.
        """
        viewers = self._backing.mask.viewers(self.device)
        return self._out(self._once("column_sums")), self._rule(viewers)

    def by_offset(self) -> ByOffset:
        """Return the total weight at each distance ``query - key``, and how many cells have it.

        Returns
        -------
        ByOffset
            Along `offsets`.
        """
        counts = self._rule(self._backing.mask.offset_counts(self.device))
        return ByOffset(self._out(self._once("offset_sums")), counts)

    def entries(self, rows: ArrayLike, cols: ArrayLike) -> Tensor:
        """Return the weights at chosen cells.

        Parameters
        ----------
        rows, cols : array of int, [index] or [..., head, index]
            Query and key of each cell; they broadcast against each other and against heads.

        Returns
        -------
        Tensor, [..., head, index]
            0 where the query cannot see the key.

        Raises
        ------
        UsageError
            An index outside the matrix.
        """
        given = []
        for what, value in (("rows", rows), ("cols", cols)):
            index = torch.as_tensor(to_tensor(value), device=self.device)
            if index.is_floating_point() or index.dtype == torch.bool:
                raise UsageError(f"{what} must be whole numbers, not {index.dtype}.")
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.n_positions:
                raise UsageError(
                    f"{what} must lie between 0 and {self.n_positions - 1}; "
                    f"found {int(index.min())} to {int(index.max())}."
                )
            given.append(index.to(torch.int64))
        shape = (given[0] + given[1]).shape
        first, second = given[0].expand(shape), given[1].expand(shape)
        if first.ndim > 1:
            p, h, _ = self._backing.shape
            full = (*self._batch, shape[-1])
            first = first.expand(full).reshape(p, h, -1)
            second = second.expand(full).reshape(p, h, -1)
        else:
            first, second = first.view(1, 1, -1), second.view(1, 1, -1)
        return self._out(self._backing.entries(first, second))
