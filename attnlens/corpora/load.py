"""From a spec to prompts: :func:`load_prompts`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlens.corpora.data import read_rows
from attnlens.corpora.encode import Encoder, Tokenizer
from attnlens.corpora.files import read_lines
from attnlens.corpora.prompts import Prompts, TokenIds
from attnlens.corpora.repeated import repeated_random
from attnlens.corpora.spec import DEFAULT_LENGTH, DEFAULT_SAMPLES, CorpusSpec, TokenArray
from attnlens.corpora.tokens import check_ids, read_tokens
from attnlens.demo import TEXT_FILE
from attnlens.errors import CorpusError

if TYPE_CHECKING:
    from attnlens.models import ModelFacts

# Running text is read until it has so many characters per token wanted: more than tokens have
# on average, so that reading on is seldom needed.
_CHARACTERS_PER_TOKEN = 16


def load_prompts(spec: CorpusSpec, *, tokenizer: Tokenizer | None, facts: ModelFacts) -> Prompts:
    """Read the prompts that a spec names, as token ids of one model.

    Parameters
    ----------
    spec : CorpusSpec
    tokenizer : tokenizer of transformers, or None
        None will do for ``tokens`` and ``repeated-random``.
    facts : ModelFacts
        Of these, ``name``, ``n_ctx``, ``d_vocab``, ``causal`` and ``config`` are read.

    Returns
    -------
    Prompts
        At least one prompt; each has at least one token and at most ``n_ctx``; every id lies in
        the model's vocabulary. The same spec gives the same prompts.

    Raises
    ------
    CorpusError
        If the source cannot be read, or holds nothing that can be used.
    """
    return _Loader(spec, tokenizer, facts).load()


class _Loader:
    """One reading of one spec."""

    def __init__(self, spec: CorpusSpec, tokenizer: Tokenizer | None, facts: ModelFacts) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.facts = facts
        self.notes: list[str] = []
        asked = spec.length or spec.chunk
        if asked is not None and asked > facts.n_ctx:
            self.notes.append(
                f"{asked} tokens are more than the model's context of {facts.n_ctx}; prompts "
                f"have at most {facts.n_ctx}."
            )
        #: No prompt is longer.
        self.limit = min(asked or facts.n_ctx, facts.n_ctx)
        #: Of prompts that have no length of their own.
        self.length = self.limit if asked else min(DEFAULT_LENGTH, facts.n_ctx)

    def load(self) -> Prompts:
        spec = self.spec
        period: int | None = None
        if spec.name == "repeated-random":
            tokens, bos, period = repeated_random(
                spec, self.tokenizer, self.facts, length=self.length
            )
        elif spec.name == "tokens":
            tokens, bos = self.given_tokens(), "as given"
        else:
            encoder = Encoder(self.tokenizer, self.facts, spec.bos)
            self.notes += encoder.notes
            bos = encoder.bos
            if spec.name == "default":
                tokens = self.bundled_text(encoder)
            elif spec.chunk is not None:
                tokens = self.running_text(encoder)
            else:
                tokens = self.single_texts(encoder)
        if not tokens:
            raise CorpusError(
                " ".join([f"The corpus {spec.source or spec.name!r} has no prompts.", *self.notes]),
                hint="Give at least one text that is not empty.",
            )
        if spec.samples is not None and len(tokens) < spec.samples:
            self.notes.append(f"{spec.samples} prompts were asked for; there are {len(tokens)}.")
        return Prompts(
            corpus=spec.name,
            tokens=tuple(tokens),
            bos=bos,
            notes=tuple(self.notes),
            seed=spec.seed,
            period=period,
            asked=spec.to_json(),
        )

    def given_tokens(self) -> list[TokenIds]:
        arrays = read_tokens(self.spec)
        if self.spec.bos is not None:
            self.notes.append("Token ids are used as given: the choice of BOS has no effect.")
        if self.spec.chunk is not None:
            arrays = tuple(p for a in arrays for p in self.pieces(a, self.limit))
        tokens = []
        cut = 0
        for prompt, ids in enumerate(arrays[: self.spec.samples]):
            if len(ids) == 0:
                raise CorpusError(f"Prompt {prompt} of the token ids is empty.")
            check_ids(ids, prompt, self.facts)
            cut += len(ids) > self.limit
            tokens.append(np.array(ids[: self.limit], np.int32))
        self.note_cut(cut, len(tokens))
        return tokens

    def single_texts(self, encoder: Encoder) -> list[TokenIds]:
        """Make one prompt of each text, skipping empty ones."""
        room = encoder.room(self.limit)
        wanted = self.spec.samples
        if wanted is None and self.spec.name == "dataset":
            wanted = DEFAULT_SAMPLES
        tokens: list[TokenIds] = []
        empty = cut = 0
        with closing(self.texts()) as texts:
            for where, text in texts:
                if len(tokens) == wanted:
                    if self.spec.samples is None:
                        self.notes.append(f"Only the first {wanted} rows were taken.")
                    break
                # A text of blanks is a prompt if somebody took the trouble to type it.
                blank = not text.strip() and self.spec.name != "text"
                ids = [] if blank else encoder.ids(text, where)
                if ids:
                    ready, was_cut = encoder.wrap(ids, room)
                    tokens.append(ready)
                    cut += was_cut
                elif self.spec.name == "text":
                    raise CorpusError(f"{where} is empty: {text!r}.", hint="Leave it out.")
                else:
                    empty += 1
        if empty:
            what = "row" if self.spec.name == "dataset" else "line"
            self.notes.append(f"{_many(empty, f'empty {what}')} skipped.")
        self.note_cut(cut, len(tokens))
        return tokens

    def running_text(self, encoder: Encoder) -> list[TokenIds]:
        """Join all texts and cut them into prompts of equal length."""
        room = encoder.room(self.limit)
        wanted = self.spec.samples
        if wanted is None and self.spec.name == "dataset":
            wanted = DEFAULT_SAMPLES
        ids, complete = self.read_running(encoder, None if wanted is None else wanted * room, room)
        pieces = self.pieces(np.array(ids, np.int64), room)
        rest = len(ids) % room
        if complete and rest and len(ids) > room and (wanted is None or len(pieces) < wanted):
            self.notes.append(f"The last {_many(rest, 'token')} fill no prompt and were left out.")
        return [encoder.wrap(piece.tolist(), room)[0] for piece in pieces[:wanted]]

    def read_running(
        self, encoder: Encoder, wanted: int | None, spare: int
    ) -> tuple[list[int], bool]:
        """Encode the texts joined by newlines, or a beginning that has the tokens wanted.

        The beginning has `spare` tokens more, because more text may change the last tokens.

        Returns
        -------
        ids : list of int
        complete : bool
            Whether all texts were read.
        """
        where = f"The text of {self.spec.source!r}" if self.spec.source else "The text"
        read: list[str] = []
        size = 0
        goal = (wanted or 0) * _CHARACTERS_PER_TOKEN
        with closing(self.texts()) as texts:
            for _, text in texts:
                read.append(text)
                size += len(text) + 1
                if wanted is not None and size >= goal:
                    ids = encoder.ids("\n".join(read), where)
                    if len(ids) >= wanted + spare:
                        return ids, False
                    goal = 2 * size
        joined = "\n".join(read)
        return encoder.ids(joined, where) if joined.strip() else [], True

    def bundled_text(self, encoder: Encoder) -> list[TokenIds]:
        """Choose pieces of the bundled text under the seed."""
        room = encoder.room(self.length)
        ids = encoder.ids(TEXT_FILE.read_text(encoding="utf-8"), "The bundled text")
        pieces = self.pieces(np.array(ids, np.int64), room)
        order = np.random.default_rng(self.spec.seed).permutation(len(pieces))
        chosen = order[: self.spec.samples or DEFAULT_SAMPLES]
        return [encoder.wrap(pieces[i].tolist(), room)[0] for i in chosen]

    def texts(self) -> Generator[tuple[str, str]]:
        """Yield each text with its place, as errors name it; what is missing as empty."""
        source = self.spec.source or ""
        if self.spec.name == "text":
            for number, text in enumerate(self.spec.texts, 1):
                yield f"Text {number}", text
        elif self.spec.name == "file":
            for number, line in enumerate(read_lines(Path(source)), 1):
                yield f"Line {number} of {source!r}", line
        else:
            with closing(read_rows(source)) as rows:
                for number, row in enumerate(rows):
                    yield f"Row {number} of {source!r}", row or ""

    @staticmethod
    def pieces(ids: TokenArray, room: int) -> list[TokenArray]:
        """Cut into pieces of `room` tokens; a shorter end counts only where there is no other."""
        full = len(ids) // room
        return [ids[i * room : (i + 1) * room] for i in range(full)] or [ids][: len(ids)]

    def note_cut(self, cut: int, total: int) -> None:
        if cut:
            self.notes.append(
                f"{cut} of {_many(total, 'prompt')} had more than {self.limit} tokens and "
                f"{'was' if cut == 1 else 'were'} cut to {self.limit}."
            )


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
