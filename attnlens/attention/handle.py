"""The handle and how it is made."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnlens.attention.convert import (
    ArrayLike,
    per_prompt,
    to_float,
    to_tensor,
    whole_number,
    wide,
)
from attnlens.attention.dense import Dense
from attnlens.attention.factored import Factored
from attnlens.attention.masks import Mask
from attnlens.attention.reductions import Reductions
from attnlens.attention.spectrum import Spectrum
from attnlens.attention.tokens import TokenScores
from attnlens.errors import NonFiniteError, UsageError

_HEAD = ("head",)
_SQUARE = (("query_pos",), ("key_pos",))

#: Above this size of scores, float32 would lose more than a few millionths of a nat.
_FLOAT32_SCORE = 64.0


class Attention(Reductions, TokenScores, Spectrum):
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
        NonFiniteError
            NaN or infinity where a prompt has positions.
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
        _check_finite(p)
        if causal is None:
            causal = _is_causal(p)
        return cls(Dense(p, Mask(n, causal, window, lengths=real)), batch)

    @classmethod
    def from_qk(
        cls,
        q: ArrayLike,
        k: ArrayLike,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi: ArrayLike | None = None,
        prefix: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
    ) -> Attention:
        """Make a handle from queries and keys; no n x n tensor is made unless asked for.

        Fused kernels do the work where the scores are plain; sliding windows, prefixes, soft
        caps, ALiBi, and devices without such kernels go through blocks of rows. Where float32
        scores could pass 64 in size, the arithmetic is float64.

        Parameters
        ----------
        q : array, [..., head, pos, d_head]
            Queries as the scores use them, that is after rotary embedding and QK-norm. Torch,
            numpy or xarray (whose named dimensions may come in any order).
        k : array, [..., kv_head, pos, d_head]
            Keys likewise. Query head h reads key-value head ``h // (head / kv_head)``.
        scale : float
            The scores are ``scale q . k``.
        causal : bool
            A query sees no later key.
        window : int, optional
            Sliding window: a query sees itself and the ``window - 1`` keys nearest to it.
        soft_cap : float, optional
            The scaled scores s become ``soft_cap tanh(s / soft_cap)``.
        alibi : array, [head], optional
            Slopes of ALiBi: ``slope |query - key|`` is subtracted from the scores.
        prefix : int or array of int, [...] without head, optional
            The first keys, which every query sees (prefix language models).
        lengths : array of int, [...] without head, optional
            Real positions of each prompt; q and k beyond them are ignored, NaN included.

        Raises
        ------
        UsageError
            Shapes or numbers that do not fit.
        NonFiniteError
            NaN or infinity in q or k.
        """
        q = to_float(to_tensor(q, _vector("head", q)))
        k = to_float(to_tensor(k, _vector("kv_head", k))).to(q.device)
        batch = tuple(q.shape[:-2])
        n_heads, kv_heads = (batch[-1], k.shape[-3]) if batch and k.ndim > 2 else (1, 1)
        same = q.ndim == k.ndim and q.shape[-2:] == k.shape[-2:] and batch[:-1] == k.shape[:-3]
        if q.ndim < 2 or not same or n_heads % max(1, kv_heads):
            raise UsageError(
                f"q has shape {list(q.shape)} and k {list(k.shape)}.",
                hint="They are [..., head, pos, d_head] and [..., kv_head, pos, d_head] with the "
                "same positions and width, and heads a multiple of key-value heads.",
            )
        n, d = q.shape[-2:]
        _check_window(window)
        if not (math.isfinite(scale) and scale != 0):
            raise UsageError(f"The score scale must be finite and not 0; it is {scale}.")
        if soft_cap is not None and not 0 < soft_cap < math.inf:
            raise UsageError(f"A soft cap is positive and finite, not {soft_cap}.")
        prompts = math.prod(batch[:-1])
        dtype = torch.promote_types(q.dtype, k.dtype)
        q, k = q.to(dtype), k.to(dtype)
        q, k = q.reshape(prompts, n_heads, n, d), k.reshape(prompts, kv_heads, n, d)
        if scale < 0:  # the kernels mask before they scale
            q, scale = -q, -scale
        real = per_prompt(lengths, batch[:-1], n, "lengths", q.device)
        if real is not None:
            inside = (torch.arange(n, device=q.device) < real[:, None])[:, None, :, None]
            q, k = torch.where(inside, q, 0.0), torch.where(inside, k, 0.0)
        mask = Mask(
            n,
            causal,
            None if window is None or window >= n else window,
            per_prompt(prefix, batch[:-1], n, "prefix", q.device),
            real,
        )
        slopes = None if alibi is None else _slopes(alibi, prompts, n_heads).to(q)
        bound = _largest_score(q, k, scale) + (0.0 if slopes is None else n * _largest(slopes))
        if dtype == torch.float32 and bound > _FLOAT32_SCORE:
            q, k = q.to(wide(q.device)), k.to(wide(q.device))
            slopes = None if slopes is None else slopes.to(q)
        backing = Factored(
            q, k, mask, scale=scale, soft_cap=soft_cap, slopes=slopes, bound=bound, dtype=dtype
        )
        return cls(backing, batch)


def _largest_score(q: Tensor, k: Tensor, scale: float) -> float:
    """Return a bound on the size of ``scale q . k``.

    Raises
    ------
    NonFiniteError
        NaN or infinity in q or k.
    """
    bound = abs(scale)
    for what, x in (("q", q), ("k", k)):
        largest = _largest(x)
        if not math.isfinite(largest):
            at = [int(i) for i in (~x.isfinite()).nonzero()[0]]
            raise NonFiniteError(
                f"{what} holds NaN or infinity, first at [prompt, head, pos, d_head] {at}.",
                hint="Padding belongs beyond `lengths`; elsewhere the model itself overflowed.",
            )
        # Divided first: the square of a large float32 would overflow.
        unit = largest if largest > 0 else 1.0
        bound *= unit * float(torch.linalg.vector_norm(x / unit, dim=-1).max()) if x.numel() else 0
    return bound


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _slopes(alibi: ArrayLike, prompts: int, n_heads: int) -> Tensor:
    slopes = to_float(to_tensor(alibi))
    if slopes.shape != (n_heads,) or not bool(slopes.isfinite().all()):
        raise UsageError(
            f"ALiBi takes one finite slope per head: {n_heads}, not {list(slopes.shape)}."
        )
    return slopes.expand(prompts, n_heads)


def _vector(head: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """Names of the last dimensions of q or k, if it is a DataArray."""
    dims = getattr(value, "dims", ())
    heads = tuple(name for name in (head, "head", "kv_head") if name in dims)
    return (*((heads,) if heads else ()), ("pos", "query_pos", "key_pos"), ("d_head",))


def _has_head(value: Any) -> bool:
    return "head" in getattr(value, "dims", ())


def _check_window(window: int | None) -> None:
    if window is not None:
        whole_number(window, "The window, which holds the query itself,", 1)


def _check_finite(pattern: Tensor) -> None:
    """Look at the sum first, which any NaN or infinity spoils: that takes no memory.

    Raises
    ------
    NonFiniteError
    """
    if bool(pattern.sum().isfinite()) or bool(pattern.isfinite().all()):
        return
    at = [int(i) for i in (~pattern.isfinite()).nonzero()[0]]
    raise NonFiniteError(
        f"The pattern holds NaN or infinity, first at [prompt, head, query, key] {at}.",
        hint="Padding belongs beyond `lengths`; elsewhere the model itself overflowed.",
    )


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
