"""Where prompts come from: text, files, datasets, token arrays, the bundled text.

A :class:`CorpusSpec` says what to read; :func:`load_prompts` reads it with a model's tokenizer
into :class:`Prompts`: token ids in a frozen order. No prompt is ever padded.
"""

from __future__ import annotations

from attnlens.corpora.load import load_prompts
from attnlens.corpora.prompts import Prompts
from attnlens.corpora.spec import (
    CORPORA,
    DEFAULT_LENGTH,
    DEFAULT_SAMPLES,
    CorpusSpec,
    as_corpus,
)

__all__ = [
    "CORPORA",
    "DEFAULT_LENGTH",
    "DEFAULT_SAMPLES",
    "CorpusSpec",
    "Prompts",
    "as_corpus",
    "load_prompts",
]
