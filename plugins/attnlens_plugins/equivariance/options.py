"""Options of ``equivariance``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

import attnlens


class EquivarianceOptions(attnlens.Options):
    """Options of ``equivariance``."""

    prompts: int = Field(16, ge=1, description="Check on at most so many prompts of one length.")
    length: int = Field(64, ge=2, description="Cut the prompts to at most so many tokens.")
    shuffles: int = Field(2, ge=1, description="Random orders of the tokens.")
    distances: bool = Field(True, description="Compare all heads with each other.")
    pairs: Path | None = Field(
        None, description="A text file of pairs with one meaning: one a line, separated by a tab."
    )
    other: str | None = Field(
        None, description="A second model (name or folder) that reads the second text of each pair."
    )
    pool: Literal["mean", "last"] = Field(
        "mean", description="A text's representation: the mean over its tokens, or the last token."
    )
    pair_shuffles: int = Field(
        200, ge=20, description="Random pairings that tell what similarity is by chance."
    )

    @field_validator("pairs")
    @classmethod
    def _is_there(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError(f"there is no file {str(value)!r}")
        return value

    @model_validator(mode="after")
    def _together(self) -> EquivarianceOptions:
        if self.other is not None and self.pairs is None:
            raise ValueError("other needs pairs: the texts that both models read")
        if self.pairs is not None:
            from attnlens_plugins.equivariance.pairs import read_pairs

            try:
                read_pairs(self.pairs, single=self.other is not None)
            except attnlens.errors.UsageError as error:
                raise ValueError(f"{error.message} {error.hint or ''}".strip()) from error
        return self
