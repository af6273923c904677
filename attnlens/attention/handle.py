"""The handle and how it is made."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnlens.attention.convert import ArrayLike, per_prompt, to_float, to_tensor
from attnlens.attention.dense import Dense
from attnlens.attention.masks import Mask
from attnlens.attention.reductions import Reductions
from attnlens.errors import UsageError

_HEAD = ("head",)
_SQUARE = (("query_pos",), ("key_pos",))


class Attention(Reductions):
    """Attention of one layer: for each prompt and head a row-stochastic n x n matrix A.

    Made by `from_pattern` or `from_qk`, never directly. Shapes below are written
    ``[..., head, query_pos]``: the leading dimensions are those of what it was made from.
    Reductions come in float64 (float32 on devices without it), products in the dtype of the
    input, 16-bit input counting as float32. Nothing here changes its input.

    Rows that see no key (those at or beyond a prompt's length) are rows of zeros everywhere:
    zero entropy, zero maximum.
    """

    @classmethod
    def from_pattern(
        cls,
        pattern: ArrayLike,
        *,
        causal: bool | None = None,
        window: int | None = None,
        lengths: ArrayLike | None = None,
    ) -> Attention:
        """Make a handle from attention weights.

        Parameters
        ----------
        pattern : array, [..., head, query_pos, key_pos]
            Torch, numpy or xarray (whose named dimensions may come in any order). Values at or
            beyond a prompt's length are ignored, NaN included.
        causal : bool, optional
            Whether a query sees no later key, taken on trust; None: found out, once it matters,
            from whether everything above the diagonal is zero.
        window : int, optional
            Sliding window: a query sees itself and the ``window - 1`` keys nearest to it. It
            bears on which keys count as visible.
        lengths : array of int, [...] without head, optional
            Real positions of each prompt; None if all are real.

        Raises
        ------
        UsageError
            Shapes that do not fit.
        """
        p = to_float(to_tensor(pattern, (_HEAD, *_SQUARE) if _has_head(pattern) else _SQUARE))
        if p.ndim < 2 or p.shape[-1] != p.shape[-2]:
            raise UsageError(
                f"A pattern has shape [..., head, query_pos, key_pos] with as many queries as "
                f"keys, not {list(p.shape)}."
            )
        batch, n = tuple(p.shape[:-2]), p.shape[-1]
        n_heads = batch[-1] if batch else 1
        p = p.reshape(math.prod(batch[:-1]), n_heads, n, n)
        real = per_prompt(lengths, batch[:-1], n, "lengths", p.device)
        _check_window(window)
        if real is not None:
            inside = torch.arange(n, device=p.device) < real[:, None]
            p = torch.where((inside[:, :, None] & inside[:, None, :])[:, None], p, 0.0)
        if causal is None:
            causal = _is_causal(p)
        return cls(Dense(p, Mask(n, causal, window, lengths=real)), batch)


def _has_head(value: Any) -> bool:
    return "head" in getattr(value, "dims", ())


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise UsageError(f"A window holds at least the query itself: at least 1, not {window}.")


def _is_causal(pattern: Tensor) -> bool:
    """Whether all is zero above the diagonal; reads little of a pattern where it is not."""
    n = pattern.shape[-1]
    step = 64
    for start in range(0, n, step):
        stop = min(n, start + step)
        corner = pattern[..., start:stop, start:stop].triu(1)
        if bool(corner.any()) or bool(pattern[..., start:stop, stop:].any()):
            return False
    return True
