"""Scores that are never computed: what a lean forward pass hands around in their place.

Code of attention, TransformerLens' or Hugging Face's, multiplies queries by keys, bends, masks,
takes the softmax, and multiplies by values. A `LazyScores` goes through these steps in place of the
n x n tensor and remembers them; only the last one computes, in fused kernels or blocks of rows. Any
step that it does not know is an error, so what comes out is what the model's own code says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: Rows of scores that exist at a time where no fused kernel knows the rule.
ROWS: Final = 128


class LeanError(Exception):
    """The model's attention does something that cannot be had without its n x n matrix."""


@dataclass(frozen=True)
class Rule:
    """Which keys a query sees.

    Attributes
    ----------
    causal : bool
    window : int or None
        A query sees itself and the ``window - 1`` keys nearest to it.
    """

    causal: bool
    window: int | None = None

    def hidden(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return where keys are hidden, for indices that broadcast against each other."""
        hidden = keys > queries if self.causal else (keys > queries) & (keys < queries)
        return hidden if self.window is None else hidden | ((queries - keys).abs() >= self.window)

    def keys(self, start: int, stop: int, n: int) -> tuple[int, int]:
        """Return a range that holds all keys that the queries start..stop-1 see."""
        width = n if self.window is None else self.window
        return max(0, start - width + 1), stop if self.causal else min(n, stop - 1 + width)


@dataclass(eq=False)
class LazyMask:
    """A mask that is known by its rule: what Hugging Face would fill an n x n tensor with.

    Attributes
    ----------
    sees : callable(prompt, head, query, key) -> Tensor of bool
        Elementwise, with broadcasting.
    n : int
    device : torch.device
    """

    sees: Callable[..., Tensor]
    n: int
    device: torch.device

    def __post_init__(self) -> None:
        self._held: set[Rule] = set()

    def check(self, rule: Rule) -> None:
        """Hold the mask against a rule, row by row on rows that would tell them apart.

        Raises
        ------
        LeanError
        """
        if rule in self._held:
            return
        width = rule.window or 1
        rows = {0, 1, 2, width - 1, width, width + 1, self.n // 3, self.n // 2, self.n - 2}
        rows |= set(range(self.n - 1, -1, -max(1, self.n // 8)))
        keys = torch.arange(self.n, device=self.device)
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        for row in sorted(r for r in rows if 0 <= r < self.n):
            query = torch.full((1,), row, device=self.device)
            seen = torch.as_tensor(self.sees(zero, zero, query, keys), device=self.device)
            if not torch.equal(seen.expand(self.n), ~rule.hidden(query, keys)):
                raise LeanError("its mask is neither causal nor a window as its configuration says")
        self._held.add(rule)


@dataclass(frozen=True, eq=False)
class LazyScores:
    """Scores, or the weights that their softmax gives, of one layer.

    Attributes
    ----------
    q, k : Tensor[batch, head, pos, d_head]
    rule : Rule
        What the layer's mask must turn out to be.
    scale : float
    cap : float or None
        Scores s become ``cap tanh(s / cap)``.
    steps : tuple of str
        What has been done, in order: "bend", "mask", "softmax".
    """

    q: Tensor
    k: Tensor
    rule: Rule
    scale: float = 1.0
    cap: float | None = None
    steps: tuple[str, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """``[batch, head, query_pos, key_pos]``."""
        return torch.Size((*self.q.shape[:3], self.k.shape[2]))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return 4

    @property
    def dtype(self) -> torch.dtype:
        """Of the queries."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """Where the queries are."""
        return self.q.device

    def to(self, *_: Any, **__: Any) -> LazyScores:
        """Return itself: kernels round to the dtype of the values, once, at the end."""
        return self

    def __mul__(self, factor: object) -> LazyScores:
        number = _number(factor)
        if self.steps == ("divided", "tanh") and number == self.cap:
            return replace(self, steps=("bend",))
        self._after()
        return replace(self, scale=self.scale * number)

    __rmul__ = __mul__

    def __truediv__(self, factor: object) -> LazyScores:
        # Division by a soft cap and by sqrt(d_head) look alike until tanh comes, or does not.
        self._after()
        return replace(self, cap=_number(factor), steps=("divided",))

    def tanh(self) -> LazyScores:
        """Bend the scores; a multiplication by what they were divided by must follow."""
        self._after("divided")
        return replace(self, steps=("divided", "tanh"))

    def __add__(self, mask: object) -> LazyScores:
        if not isinstance(mask, LazyMask):
            raise LeanError(f"a {type(mask).__name__} is added to its scores")
        return self.masked(mask)

    __radd__ = __add__

    def masked(self, mask: LazyMask | None) -> LazyScores:
        """Apply the layer's mask; None where there is nothing to hide."""
        made = self
        if self.steps == ("divided",) and self.cap is not None:
            made = replace(self, scale=self.scale / self.cap, cap=None, steps=())
        elif self.steps not in ((), ("bend",)):
            raise LeanError(f"its scores are masked after {' and '.join(self.steps)}")
        if mask is not None:
            mask.check(self.rule)
        elif self.rule != Rule(causal=False):
            raise LeanError("its scores are not masked, though its attention looks causal")
        return replace(made, steps=(*made.steps, "mask"))

    def softmax(self) -> LazyScores:
        """Turn scores into weights."""
        made = self if "mask" in self.steps else self.masked(None)
        if made.steps[-1] != "mask":
            raise LeanError(f"the softmax is taken after {' and '.join(self.steps)}")
        return replace(made, steps=(*made.steps, "softmax"))

    def __matmul__(self, values: Tensor) -> Tensor:
        """Return the weights times the values ``[batch, head, pos, d_head]``: this computes."""
        if "softmax" not in self.steps or values.ndim != 4:
            raise LeanError("its scores meet the values before the softmax")
        q, k, v = self.q, self.k, values.to(self.q.dtype)
        n = k.shape[2]
        if self.cap is None and (self.rule.window is None or self.rule.window >= n):
            out = _fused(q, k, v, causal=self.rule.causal, scale=self.scale)
        else:
            out = torch.empty_like(q[..., : v.shape[-1]])
            # A third of a short prompt at most, so that short prompts show the same steps.
            step = max(1, min(ROWS, n // 3))
            for start in range(0, n, step):
                self._rows(out, v, start, min(n, start + step))
        return out.to(values.dtype)

    def _rows(self, out: Tensor, v: Tensor, start: int, stop: int) -> None:
        n = self.k.shape[2]
        low, high = self.rule.keys(start, stop, n)
        q, k, v = self.q[:, :, start:stop], self.k[:, :, low:high], v[:, :, low:high]
        at = torch.arange(n, device=q.device)
        hidden = self.rule.hidden(at[start:stop, None], at[None, low:high])
        if self.cap is None:
            out[:, :, start:stop] = _fused(q, k, v, mask=~hidden, scale=self.scale)
            return
        scores = (q @ k.mT).mul_(self.scale / self.cap).tanh_().mul_(self.cap)
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        out[:, :, start:stop] = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

    def _after(self, *steps: str) -> None:
        if self.steps != steps:
            raise LeanError(f"its scores are scaled or bent after {' and '.join(self.steps)}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take a step that was written as a function of torch."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        first = args[0] if args else None
        if isinstance(first, LazyScores):
            if name in ("matmul", "__matmul__", "bmm"):
                return first @ args[1]
            if name == "softmax" and options.get("dim", args[1] if len(args) > 1 else None) in (
                -1,
                3,
            ):
                return first.softmax()
            if name == "tanh":
                return first.tanh()
            if name == "dropout" and not options.get("training", True):
                return first
        raise LeanError(f"{name} of its scores")


def _number(factor: object) -> float:
    if isinstance(factor, Tensor) and factor.numel() == 1:
        return float(factor)
    if not isinstance(factor, int | float):
        raise LeanError(f"its scores are scaled by a {type(factor).__name__}")
    return float(factor)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale
    )


class Lazily(TorchFunctionMode):
    """While it is active, queries times keys give `LazyScores`.

    Parameters
    ----------
    rule : Rule
        Of the layer that runs.
    n : int
        Positions of the prompts.
    """

    def __init__(self, rule: Rule, n: int) -> None:
        super().__init__()
        self.rule = rule
        self.n = n

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Intercept products of queries and keys, and whatever is done with their result."""
        given = dict(kwargs or {})
        if any(isinstance(a, LazyScores) for a in args):
            return LazyScores.__torch_function__(func, types, args, given)
        if getattr(func, "__name__", "") in ("matmul", "__matmul__") and not given:
            q, k = args
            square = (
                isinstance(q, Tensor)
                and isinstance(k, Tensor)
                and q.ndim == k.ndim == 4
                and q.shape[:2] == k.shape[:2]
                and q.shape[2] == k.shape[3] == self.n
            )
            if square:
                return LazyScores(q, k.transpose(2, 3), self.rule)
        return func(*args, **given)
