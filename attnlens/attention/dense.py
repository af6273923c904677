"""Attention backed by its pattern: passes over blocks of rows, each block small enough to cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnlens.attention.convert import pairs_of, wide
from attnlens.attention.masks import Mask

#: Bytes of one block in the accumulating dtype: about half of a core's second-level cache.
BLOCK_BYTES = 1 << 20
ROWS = 64


class Dense:
    """Attention over [prompt, head, query_pos, key_pos], held as such.

    Parameters
    ----------
    pattern : Tensor, [prompt, head, query_pos, key_pos], float32 or float64
    mask : Mask
        Which cells are visible. Cells outside must be zero.
    """

    def __init__(self, pattern: Tensor, mask: Mask) -> None:
        self.pattern = pattern
        self.mask = mask
        self.shape = (pattern.shape[0], pattern.shape[1], pattern.shape[-1])
        self.device = pattern.device
        self.dtype = pattern.dtype
        self.wide = wide(pattern.device)

    def _blocks(self) -> Iterator[tuple[slice, slice, slice, Tensor]]:
        """Yield (prompt-heads, rows, columns, view of the pattern there)."""
        n = self.shape[2]
        flat = self.pattern.reshape(-1, n, n)
        for start in range(0, n, ROWS):
            stop = min(n, start + ROWS)
            low, high = self.mask.columns(start, stop)
            high = min(high, n)
            row_bytes = max(1, (stop - start) * (high - low) * 8)
            group = max(1, BLOCK_BYTES // row_bytes)
            for g in range(0, flat.shape[0], group):
                heads = slice(g, g + group)
                rows, cols = slice(start, stop), slice(low, high)
                yield heads, rows, cols, flat[heads, rows, cols]

    def _per_row(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `reduce` ([..., key] -> [...]) to every row in the accumulating dtype."""
        p, h, n = self.shape
        out = torch.zeros(p * h, n, dtype=self.wide, device=self.device)
        for heads, rows, _, block in self._blocks():
            # A copy even where the dtype is right already: `reduce` may write into it.
            out[heads, rows] = reduce(block.to(self.wide, copy=True))
        return out.view(p, h, n)

    def entropy(self) -> Tensor:
        """Return -sum p ln p per row, in nats, with 0 ln 0 = 0."""
        tiny = torch.finfo(self.wide).smallest_normal

        def reduce(p: Tensor) -> Tensor:
            # p at or under `tiny` adds less than 1e-300: the clamp only keeps ln finite.
            total: Tensor = torch.linalg.vecdot(p, p.clamp_min(tiny).log_())
            return total.neg_()

        return self._per_row(reduce).clamp_min_(0.0)

    def row_lse(self, alpha: float) -> Tensor:
        """Return ln sum p^alpha per row; -inf for rows of zeros."""

        def reduce(p: Tensor) -> Tensor:
            top = p.amax(-1)
            safe = torch.where(top > 0, top, 1.0)
            ratio = p.div_(safe[..., None])
            # 0^0 must be 0 here: a cell without weight is not in the sum.
            total = torch.where(ratio > 0, ratio.pow(alpha), 0.0).sum(-1)
            return torch.where(top > 0, alpha * safe.log() + total.log(), -math.inf)

        return self._per_row(reduce)

    def renyi(self, alpha: float) -> Tensor:
        """Return ln(sum p^alpha) / (1 - alpha) per row, alpha not 1; 0 for rows of zeros."""
        if abs(alpha - 1.0) > 0.05:
            lse = self.row_lse(alpha)
            return torch.where(lse.isinf(), 0.0, lse / (1.0 - alpha))
        return self._per_row(lambda p: renyi_near_one(p, alpha))

    def frobenius2(self) -> Tensor:
        """Return the sum of squared weights, [prompt, head]."""
        return self._per_row(lambda p: torch.linalg.vecdot(p, p)).sum(-1)

    def max(self) -> Tensor:
        """Return the largest weight per row."""
        return self.pattern.amax(-1).to(self.wide)

    def column_sums(self) -> Tensor:
        """Return each key's total weight, [prompt, head, key_pos]."""
        p, h, n = self.shape
        out = torch.zeros(p * h, n, dtype=self.wide, device=self.device)
        for heads, _, cols, block in self._blocks():
            out[heads, cols] += block.to(self.wide).sum(-2)
        return out.view(p, h, n)

    def offset_sums(self) -> Tensor:
        """Return the total weight at each distance, [prompt, head, offset]."""
        p, h, n = self.shape
        out = torch.zeros(p * h, 2 * n - 1, dtype=self.wide, device=self.device)
        for heads, rows, cols, block in self._blocks():
            add_diagonals(out[heads], rows.start, cols.start, block)
        return out.view(p, h, -1)[..., n - 1 if self.mask.one_sided else 0 :]

    def entries(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return chosen weights, [prompt, head, index]; `rows`, `cols` as that or [1, 1, index]."""
        p, h, _ = self.shape
        first = torch.arange(p, device=self.device)[:, None, None]
        second = torch.arange(h, device=self.device)[None, :, None]
        return self.pattern[first, second, rows, cols]

    def matched(self, query_label: Tensor, key_label: Tensor) -> Tensor:
        """Return per row the weight on earlier keys whose label is the query's.

        `query_label` and `key_label` are [prompt, pos]; the result is [prompt, head, query_pos].
        """
        p, h, n = self.shape
        out = torch.zeros(p, h, n, dtype=self.wide, device=self.device)
        for prompt in range(p):
            for start in range(0, n, ROWS):
                rows = slice(start, min(n, start + ROWS))
                same = query_label[prompt, rows, None] == key_label[prompt, None, : rows.stop]
                same = same.tril(start - 1)
                block = self.pattern[prompt, :, rows, : rows.stop]
                out[prompt, :, rows] = torch.where(same, block, 0.0).sum(-1, dtype=self.wide)
        return out

    def matmul(self, x: Tensor) -> Tensor:
        """Return A X, x [prompt, head, key_pos, column]."""
        return self.pattern @ x

    def rmatmul(self, y: Tensor) -> Tensor:
        """Return A^T Y, y [prompt, head, query_pos, column]."""
        return self.pattern.mT @ y

    def top_keys(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest weights of each row and their keys."""
        weights, keys = self.pattern.topk(k, dim=-1)
        return weights, keys

    def dense(self) -> Tensor:
        """Return the pattern, [prompt, head, query_pos, key_pos]."""
        return self.pattern

    def part(self, prompts: Tensor, heads: Tensor) -> Dense:
        """Return chosen (prompt, head) pairs as [pair, 1, ...]; both index tensors are [pair]."""
        return Dense(pairs_of(self.pattern, prompts, heads), self.mask.part(prompts))

    def take(self, prompts: Tensor, heads: Tensor) -> Dense:
        """Return chosen prompts x chosen heads; the index tensors are [prompt] and [head]."""
        return Dense(self.pattern[prompts[:, None], heads], self.mask.part(prompts))


def renyi_near_one(p: Tensor, alpha: float) -> Tensor:
    """Return the Renyi entropy of rows p without the cancellation that alpha near 1 brings.

    ``sum p^alpha - 1 = sum p (p^(alpha-1) - 1)``, each term through expm1.
    """
    step = alpha - 1.0
    tiny = torch.finfo(p.dtype).smallest_normal
    excess = torch.linalg.vecdot(p, torch.expm1(step * p.clamp_min(tiny).log_()))
    return -torch.log1p(excess) / step


def add_diagonals(out: Tensor, first_row: int, first_col: int, block: Tensor) -> None:
    """Add the sums of a block's diagonals to `out`.

    Parameters
    ----------
    out : Tensor, [group, offset], offsets 1 - n ... n - 1
        Changed in place.
    first_row, first_col : int
        Where the block lies in the matrix.
    block : Tensor, [group, row, column]
    """
    g, r, w = block.shape
    n = (out.shape[-1] + 1) // 2
    # Written with each row shifted one to the right of the row below, diagonals become columns.
    width = w + r - 1
    skewed = torch.zeros(g, r, width, dtype=out.dtype, device=out.device)
    skewed.as_strided((g, r, w), (r * width, width - 1, 1), r - 1).copy_(block)
    sums = skewed.sum(-2)
    # Column c of `skewed` holds offset first_row + r - 1 - first_col - c.
    highest = first_row + r - 1 - first_col
    lowest = highest - (width - 1)
    low, high = max(lowest, 1 - n), min(highest, n - 1)
    sums = sums.flip(-1)[:, low - lowest : width - (highest - high)]
    out[:, low + n - 1 : high + n] += sums
