"""Which keys a query can see, as a rule: never as an n x n tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Mask:
    """The rule that says which keys each query can see.

    Key j is visible to query i where ``j <= i`` (if causal) and ``|i - j| < window`` (if there is
    a window), or where ``j < prefix``; never where i or j is at or beyond the prompt's length.

    Attributes
    ----------
    n : int
        Number of positions.
    causal : bool
    window : int or None
        A query sees itself and the ``window - 1`` positions nearest to it.
    prefix : Tensor or None, [prompt], int64
        The first keys, which every query sees (prefix language models).
    lengths : Tensor or None, [prompt], int64
        Real positions of each prompt; None if all n are real.
    """

    n: int
    causal: bool
    window: int | None = None
    prefix: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def ragged(self) -> bool:
        """Whether the rule differs between prompts."""
        return self.prefix is not None or self.lengths is not None

    @property
    def one_sided(self) -> bool:
        """Whether no query sees a later key."""
        return self.causal and self.prefix is None

    def _limits(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Positions [pos], lengths [prompt or 1, 1], prefix [prompt or 1, 1]."""
        pos = torch.arange(self.n, device=device)
        full = torch.full((1, 1), self.n, device=device)
        length = full if self.lengths is None else self.lengths[:, None]
        none = torch.zeros_like(full)
        prefix = none if self.prefix is None else self.prefix[:, None].minimum(length)
        return pos, length, prefix

    def visible(self, device: torch.device) -> Tensor:
        """Return the number of keys each query sees, [prompt or 1, query_pos], int64."""
        i, length, prefix = self._limits(device)
        width = self.n if self.window is None else self.window
        low = (i - width + 1).clamp_min(0)
        high = (i + 1 if self.causal else (i + width).clamp_max(self.n)).minimum(length)
        # The near keys [low, high) and the prefix [0, prefix) may overlap.
        count = torch.where(prefix > low, high.maximum(prefix), high - low + prefix)
        return torch.where(i < length, count, 0)

    def viewers(self, device: torch.device) -> Tensor:
        """Return the number of queries that see each key, [prompt or 1, key_pos], int64."""
        j, length, prefix = self._limits(device)
        width = self.n if self.window is None else self.window
        low = j if self.causal else (j - width + 1).clamp_min(0)
        high = (j + width).minimum(length)
        count = torch.where(j < prefix, length, high - low)
        return torch.where(j < length, count, 0)

    def offsets(self, device: torch.device) -> Tensor:
        """Return the distances query - key that can occur, [offset], int64, rising."""
        return torch.arange(0 if self.one_sided else 1 - self.n, self.n, device=device)

    def offset_counts(self, device: torch.device) -> Tensor:
        """Return the number of visible cells at each distance, [prompt or 1, offset], int64."""
        o = self.offsets(device)
        _, length, prefix = self._limits(device)
        near = o.abs() < (self.n if self.window is None else self.window)
        if self.causal:
            near &= o >= 0
        first = (-o).clamp_min(0)  # the first key that has a query at this distance
        beyond = (length - o.clamp_min(0)).maximum(first)
        last = torch.where(near, beyond, beyond.minimum(prefix))
        return (last - first).clamp_min(0)

    def columns(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range of keys that holds all those that queries start..stop-1 can see."""
        if self.prefix is not None:
            return 0, self.n
        width = self.n if self.window is None else self.window
        low = max(0, start - width + 1)
        return low, stop if self.causal else min(self.n, stop - 1 + width)

    def hidden(
        self, rows: tuple[int, int], cols: tuple[int, int], prompts: slice, device: torch.device
    ) -> Tensor | None:
        """Return where a block is masked, [prompt or 1, 1, rows, cols]; None if nowhere."""
        i = torch.arange(*rows, device=device)[:, None]
        j = torch.arange(*cols, device=device)[None, :]
        hidden: Tensor | None = None
        if self.causal and cols[1] - 1 > rows[0]:
            hidden = j > i
        if self.window is not None:
            far = (i - j).abs() >= self.window
            hidden = far if hidden is None else hidden | far
        if hidden is not None:
            hidden = hidden[None, None]
            if self.prefix is not None:
                hidden = hidden & (j >= self.prefix[prompts, None, None, None])
        if self.lengths is not None:
            length = self.lengths[prompts, None, None, None]
            beyond = (j >= length) | (i >= length)
            hidden = beyond if hidden is None else hidden | beyond
        return hidden

    def sees(self, i: Tensor, j: Tensor, prompts: Tensor) -> Tensor:
        """Return whether query i sees key j, elementwise; `prompts` broadcasts against both."""
        seen = torch.ones_like(i * j, dtype=torch.bool)
        if self.causal:
            seen = j <= i
        if self.window is not None:
            seen = seen & ((i - j).abs() < self.window)
        if self.prefix is not None:
            seen = seen | (j < self.prefix[prompts])
        if self.lengths is not None:
            length = self.lengths[prompts]
            seen = seen & (i < length) & (j < length)
        return seen

    def part(self, prompts: Tensor) -> Mask:
        """Return the rule of chosen prompts, `prompts` [prompt] of indices."""
        return Mask(
            self.n,
            self.causal,
            self.window,
            None if self.prefix is None else self.prefix[prompts],
            None if self.lengths is None else self.lengths[prompts],
        )
