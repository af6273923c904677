"""What a backing of `Attention` computes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attnlens.attention.masks import Mask


class Backing(Protocol):
    """Attention over [prompt, head, query_pos, key_pos], however it is held.

    Reductions come in `wide`, products and weights in `dtype`; rows that see no key are zero.
    """

    mask: Mask
    shape: tuple[int, int, int]
    device: torch.device
    dtype: torch.dtype
    wide: torch.dtype

    def entropy(self) -> Tensor:
        """Return the Shannon entropy of each row, [prompt, head, query_pos]."""

    def row_lse(self, alpha: float) -> Tensor:
        """Return ``ln sum_j exp(alpha s_ij)``, [prompt, head, query_pos]."""

    def renyi(self, alpha: float) -> Tensor:
        """Return the Renyi entropy of each row, alpha positive, finite and not 1."""

    def frobenius2(self) -> Tensor:
        """Return the sum of squared weights, [prompt, head]."""

    def max(self) -> Tensor:
        """Return the largest weight of each row, [prompt, head, query_pos]."""

    def column_sums(self) -> Tensor:
        """Return the total weight of each key, [prompt, head, key_pos]."""

    def offset_sums(self) -> Tensor:
        """Return the total weight at each distance of `Mask.offsets`, [prompt, head, offset]."""

    def entries(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return chosen weights; `rows` and `cols` are [prompt or 1, head or 1, index]."""

    def matched(self, query_label: Tensor, key_label: Tensor) -> Tensor:
        """Return per row the weight on earlier keys whose label is the query's.

        The labels are [prompt, pos], the result [prompt, head, query_pos].
        """

    def matmul(self, x: Tensor) -> Tensor:
        """Return A X, x [prompt, head, key_pos, column]."""

    def rmatmul(self, y: Tensor) -> Tensor:
        """Return A^T Y, y [prompt, head, query_pos, column]."""

    def top_keys(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest weights of each row and their keys."""

    def dense(self) -> Tensor:
        """Return the weights themselves."""

    def part(self, prompts: Tensor, heads: Tensor) -> Backing:
        """Return chosen (prompt, head) pairs as [pair, 1, ...]; both index tensors are [pair]."""

    def take(self, prompts: Tensor, heads: Tensor) -> Backing:
        """Return chosen prompts x chosen heads; the index tensors are [prompt] and [head]."""
