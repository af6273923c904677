"""Rows of tokens to train on: text, and random stretches that repeat."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: Tokens of the vocabulary.
VOCABULARY: Final = 512

#: Tokens that the model can read at once.
CONTEXT: Final = 256

#: The token before every row.
BOS_ID: Final = 0

_IGNORED: Final = -100  # by the loss of transformers


def with_bos(rows: Tensor) -> Tensor:
    """Put BOS before each row of [row, pos] token ids."""
    return torch.cat([torch.full((len(rows), 1), BOS_ID), rows], dim=1)


def text_rows(
    ids: Tensor, n_rows: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Cut rows of BOS and text from random places.

    Parameters
    ----------
    ids : Tensor [pos], int64
        The whole text.
    n_rows, length : int
    generator : torch.Generator

    Returns
    -------
    tokens, labels : Tensor [row, pos], int64
    """
    starts = torch.randint(0, len(ids) - length + 2, (n_rows, 1), generator=generator)
    tokens = with_bos(ids[starts + torch.arange(length - 1)])
    return tokens, tokens


def repeated_rows(
    n_rows: int, length: int, generator: torch.Generator, periods: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Draw rows of BOS and a random stretch that repeats to the end.

    Parameters
    ----------
    n_rows, length : int
    generator : torch.Generator
    periods : tuple of int
        Shortest and longest stretch; all between are equally likely.

    Returns
    -------
    tokens : Tensor [row, pos], int64
    labels : Tensor [row, pos], int64
        The same, with -100 (ignored by the loss) where nothing could be known: the first round.
    """
    shortest, longest = periods
    tokens = torch.full((n_rows, length), BOS_ID)
    labels = torch.full((n_rows, length), _IGNORED)
    for row in range(n_rows):
        period = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        stretch = torch.randint(BOS_ID + 1, VOCABULARY, (period,), generator=generator)
        tokens[row, 1:] = stretch.repeat(length // period + 1)[: length - 1]
        labels[row, 1 + period :] = tokens[row, 1 + period :]
    return tokens, labels
