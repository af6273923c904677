"""What may be asked of ``tucker``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

import attnlens
from attnlens_plugins.cp.options import Tensor

#: Largest core along each mode that ``ranks="auto"`` gives: more cannot be read.
MOST = 8


class TuckerOptions(attnlens.Options):
    """Options of ``tucker``."""

    ranks: int | float | str = Field(
        "auto",
        description="Size of the core: three numbers such as 4,5,7, one for all modes, a share of "
        'the energy such as 0.95, "all", or "auto" (what holds the share `energy` of each mode, at '
        f"most {MOST}).",
    )
    energy: float = Field(
        0.9, gt=0, lt=1, description="Share of the energy for which each mode's directions count."
    )
    tensor: Tensor = Field(
        "result", description="What is decomposed, as for cp: `attnlens plugins show cp`."
    )
    max_tokens: int = Field(
        1024, ge=8, description="Use at most so many tokens, from prompts chosen by the seed."
    )
    max_positions: int = Field(
        256, ge=4, description="Patterns of longer prompts are cut to their first positions."
    )
    exclude_bos: bool = Field(True, description="Leave out the first position of every prompt.")
    scale: Literal["auto", "heads", "none"] = Field(
        "auto", description="Bring every head to norm 1 first; auto: all tensors but patterns."
    )
    center: bool = Field(
        False, description="Subtract each head's mean over the tokens (result and z only)."
    )
    interactions: int = Field(12, ge=1, le=200, description="Interactions to list and to tell.")
    vocabulary: int = Field(
        6, ge=1, le=100, description="Tokens named at either end of each feature direction."
    )

    @field_validator("ranks", mode="before")
    @classmethod
    def _read_ranks(cls, value: Any) -> int | float | str:
        if isinstance(value, bool):
            raise ValueError("ranks are numbers")
        if isinstance(value, Iterable) and not isinstance(value, str):
            value = ",".join(str(v) for v in value)
        if isinstance(value, str):
            text = value.strip().lower()
            if text in ("auto", "all"):
                return text
            parts = [_number(p) for p in text.split(",")]
            if len(parts) == 1:
                return parts[0]
            if len(parts) != 3:
                raise ValueError(f"3 ranks needed, {len(parts)} given")
            return ",".join(str(p) for p in parts)
        return _number(value)

    @model_validator(mode="after")
    def _centred(self) -> TuckerOptions:
        if self.center and self.tensor not in ("result", "z"):
            raise ValueError(f"center=true is for tensor=result and z; {self.tensor} has no tokens")
        return self

    def wanted(self) -> Any:
        """Return the ranks as the engine takes them; None for ``"auto"``."""
        if self.ranks == "auto":
            return None
        if isinstance(self.ranks, str) and "," in self.ranks:
            return [_number(p) for p in self.ranks.split(",")]
        return self.ranks


def _number(value: Any) -> int | float:
    """Read a size of at least 1 or a share of the energy between 0 and 1."""
    with contextlib.suppress(ValueError):
        whole = int(str(value))
        if whole >= 1:
            return whole
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if 0 < share < 1:
        return share
    raise ValueError(f"{value!r} is neither a size of at least 1 nor a share between 0 and 1")
