"""What the methods of ``Attention`` return when it is more than one tensor."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ByOffset(NamedTuple):
    """Attention summed by distance.

    Attributes
    ----------
    sums : Tensor, [..., head, offset], float64
        Sum of the weights at each distance ``query - key``.
    counts : Tensor, [offset] or [..., 1, offset], int64
        Number of visible cells at that distance; the second shape where prompts differ.
    """

    sums: Tensor
    counts: Tensor


class TopKeys(NamedTuple):
    """The largest weights of each row.

    Attributes
    ----------
    weights : Tensor, [..., head, query_pos, k]
        In falling order; 0 where a row sees fewer than k keys.
    keys : Tensor, [..., head, query_pos, k], int64
        The key of each weight; -1 where a row sees fewer than k keys.
    """

    weights: Tensor
    keys: Tensor


class Estimate(NamedTuple):
    """A number with its error bar.

    Attributes
    ----------
    value : Tensor
    error : Tensor
        Half-width of an interval meant to hold the exact value in at least 95 of 100 trials.
        0 where the value was computed exactly.
    """

    value: Tensor
    error: Tensor


class SVD(NamedTuple):
    """Leading singular triplets, ``A ~ U diag(S) V^T``.

    Attributes
    ----------
    U : Tensor, [..., head, query_pos, component]
    S : Tensor, [..., head, component], float64
        Singular values in falling order. Those of a large matrix are Ritz values: never above
        the exact ones beyond rounding.
    V : Tensor, [..., head, key_pos, component]
        Each column's entry of largest size is positive; U follows.
    error : Tensor, [..., head, component], float64
        Half-width of an interval around S meant to hold the exact singular value of the same
        rank in at least 95 of 100 trials.
    """

    U: Tensor
    S: Tensor
    V: Tensor
    error: Tensor
