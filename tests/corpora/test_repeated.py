"""The corpus of repeated random tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.corpora import CorpusSpec, Prompts, load_prompts
from attnlens.errors import CorpusError

from .conftest import facts_of, words


def load(tokenizer: Any, facts: Any, **fields: Any) -> Prompts:
    return load_prompts(CorpusSpec("repeated-random", **fields), tokenizer=tokenizer, facts=facts)


@given(
    length=st.integers(3, 64),
    period=st.none() | st.integers(1, 20),
    samples=st.integers(1, 4),
    seed=st.integers(0, 10),
    bos=st.booleans(),
)
def test_every_token_repeats_one_period_later(
    length: int, period: int | None, samples: int, seed: int, bos: bool
) -> None:
    facts = facts_of(n_ctx=64, config={"bos_token_id": 0})
    fields = {"length": length, "period": period, "samples": samples, "seed": seed, "bos": bos}
    if period is not None and period >= length - bos:
        with pytest.raises(CorpusError, match="does not repeat"):
            load(None, facts, **fields)
        return
    prompts = load(None, facts, **fields)
    assert len(prompts) == samples and set(prompts.lengths) == {length}
    for tokens in prompts.tokens:
        body = tokens[1:] if bos else tokens
        assert prompts.period is not None and prompts.period < len(body)
        assert (body[prompts.period :] == body[: -prompts.period]).all()
        stretch = body[: prompts.period]
        assert len(set(stretch.tolist())) == len(stretch)
        assert 0 not in body and body.max() < 50 and (not bos or tokens[0] == 0)


def test_default_is_a_stretch_seen_twice(demo_tokenizer: Any, demo: Any) -> None:
    prompts = load(demo_tokenizer, demo)
    assert prompts.lengths == (128,) * 32 and prompts.period == 63
    assert prompts.bos == "prepended"
    assert prompts.to_json()["period"] == 63
    assert load(demo_tokenizer, demo).hash == prompts.hash
    assert load(demo_tokenizer, demo, seed=1).hash != prompts.hash
    few = load(demo_tokenizer, demo, samples=2)
    assert [p.tolist() for p in few.tokens] == [p.tolist() for p in prompts.tokens[:2]]


def test_a_configured_bos_outside_the_vocabulary_is_not_used() -> None:
    # A small GPT-2 configuration keeps the default BOS, 50256.
    prompts = load(None, facts_of(config={"bos_token_id": 50256}))
    assert prompts.bos == "absent" and max(p.max() for p in prompts.tokens) < 50
    with pytest.raises(CorpusError):
        load(None, facts_of(config={"bos_token_id": 50256}), bos=True)


def test_only_ordinary_tokens_are_drawn() -> None:
    tokenizer = words(extra=3, pad_token="[pad]", unk_token="[unk]")
    tokenizer.add_tokens(["<extra_id_0>"])
    # The model's table is longer than the tokenizer's, as after padding to a multiple of 64.
    facts = facts_of(d_vocab=64, n_ctx=64)
    drawn = set(np.concatenate([p[1:] for p in load(tokenizer, facts, samples=60).tokens]).tolist())
    assert drawn == set(range(1, 41))


def test_placeholders_of_the_vocabulary_are_not_drawn() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = ["a", "[unused0]", "b", "<unused12>", "<|reserved_special_token_3|>", "c", "<0x0A>"]
    backend = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    prompts = load(tokenizer, facts_of(), samples=30, length=8, period=4)
    assert set(np.concatenate(prompts.tokens).tolist()) == {0, 2, 5, 6}


def test_a_vocabulary_smaller_than_the_period_repeats_tokens() -> None:
    prompts = load(None, facts_of(d_vocab=3), length=16, period=8)
    assert max(p.max() for p in prompts.tokens) < 3


def test_bert_gets_its_ends(bert_tokenizer: Any) -> None:
    prompts = load(bert_tokenizer, facts_of(causal=False), length=8)
    for tokens in prompts.tokens:
        assert tokens[0] == 42 and tokens[-1] == 41
        assert (tokens[1:4] == tokens[4:7]).all()


@pytest.mark.parametrize("length", [1, 2])
def test_too_short_to_repeat(length: int) -> None:
    facts = facts_of(config={"bos_token_id": 0})
    with pytest.raises(CorpusError, match="does not repeat") as caught:
        load(None, facts, length=length)
    assert "3 or more" in str(caught.value.hint)


def test_nothing_outside_the_models_vocabulary_is_drawn() -> None:
    prompts = load(words(None), facts_of(d_vocab=20), samples=20)
    assert max(p.max() for p in prompts.tokens) == 19
