"""Scores of what heads are known to do: diagonals of the matrix, chosen by position or token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnlens.attention.base import Base
from attnlens.attention.convert import ArrayLike, to_tensor
from attnlens.errors import UsageError

#: Matching cells per position up to which they are looked up one by one; beyond, block by block.
_PAIRS_PER_POSITION = 16


class TokenScores(Base):
    """Methods that weigh chosen cells: each a mean over the query rows that count."""

    def previous_token(self) -> Tensor:
        """Return the mean weight on the position just before, over queries from 1 on.

        Returns
        -------
        Tensor, [..., head]
            NaN for prompts of one position.
        """
        rows = torch.arange(1, self.n_positions, device=self.device)
        return self._mean_of_rows(self._chosen(rows, rows - 1))

    def sink(self) -> Tensor:
        """Return the mean weight on position 0, over queries from 1 on.

        Query 0 of causal attention is left out: it has no other key.

        Returns
        -------
        Tensor, [..., head]
            NaN for prompts of one position.
        """
        rows = torch.arange(1, self.n_positions, device=self.device)
        return self._mean_of_rows(self._chosen(rows, torch.zeros_like(rows)))

    def duplicate(self, tokens: ArrayLike) -> Tensor:
        """Return the mean weight on earlier positions that hold the query's own token.

        Parameters
        ----------
        tokens : array of int, [..., pos] without head
            Token ids.

        Returns
        -------
        Tensor, [..., head]
            Mean over the queries whose token occurred before; NaN where no token did.

        Raises
        ------
        UsageError
            The tokens do not fit the positions.
        """
        ids = self._tokens(tokens)
        return self._mean_of_repeats(ids, ids)

    def induction(self, tokens: ArrayLike) -> Tensor:
        """Return the mean weight on the positions right after an earlier copy of the query's token.

        Parameters
        ----------
        tokens : array of int, [..., pos] without head
            Token ids.

        Returns
        -------
        Tensor, [..., head]
            Mean over the queries whose token occurred before; NaN where no token did. The query
            itself does not count as such a position.

        Raises
        ------
        UsageError
            The tokens do not fit the positions.

        References
        ----------
        Olsson et al. In-context learning and induction heads. Transformer Circuits (2022).
        """
        ids = self._tokens(tokens)
        before = torch.full_like(ids[:, :1], _no_token(ids))
        return self._mean_of_repeats(ids, torch.cat((before, ids[:, :-1]), -1))

    # ---- how --------------------------------------------------------------------------------

    def _chosen(self, rows: Tensor, cols: Tensor) -> Tensor:
        return self._backing.entries(rows.view(1, 1, -1), cols.view(1, 1, -1))

    def _mean_of_rows(self, weights: Tensor) -> Tensor:
        """Mean of weights [prompt, head, query from 1 on] over the real queries."""
        lengths = self._backing.mask.lengths
        n = self.n_positions
        real = torch.tensor([n], device=self.device) if lengths is None else lengths
        count = (real - 1).clamp_min(0)[:, None]
        total = weights.to(self._backing.wide).sum(-1)
        return self._out(torch.where(count > 0, total / count, math.nan))

    def _tokens(self, tokens: ArrayLike) -> Tensor:
        """Return token ids as [prompt, pos]."""
        ids = to_tensor(tokens).to(self.device)
        wanted = (*self._batch[:-1], self.n_positions)
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise UsageError(f"Tokens are whole numbers, not {ids.dtype}.")
        try:
            return ids.to(torch.int64).expand(wanted).reshape(-1, self.n_positions)
        except RuntimeError:
            raise UsageError(
                f"Tokens have shape {list(ids.shape)}, but this attention needs {list(wanted)}."
            ) from None

    def _mean_of_repeats(self, ids: Tensor, key_label: Tensor) -> Tensor:
        """Mean over the queries whose token occurred before of the weight on matching keys."""
        prompts, heads, n = self._backing.shape
        mass = self._matched(ids, key_label)
        repeats = torch.stack([_earlier(row, row)[1] for row in ids]) > 0
        lengths = self._backing.mask.lengths
        if lengths is not None:
            repeats &= torch.arange(n, device=self.device) < lengths[:, None]
        total = torch.where(repeats[:, None], mass, 0.0).sum(-1)
        count = repeats.sum(-1)[:, None].expand(prompts, heads)
        return self._out(torch.where(count > 0, total / count, math.nan))

    def _matched(self, ids: Tensor, key_label: Tensor) -> Tensor:
        """Return per row the weight on earlier keys with the query's label."""
        prompts, heads, n = self._backing.shape
        found = [_earlier(a, b) for a, b in zip(ids, key_label, strict=True)]
        if max(int(count.sum()) for _, count, _ in found) > _PAIRS_PER_POSITION * n:
            return self._backing.matched(ids, key_label)
        out = torch.zeros(prompts, heads, n, dtype=self._backing.wide, device=self.device)
        all_heads = torch.arange(heads, device=self.device)
        for prompt, (first, count, order) in enumerate(found):
            rows = torch.arange(n, device=self.device).repeat_interleave(count)
            # Position of each pair within its row's run of matching keys.
            start = (count.cumsum(0) - count).repeat_interleave(count)
            within = torch.arange(len(rows), device=self.device) - start
            cols = order[first.repeat_interleave(count) + within]
            part = self._backing.part(torch.full_like(all_heads, prompt), all_heads)
            weights = part.entries(rows.view(1, 1, -1), cols.view(1, 1, -1))[:, 0]
            out[prompt].index_add_(1, rows, weights.to(out.dtype))
        return out


def _no_token(ids: Tensor) -> int:
    """Return an id that no token has."""
    return int(ids.min()) - 1 if ids.numel() else -1


def _earlier(query_label: Tensor, key_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the earlier keys with each query's label without comparing all pairs.

    Returns
    -------
    tuple of Tensor, each [pos]
        Where in `order` each query's matching keys begin, how many there are, and the keys sorted
        by label and position.
    """
    n = len(query_label)
    position = torch.arange(n, device=query_label.device)
    # Labels to ranks first: label times n could overflow.
    labels = torch.cat((query_label, key_label))
    rank = torch.searchsorted(labels.sort()[0], labels)
    sorted_keys, order = (rank[n:] * n + position).sort()
    own = rank[:n] * n
    first = torch.searchsorted(sorted_keys, own)
    return first, torch.searchsorted(sorted_keys, own + position) - first, order
