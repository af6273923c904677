"""Token ids from .npy files and arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np

from attnlens.corpora.spec import CorpusSpec, TokenArray, token_arrays
from attnlens.errors import CorpusError

if TYPE_CHECKING:
    from attnlens.models import ModelFacts


def read_tokens(spec: CorpusSpec) -> tuple[TokenArray, ...]:
    """Return the arrays of the corpus ``tokens``, one [pos] array per prompt, any integer type.

    Raises
    ------
    CorpusError
        If the file is no .npy file of integers with 1 or 2 dimensions.
    """
    if spec.arrays is not None:
        return spec.arrays
    assert spec.source is not None
    try:
        # Mapped, so that a few prompts of a big file cost little; never unpickled.
        array = np.load(spec.source, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise CorpusError(
            f"The file of token ids {spec.source!r} cannot be read: {error.strerror or error}.",
            hint="Check the path.",
        ) from error
    except (ValueError, EOFError, BadZipFile) as error:
        raise CorpusError(
            f"{spec.source!r} is not a .npy file of integers.",
            hint="Write one with numpy.save(FILE, ids), ids being integers [prompt, pos].",
        ) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise CorpusError(
            f"{spec.source!r} holds several arrays (.npz).",
            hint="Write one array with numpy.save(FILE, ids).",
        )
    return token_arrays(array)


def check_ids(ids: TokenArray, prompt: int, facts: ModelFacts) -> None:
    """Refuse ids outside the vocabulary, naming the first."""
    outside = (ids < 0) | (ids >= facts.d_vocab)
    if outside.any():
        pos = int(outside.argmax())
        raise CorpusError(
            f"Token id {int(ids[pos])} at prompt {prompt}, position {pos} is outside the "
            f"vocabulary of {facts.d_vocab} of {facts.name!r}.",
            hint="Give ids of this model's own tokenizer, without padding"
            f"{'' if ids[pos] >= 0 else ' (negative ids are no tokens)'}.",
        )
