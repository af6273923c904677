"""What was read: :class:`Prompts`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Prompts:
    """Token sequences in a frozen order.

    Attributes
    ----------
    corpus : str
        Name of the corpus.
    tokens : tuple of ndarray [pos], int32
        One read-only array per prompt, never empty, never padded.
    bos : {"prepended", "absent", "as given"}
        What was done about special tokens. For models that are not causal, ``"prepended"`` stands
        for all that the tokenizer puts around a text.
    notes : tuple of str
        What was skipped, cut or short, for people.
    seed : int
    period : int or None
        Tokens in the stretch that ``repeated-random`` repeats.
    asked : mapping
        The spec as plain data.
    """

    corpus: str
    tokens: tuple[TokenIds, ...]
    bos: str
    notes: tuple[str, ...] = ()
    seed: int = 0
    period: int | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for ids in self.tokens:
            ids.flags.writeable = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in each prompt."""
        return tuple(len(ids) for ids in self.tokens)

    @cached_property
    def hash(self) -> str:
        """sha256 over the number of prompts, their lengths and their tokens, in order."""
        digest = hashlib.sha256(np.asarray([len(self), *self.lengths], "<i8").tobytes())
        for ids in self.tokens:
            digest.update(ids.astype("<i4", copy=False).tobytes())
        return digest.hexdigest()

    @property
    def summary(self) -> str:
        """One line for people: how many prompts, how long, what stands before them."""
        shortest, longest = min(self.lengths), max(self.lengths)
        span = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        prompts = "1 prompt" if len(self) == 1 else f"{len(self)} prompts"
        return (
            f"{prompts} of {span} token{'' if longest == 1 else 's'} from {self.corpus!r}, "
            f"BOS {self.bos}"
        )

    def by_length(self) -> list[tuple[int, tuple[int, ...]]]:
        """Group the prompts, so that batches of equal length need no padding.

        Returns
        -------
        list of (int, tuple of int)
            Length and the ids of all prompts that have it: lengths ascending, ids ascending.
        """
        groups: dict[int, list[int]] = {}
        for prompt, length in enumerate(self.lengths):
            groups.setdefault(length, []).append(prompt)
        return [(length, tuple(groups[length])) for length in sorted(groups)]

    def to_json(self) -> dict[str, Any]:
        """Return what was asked for and done, without the tokens, as plain data."""
        return {
            **self.asked,
            "name": self.corpus,
            "seed": self.seed,
            "bos_policy": self.bos,
            "period": self.period,
            "prompts": len(self),
            "hash": self.hash,
            "notes": list(self.notes),
        }
