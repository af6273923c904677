from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnlens.demo import MODEL_FOLDER


def facts_of(**changes: Any) -> Any:
    """The facts that corpora read, of a model with 50 tokens and a context of 16."""
    values = {"name": "TINY", "n_ctx": 16, "d_vocab": 50, "causal": True, "config": {}}
    return SimpleNamespace(**(values | changes))


def words(special: str | None = "<s>", *, extra: int = 0, **named: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: w0, w1, ... have ids 1, 2, ...; anything else is ``[unk]``."""
    vocabulary = {"[unk]": 0} | {f"w{i}": i + 1 for i in range(40)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([f"<filler{i}>" for i in range(extra)])
    named = ({"bos_token": special} if special else {}) | named
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


@pytest.fixture
def word_tokenizer() -> PreTrainedTokenizerFast:
    """BOS is ``<s>``, id 41."""
    return words()


@pytest.fixture
def bert_tokenizer() -> PreTrainedTokenizerFast:
    """``[CLS]`` is 42 and ``[SEP]`` 41, put around every text."""
    tokenizer = words(None, cls_token="[CLS]", sep_token="[SEP]")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 42), ("[SEP]", 41)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


@pytest.fixture
def tiny() -> Any:
    return facts_of()


@pytest.fixture
def demo() -> Any:
    return facts_of(name="demo", n_ctx=256, d_vocab=512, config={"bos_token_id": 0})
