"""Dense float64 attention, cell by cell as it is defined: what everything is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnlens.attention import Attention


@dataclass
class Case:
    """Random queries and keys under a mask, and the dense matrices they define."""

    prompts: int = 2
    heads: int = 4
    kv_heads: int = 2
    n: int = 9
    d: int = 5
    spread: float = 1.0
    scale: float = 0.4
    dtype: torch.dtype = torch.float64
    seed: int = 0
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    prefix: list[int] | None = None
    lengths: list[int] | None = None
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        shape = (self.prompts, self.heads, self.n, self.d)
        self.q = (self.spread * torch.randn(shape, generator=g, dtype=torch.float64)).to(self.dtype)
        shape = (self.prompts, self.kv_heads, self.n, self.d)
        self.k = (self.spread * torch.randn(shape, generator=g, dtype=torch.float64)).to(self.dtype)

    @property
    def slopes(self) -> Tensor | None:
        return 0.5 ** torch.arange(1.0, self.heads + 1) if self.alibi else None

    @property
    def rules(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "alibi": self.slopes,
            "prefix": self.prefix,
            "lengths": self.lengths,
        }

    @property
    def attention(self) -> Attention:
        return Attention.from_qk(self.q, self.k, **self.rules)

    @property
    def visible(self) -> Tensor:
        """[prompt, query, key]."""
        i, j = torch.arange(self.n)[:, None], torch.arange(self.n)
        seen = torch.ones(self.prompts, self.n, self.n, dtype=torch.bool)
        if self.causal:
            seen = seen & (j <= i)
        if self.window is not None:
            seen = seen & ((i - j).abs() < self.window)
        if self.prefix is not None:
            seen = seen | (j < torch.tensor(self.prefix)[:, None, None])
        if self.lengths is not None:
            real = torch.tensor(self.lengths)[:, None, None]
            seen = seen & (i < real) & (j < real)
        return seen

    @property
    def scores(self) -> Tensor:
        """[prompt, head, query, key] float64, minus infinity where masked."""
        k = self.k.double().repeat_interleave(self.heads // self.kv_heads, 1)
        s = self.q.double() @ k.mT * self.scale
        if self.soft_cap is not None:
            s = self.soft_cap * torch.tanh(s / self.soft_cap)
        if self.slopes is not None:
            i, j = torch.arange(self.n)[:, None], torch.arange(self.n)
            s = s - self.slopes.double()[:, None, None] * (i - j).abs()
        return s.masked_fill(~self.visible[:, None], -math.inf)

    @property
    def pattern(self) -> Tensor:
        return self.scores.softmax(-1).nan_to_num(0.0)

    @property
    def tolerance(self) -> float:
        """1e-10 in float64; a few rounding errors of the largest score in float32."""
        if self.dtype == torch.float64:
            return 1e-10
        finite = self.scores[self.scores.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        return 1e-6 * (3 + largest)


def entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)
