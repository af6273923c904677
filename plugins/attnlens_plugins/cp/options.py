"""What may be asked of ``cp``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

import attnlens

#: Largest rank that ``rank="auto"`` tries.
MAX_RANK = 12

Tensor = Literal["result", "pattern", "second_moment", "qk", "ov", "z"]

_RANGE = re.compile(r"(\d+)\s*\.\.\s*(\d+)")


class CPOptions(attnlens.Options):
    """Options of ``cp``."""

    rank: int | str = Field(
        "auto",
        description="Number of components: a number, a range to scan such as 1..12, a list such "
        f'as 2,4,8, or "auto" (1 to {MAX_RANK}, at most the number of heads; chosen by '
        "split-half over prompts).",
    )
    tensor: Tensor = Field(
        "result",
        description="What is decomposed: result (what each head writes, [head, token, d_model]), "
        "pattern (mean attention, [head, query_pos, key_pos]), second_moment (of result, [head, "
        "d_model, d_model]), qk (W_Q W_K^T) or ov (W_V W_O) of the weights alone, or z "
        "(not comparable across heads: its basis is arbitrary).",
    )
    nonnegative: bool | Literal["auto"] = Field(
        "auto", description="Hold all factors non-negative; auto: for patterns only."
    )
    n_restarts: int = Field(10, ge=1, le=200, description="Starts of each fit; the best is kept.")
    layers: Literal["stacked", "each", "joint"] = Field(
        "stacked",
        description="stacked: the heads of all layers are the entries of one mode and share token "
        "and feature factors; each: every layer alone; joint: a mode of layers and a mode of head "
        "numbers (which ties head 3 of one layer to head 3 of the next).",
    )
    tokens: Literal["all", "pooled"] = Field(
        "all",
        description="all: every token is an entry; pooled: the mean over each prompt is one "
        "(result and z only).",
    )
    max_tokens: int = Field(
        2048, ge=8, description="Decompose at most so many tokens, from prompts chosen by the seed."
    )
    max_positions: int = Field(
        256, ge=4, description="Patterns of longer prompts are cut to their first positions."
    )
    exclude_bos: bool = Field(
        True,
        description="Leave out the first position: attention that rests on it (a sink) would "
        "decide everything. Rows of patterns are renormalised without it.",
    )
    scale: Literal["auto", "heads", "none"] = Field(
        "auto",
        description="heads: bring every head's slice to norm 1 first, so that each head counts the "
        "same; none: as they are, so that the largest decide; auto: heads, but none for patterns.",
    )
    center: bool = Field(
        False,
        description="Subtract from each head's output its mean over the tokens, so that components "
        "speak of what differs between tokens (result and z only).",
    )
    clusters: int | Literal["auto"] = Field(
        "auto",
        description="Number of groups of heads; auto: where the mean silhouette is largest. None "
        "is a cluster if that is under 0.5 or no more than in the twins, or if the components do "
        "not come back in the other halves.",
    )
    n_splits: int = Field(
        5,
        ge=1,
        le=50,
        description="Random halvings of the prompts; the components of a stable rank come back in "
        "four of five.",
    )
    types: bool = Field(
        True,
        description="Score heads for known types (previous-token, sink, duplicate-token, "
        "induction); false where a store has no attention to tell them by.",
    )
    vocabulary: int = Field(
        10, ge=1, le=100, description="Tokens named at either end of each feature direction."
    )

    @field_validator("rank", mode="before")
    @classmethod
    def _read_rank(cls, value: Any) -> int | str:
        if isinstance(value, bool):
            raise ValueError("a rank is a whole number")
        if isinstance(value, Iterable) and not isinstance(value, str):
            value = ",".join(str(int(v)) for v in value)
        if isinstance(value, str):
            text = value.strip().lower()
            if text == "auto" or _ranks(text):
                return text
            if text.isdigit() and int(text) > 0:
                return int(text)
            raise ValueError(
                'write a number, a range such as 1..12, a list such as 2,4,8, or "auto"'
            )
        number = int(value)
        if number != value or number < 1:
            raise ValueError(f"a rank is a whole number of at least 1, not {value}")
        return number

    @field_validator("clusters")
    @classmethod
    def _read_clusters(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError("at least 2 clusters are needed")
        return value

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> CPOptions:
        if self.nonnegative is True and self.tensor != "pattern":
            raise ValueError(
                f"nonnegative=true is for tensor=pattern: {self.tensor} has entries of both signs"
            )
        if self.center and self.tensor not in ("result", "z"):
            raise ValueError(f"center=true is for result and z, not for {self.tensor}")
        if self.tokens == "pooled" and self.tensor not in ("result", "z"):
            raise ValueError(f"tokens=pooled is for result and z, not for {self.tensor}")
        return self

    def ranks(self, n_heads: int) -> list[int]:
        """Return the ranks to fit, ascending."""
        if isinstance(self.rank, int):
            return [self.rank]
        if self.rank == "auto":
            return list(range(1, min(MAX_RANK, max(n_heads, 1)) + 1))
        return _ranks(self.rank)

    @property
    def scaled(self) -> bool:
        """Whether every head is brought to norm 1."""
        if self.scale == "auto":
            return self.tensor != "pattern"
        return self.scale == "heads"

    @property
    def constrained(self) -> bool:
        """Whether factors are held non-negative."""
        if self.nonnegative == "auto":
            return self.tensor == "pattern"
        return bool(self.nonnegative)


def _ranks(text: str) -> list[int]:
    """Read ``1..12`` or ``2,4,8``; nothing if it is neither."""
    found = _RANGE.fullmatch(text)
    if found:
        low, high = int(found[1]), int(found[2])
        return list(range(low, high + 1)) if 1 <= low <= high <= 1000 else []
    parts = [p.strip() for p in text.split(",")]
    if len(parts) < 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
        return []
    return sorted({int(p) for p in parts})
