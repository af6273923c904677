"""Scores and weights from queries and keys, a block of rows at a time, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.attention.masks import Mask

#: Bytes of one block of scores.
BLOCK_BYTES = 2 << 20
ROWS = 128


def lowest(dtype: torch.dtype) -> float:
    """Return the score of masked cells: finite, so that no infinity is ever subtracted."""
    return -1e300 if dtype == torch.float64 else -1e30


@dataclass(frozen=True, eq=False)
class Block:
    """Part of the score matrix.

    Attributes
    ----------
    batch : slice
        Along the first dimension of q.
    rows, cols : slice
        Queries and keys.
    scores : Tensor, [batch, group, row, column]
        Masked cells hold `lowest`; the block is its reader's to overwrite.
    """

    batch: slice
    rows: slice
    cols: slice
    scores: Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """The rule that gives scores from queries and keys.

    Attributes
    ----------
    q : Tensor, [batch, group, pos, d_head]
        The batch runs over prompts and key-value heads, the group over the query heads of each.
    k : Tensor, [batch, 1, pos, d_head]
    mask : Mask
        One prompt per entry of the batch.
    scale : float
    soft_cap : float or None
        Scores s become ``cap tanh(s / cap)``.
    slopes : Tensor or None, [batch, group]
        ALiBi: ``slope |query - key|`` is subtracted.
    """

    q: Tensor
    k: Tensor
    mask: Mask
    scale: float
    soft_cap: float | None = None
    slopes: Tensor | None = None

    def bend(self, scores: Tensor, distance: Tensor, slopes: Tensor | None) -> Tensor:
        """Apply soft cap and ALiBi in place to q . k scaled."""
        if self.soft_cap is not None:
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if slopes is not None:
            scores.sub_(slopes * distance.abs())
        return scores

    def blocks(self, alpha: float = 1.0) -> Iterator[Block]:
        """Yield all blocks of alpha times the scores."""
        batch, group, n, d = self.q.shape
        item = self.q.element_size()
        window = self.mask.window
        reach = n if window is None or self.mask.prefix is not None else min(n, 2 * window + ROWS)
        step = max(1, min(ROWS, BLOCK_BYTES // max(1, group * reach * item)))
        for start in range(0, n, step):
            rows = slice(start, min(n, start + step))
            cols = slice(*self.mask.columns(rows.start, rows.stop))
            size = group * (rows.stop - rows.start) * (cols.stop - cols.start) * item
            several = max(1, BLOCK_BYTES // max(1, size))
            i = torch.arange(rows.start, rows.stop, device=self.q.device)[:, None]
            j = torch.arange(cols.start, cols.stop, device=self.q.device)[None, :]
            for b in range(0, batch, several):
                part = slice(b, min(batch, b + several))
                # The group's rows side by side: keys are shared without being copied.
                queries = (self.q[part, :, rows] * self.scale).reshape(part.stop - b, -1, d)
                scores = torch.bmm(queries, self.k[part, 0, cols].mT)
                scores = scores.view(part.stop - b, group, rows.stop - rows.start, -1)
                slopes = None if self.slopes is None else self.slopes[part, :, None, None]
                self.bend(scores, i - j, slopes)
                if alpha != 1.0:
                    scores.mul_(alpha)
                hidden = self.mask.hidden(
                    (rows.start, rows.stop), (cols.start, cols.stop), part, self.q.device
                )
                if hidden is not None:
                    scores.masked_fill_(hidden, lowest(scores.dtype))
                yield Block(part, rows, cols, scores)

    def weights(self, top: Tensor, rest: Tensor) -> Iterator[Block]:
        """Yield blocks whose scores have become weights ``exp(s - top - rest)``.

        `top` and `rest` are [batch, group, pos] as from `row_lse`.
        """
        for block in self.blocks():
            at = block.batch, slice(None), block.rows, None
            block.scores.sub_(top[at]).sub_(rest[at]).exp_()
            yield block

    def row_lse(self, alpha: float) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp of alpha times each row's scores, each [batch, group, pos].

        In two parts, the largest score and what the others add: beside a score of 1e16 the latter
        would be rounded away, and equal weights with it.
        """
        top = torch.empty(self.q.shape[:3], dtype=self.q.dtype, device=self.q.device)
        rest = torch.empty_like(top)
        for block in self.blocks(alpha):
            largest = block.scores.amax(-1, keepdim=True)
            top[block.batch, :, block.rows] = largest[..., 0]
            rest[block.batch, :, block.rows] = block.scores.sub_(largest).exp_().sum(-1).log_()
        return top, rest

    def entropy(self) -> Tensor:
        """Return each row's entropy, [batch, group, pos]; anything for rows that see no key."""
        out = torch.empty(self.q.shape[:3], dtype=self.q.dtype, device=self.q.device)
        for block in self.blocks():
            below = block.scores.sub_(block.scores.amax(-1, keepdim=True))
            weight = below.exp()
            total = weight.sum(-1)
            # A masked cell is far below but finite, and its weight is exactly 0.
            mean: Tensor = torch.linalg.vecdot(weight, below)
            out[block.batch, :, block.rows] = total.log() - mean / total
        return out

    def largest(self) -> Tensor:
        """Return each row's largest score, [batch, group, pos]."""
        out = torch.empty(self.q.shape[:3], dtype=self.q.dtype, device=self.q.device)
        for block in self.blocks():
            out[block.batch, :, block.rows] = block.scores.amax(-1)
        return out
