"""What to read: :class:`CorpusSpec`, and how plain Python values become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnlens.activations import nearest
from attnlens.errors import CorpusError

#: Every kind of corpus, with what it is.
CORPORA: Final[dict[str, str]] = {
    "default": "the bundled public-domain text, cut into prompts of equal length",
    "text": "texts given directly, each one prompt",
    "file": "a UTF-8 text file: one prompt a line, or running text cut into pieces",
    "dataset": "NAME[:split[:column]] of the Hugging Face hub, or a json, csv or parquet file",
    "tokens": "token ids from a .npy file or an array, used exactly as given",
    "repeated-random": "random tokens that repeat, for induction and duplicate-token heads",
}

#: Prompts taken where nothing is said and the source has no natural end.
DEFAULT_SAMPLES: Final = 32

#: Tokens per prompt where nothing is said and the source has no natural length.
DEFAULT_LENGTH: Final = 128

#: What :func:`as_corpus` reads as a dataset.
DATASET_SUFFIXES: Final = (".json", ".jsonl", ".csv", ".tsv", ".parquet")

TokenArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class CorpusSpec:
    """What to read prompts from.

    Attributes
    ----------
    name : str
        One of :data:`CORPORA`.
    texts : tuple of str
        The prompts of ``text``.
    source : str or None
        Path of ``file`` and ``tokens``; ``NAME[:split[:column]]`` of ``dataset``.
    arrays : tuple of ndarray [pos] or None
        Token ids of ``tokens`` that are in memory, one array per prompt.
    samples : int or None
        Take at most so many prompts: the first ones; of the bundled text, a random choice under
        `seed`, of which a smaller choice is the beginning. None: all there are, or
        :data:`DEFAULT_SAMPLES` where the source has no natural end.
    length : int or None
        Longest prompt in tokens, special tokens included. Running text is cut into prompts of
        exactly this length. None: the model's context, or :data:`DEFAULT_LENGTH`.
    seed : int
        Of every random choice.
    chunk : int or None
        Join what was read into running text and cut it into prompts of exactly so many tokens.
    bos : bool or None
        None: as the tokenizer has it (BOS once before each prompt; the tokenizer's own special
        tokens around it if the model is not causal). False: none. True: insist on it.
    period : int or None
        Tokens in the stretch of ``repeated-random``; None: half a prompt.

    Raises
    ------
    CorpusError
        If the fields contradict each other.
    """

    name: str = "default"
    texts: tuple[str, ...] = ()
    source: str | None = None
    arrays: tuple[TokenArray, ...] | None = field(default=None, repr=False, compare=False)
    samples: int | None = None
    length: int | None = None
    seed: int = 0
    chunk: int | None = None
    bos: bool | None = None
    period: int | None = None

    def __post_init__(self) -> None:
        if self.name not in CORPORA:
            near = nearest(self.name, CORPORA)
            raise CorpusError(
                f"There is no corpus {self.name!r}.",
                hint=(f"Did you mean {near!r}? " if near else "") + f"Known: {', '.join(CORPORA)}.",
            )
        for what in ("samples", "length", "chunk", "period"):
            value = getattr(self, what)
            if value is not None and value < 1:
                raise CorpusError(f"{what} is {value}.", hint=f"Give a {what} of 1 or more.")
        if self.seed < 0:
            raise CorpusError(f"seed is {self.seed}.", hint="Give a seed of 0 or more.")
        if None not in (self.chunk, self.length) and self.chunk != self.length:
            raise CorpusError(
                f"chunk is {self.chunk} and length is {self.length}, but both are the number of "
                "tokens in each prompt.",
                hint="Give one of them.",
            )
        if self.name == "text" and not self.texts:
            raise CorpusError("No text was given.", hint="Give at least one text.")
        if self.name in ("file", "dataset") and not self.source:
            raise CorpusError(f"The corpus {self.name!r} does not say what to read.")
        if self.name == "tokens" and not self.source and self.arrays is None:
            raise CorpusError("No token ids were given.", hint="Give a .npy file or an array.")

    def to_json(self) -> dict[str, Any]:
        """Return what was asked for as plain data; long texts and arrays by their number."""
        asked: dict[str, Any] = {
            "name": self.name,
            "source": self.source,
            "samples": self.samples,
            "length": self.length,
            "seed": self.seed,
            "chunk": self.chunk,
            "bos": self.bos,
            "period": self.period,
        }
        if self.texts:
            short = sum(map(len, self.texts)) <= 4096
            asked["texts"] = list(self.texts) if short else len(self.texts)
        if self.arrays is not None:
            asked["arrays"] = len(self.arrays)
        return asked


def as_corpus(value: object = None, **fields: Any) -> CorpusSpec:
    """Make a spec from what a person would pass as a corpus.

    Parameters
    ----------
    value : object
        None: the bundled text. ``"default"`` or ``"repeated-random"``: that corpus; any other
        string, or several: texts. A ``Path``: token ids (.npy), a dataset file (.json, .jsonl,
        .csv, .tsv, .parquet), else a text file. Integers in an array or tensor [pos] or
        [prompt, pos], or sequences of different lengths: token ids. A spec: itself.
    **fields
        Fields of :class:`CorpusSpec` that are to differ.

    Returns
    -------
    CorpusSpec

    Raises
    ------
    CorpusError
        If `value` is none of these.
    """
    if value is None:
        return CorpusSpec(**fields)
    if isinstance(value, CorpusSpec):
        return replace(value, **fields)
    if isinstance(value, str):
        if value in ("default", "repeated-random"):
            return CorpusSpec(value, **fields)
        return CorpusSpec("text", texts=(value,), **fields)
    if isinstance(value, Path):
        suffix = value.suffix.lower()
        kind = "tokens" if suffix == ".npy" else "dataset" if suffix in DATASET_SUFFIXES else "file"
        return CorpusSpec(kind, source=str(value), **fields)
    if isinstance(value, Sequence) and not value:
        raise CorpusError("There are no prompts: the list is empty.")
    if isinstance(value, Sequence) and any(isinstance(v, str) for v in value):
        odd = next((i for i, v in enumerate(value) if not isinstance(v, str)), None)
        if odd is not None:
            raise CorpusError(f"Prompt {odd} is {value[odd]!r:.60}, not text as the others are.")
        return CorpusSpec("text", texts=tuple(value), **fields)
    return CorpusSpec("tokens", arrays=token_arrays(value), **fields)


def token_arrays(value: object) -> tuple[TokenArray, ...]:
    """Split integers [pos], [prompt, pos], or ragged sequences of them, into prompts."""
    if hasattr(value, "detach"):  # a torch tensor, perhaps on a GPU
        value = value.detach().cpu()
    if isinstance(value, Sequence) and not all(isinstance(v, int | np.integer) for v in value):
        rows = [token_arrays(v) for v in value]
        if any(len(r) != 1 for r in rows):
            raise CorpusError("The token ids are nested too deeply: [prompt, pos] is expected.")
        return tuple(r[0] for r in rows)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise CorpusError(f"This is no corpus: {value!r:.80}.") from error
    if array.dtype.kind not in "iu":
        raise CorpusError(
            f"Token ids must be integers, but these are {array.dtype}.",
            hint="Texts are strings; token ids an integer array [pos] or [prompt, pos].",
        )
    if array.ndim not in (1, 2):
        raise CorpusError(
            f"Token ids must have 1 or 2 dimensions, but these have {array.ndim}: {array.shape}.",
            hint="Give [pos] for one prompt or [prompt, pos] for several.",
        )
    if array.size == 0:
        raise CorpusError(f"The array of token ids is empty: its shape is {array.shape}.")
    return (array,) if array.ndim == 1 else tuple(array)
