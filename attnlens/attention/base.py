"""What all parts of the handle share: shapes, and products."""

from __future__ import annotations

import functools
from typing import Any, Self

import torch
from torch import Tensor

from attnlens.attention.backing import Backing
from attnlens.attention.convert import ArrayLike, to_float, to_tensor
from attnlens.attention.krylov import Quadrature
from attnlens.errors import UsageError


class Base:
    """A backing, and the leading dimensions that its user sees."""

    def __init__(self, backing: Backing, batch: tuple[int, ...]) -> None:
        self._backing = backing
        self._batch = batch
        self._cache: dict[str, Tensor] = {}
        self._measures: dict[tuple[int, int, int], list[Quadrature]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., head, query_pos, key_pos)``."""
        n = self._backing.shape[2]
        return (*self._batch, n, n)

    @property
    def n_positions(self) -> int:
        """Number of queries, and of keys."""
        return self._backing.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products and weights."""
        return self._backing.dtype

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self._backing.device

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return self._backing.mask.one_sided

    @property
    def lengths(self) -> Tensor | None:
        """Real positions of each prompt, [...] without head; None if all are real."""
        lengths = self._backing.mask.lengths
        return None if lengths is None else lengths.view(self._batch[:-1])

    @property
    def offsets(self) -> Tensor:
        """Distances ``query - key`` that `by_offset` counts, [offset]: from 0 if causal."""
        return self._backing.mask.offsets(self.device)

    def __repr__(self) -> str:
        kind = type(self._backing).__name__.lower()
        return f"<Attention {list(self.shape)} {kind} {self.dtype} on {self.device}>"

    def _once(self, name: str) -> Tensor:
        """Return a backing's method of no arguments, computed at most once."""
        if name not in self._cache:
            self._cache[name] = getattr(self._backing, name)()
        return self._cache[name]

    def _out(self, value: Tensor) -> Tensor:
        """Give a backing's [prompt, head, ...] the caller's leading dimensions."""
        return value.reshape(*self._batch, *value.shape[2:])

    def _rule(self, value: Tensor) -> Tensor:
        """Give a mask's [prompt or 1, ...] the caller's leading dimensions, head being 1."""
        if not self._backing.mask.ragged:
            return value[0]
        lead = (*self._batch[:-1], 1) if self._batch else ()
        return value.reshape(*lead, *value.shape[1:])

    @functools.cached_property
    def _visible(self) -> Tensor:
        return self._backing.mask.visible(self.device)

    def select(self, index: Any) -> Self:
        """Return the attention of chosen prompts and heads.

        Parameters
        ----------
        index : int, slice, list or tuple of them
            Along the leading dimensions, in order, as for an array: ``select(0)`` is the first
            prompt, ``select((0, slice(4, 8)))`` four of its heads. ``...`` stands for as many
            dimensions as it takes. The head dimension stays, with size 1 for a single head.

        Returns
        -------
        Attention

        Raises
        ------
        UsageError
            The index does not fit the leading dimensions.
        """
        given = index if isinstance(index, tuple) else (index,)
        lead = len(self._batch)
        if any(i is Ellipsis for i in given):
            at = next(n for n, i in enumerate(given) if i is Ellipsis)
            filler = (slice(None),) * (lead - len(given) + 1)
            given = given[:at] + filler + given[at + 1 :]
        given += (slice(None),) * (lead - len(given))
        p, h, _ = self._backing.shape
        try:
            if len(given) != lead or not lead:
                raise IndexError(f"{lead} leading dimensions")
            prompts = torch.arange(p, device=self.device).view(self._batch[:-1])[given[:-1]]
            heads = torch.arange(h, device=self.device)[given[-1]].reshape(-1)
        except (IndexError, TypeError) as error:
            raise UsageError(
                f"{index!r} does not select from leading dimensions {list(self._batch)}: {error}."
            ) from None
        part = self._backing.take(prompts.reshape(-1), heads)
        return type(self)(part, (*prompts.shape, len(heads)))

    def __matmul__(self, x: ArrayLike) -> Tensor:
        """Return A X for values X [..., head, key_pos, column], [key_pos, column] or [key_pos]."""
        return self._apply(self._backing.matmul, x)

    @property
    def T(self) -> Transposed:
        """The transpose, for products: ``attention.T @ y``."""
        return Transposed(self)

    def _apply(self, product: Any, x: ArrayLike) -> Tensor:
        value = to_float(to_tensor(x)).to(self.device)
        vector = value.ndim == 1
        value = value[:, None] if vector else value
        n = self.n_positions
        if value.ndim < 2 or value.shape[-2] != n:
            raise UsageError(
                f"Attention over {n} positions cannot be multiplied with {list(value.shape)}.",
                hint=f"It takes [{n}, column] or [..., head, {n}, column].",
            )
        try:
            value = value.expand(*self._batch, *value.shape[-2:])
        except RuntimeError:
            raise UsageError(
                f"The leading dimensions of {list(value.shape)} do not fit {list(self._batch)}."
            ) from None
        p, h, _ = self._backing.shape
        value = value.to(self.dtype).reshape(p, h, n, value.shape[-1])
        lengths = self._backing.mask.lengths
        if lengths is not None:
            # Whatever lies beyond a prompt's length, NaN included, must not reach the product.
            inside = torch.arange(n, device=self.device) < lengths[:, None]
            value = torch.where(inside[:, None, :, None], value, 0.0)
        out = self._out(product(value))
        return out[..., 0] if vector else out

    def to_dense(self) -> Tensor:
        """Return the whole matrix, [..., head, query_pos, key_pos]: n x n numbers per head."""
        return self._out(self._backing.dense())


class Transposed:
    """The transpose of an `Attention`, for products."""

    def __init__(self, attention: Base) -> None:
        self.T = attention

    def __matmul__(self, y: ArrayLike) -> Tensor:
        """Return A^T Y, Y [..., head, query_pos, column], [query_pos, column] or [query_pos]."""
        return self.T._apply(self.T._backing.rmatmul, y)
