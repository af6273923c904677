"""Text to token ids: the one policy for special tokens, and the check of every id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from attnlens.corpora.prompts import TokenIds
from attnlens.errors import CorpusError

if TYPE_CHECKING:
    from attnlens.models import ModelFacts


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    @property
    def bos_token_id(self) -> int | None:
        """Id of the BOS token."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of all special tokens."""

    def __call__(self, text: str, /, **options: Any) -> Any:
        """Encode `text`; the ids are under ``input_ids``."""

    def __len__(self) -> int: ...

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens beside the vocabulary proper, special ones among them."""

    def get_vocab(self) -> dict[str, int]:
        """All tokens as the vocabulary spells them."""


class Encoder:
    """Encode texts for one model, with special tokens by one policy.

    Causal models get BOS before each prompt, once, if the tokenizer has one. Other models get
    what their tokenizer puts around a text, such as ``[CLS]`` and ``[SEP]``.

    Parameters
    ----------
    tokenizer : Tokenizer or None
    facts : ModelFacts
    bos : bool or None
        False leaves special tokens out; True insists on them.

    Attributes
    ----------
    prefix, suffix : tuple of int
        Ids put before and after each prompt.
    notes : list of str

    Raises
    ------
    CorpusError
        If there is no tokenizer, or `bos` is True and there is no such token.
    """

    def __init__(self, tokenizer: Tokenizer | None, facts: ModelFacts, bos: bool | None) -> None:
        if tokenizer is None:
            raise CorpusError(
                f"The model {facts.name!r} has no tokenizer, so text cannot be encoded.",
                hint="Give token ids instead: --tokens FILE.npy, or an integer array in Python.",
            )
        self._tokenizer = tokenizer
        self._facts = facts
        self.notes: list[str] = []
        # Some tokenizers add BOS even when asked not to; it is taken off again before the policy.
        bos_id = tokenizer.bos_token_id
        self._forced = bos_id is not None and self._encode("a")[:1] == [bos_id]
        self.prefix, self.suffix = self._around(bos)

    def _around(self, bos: bool | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Find the special tokens before and after a prompt."""
        if bos is False:
            return (), ()
        prefix: tuple[int, ...] = ()
        suffix: tuple[int, ...] = ()
        if self._facts.causal:
            bos_id = self._tokenizer.bos_token_id
            prefix = () if bos_id is None else (bos_id,)
        else:
            with_specials = list(self._tokenizer("a", verbose=False)["input_ids"])
            special = set(self._tokenizer.all_special_ids)
            body = [i for i, token in enumerate(with_specials) if token not in special]
            if body:
                prefix = tuple(with_specials[: body[0]])
                suffix = tuple(with_specials[body[-1] + 1 :])
        outside = [i for i in prefix + suffix if not 0 <= i < self._facts.d_vocab]
        if bos and (outside or not prefix):
            raise CorpusError(
                f"BOS was asked for, but {self._facts.name!r} has no such token.",
                hint="Leave the choice to the tokenizer.",
            )
        if outside:
            self.notes.append(
                f"The tokenizer's special token {outside[0]} is outside the model's vocabulary "
                f"of {self._facts.d_vocab}; prompts have no BOS."
            )
            return (), ()
        return prefix, suffix

    @property
    def bos(self) -> str:
        """``"prepended"`` or ``"absent"``."""
        return "prepended" if self.prefix else "absent"

    def room(self, length: int) -> int:
        """Return how many tokens of text fit into a prompt of `length` tokens."""
        room = length - len(self.prefix) - len(self.suffix)
        if room < 1:
            raise CorpusError(
                f"A prompt of {length} token{'s' * (length != 1)} has no room for text beside "
                "its special tokens.",
                hint=f"Take a length of {length - room + 1} or more, or leave BOS out.",
            )
        return room

    def ids(self, text: str, where: str) -> list[int]:
        """Encode `text` without special tokens; `where` names it in errors."""
        try:
            ids = self._encode(text)
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"{where} holds {text[error.start]!r} at character {error.start}, which is half "
                "of a character and not valid Unicode.",
                hint="Convert the text to UTF-8.",
            ) from error
        ids = ids[1:] if self._forced else ids
        for token in ids:
            if not 0 <= token < self._facts.d_vocab:
                raise CorpusError(
                    f"{where} holds token {token}, which is outside the model's vocabulary of "
                    f"{self._facts.d_vocab}: this tokenizer is not the model's.",
                    hint="Use the model's own tokenizer, or give token ids with --tokens.",
                )
        return ids

    def _encode(self, text: str) -> list[int]:
        text.encode()  # tokenizers report lone surrogates as a bare TypeError
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def wrap(self, ids: list[int], room: int) -> tuple[TokenIds, bool]:
        """Put special tokens around at most `room` of `ids`.

        Special tokens that the text spells out itself at its ends are not doubled.

        Returns
        -------
        tokens : ndarray [pos], int32
        cut : bool
            Whether some of `ids` did not fit.
        """
        if self.prefix and tuple(ids[: len(self.prefix)]) == self.prefix:
            ids = ids[len(self.prefix) :]
        if self.suffix and tuple(ids[-len(self.suffix) :]) == self.suffix:
            ids = ids[: -len(self.suffix)]
        return np.array([*self.prefix, *ids[:room], *self.suffix], np.int32), len(ids) > room
