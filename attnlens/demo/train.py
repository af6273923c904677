"""Train the demo model from the bundled text.

::

    python -m attnlens.demo.train --out FOLDER [--checkpoints FOLDER --every N]

A three-layer Llama with a byte-level byte-pair tokenizer learns two things at once: the text,
and random stretches of tokens that repeat. The stretches can be predicted only by looking up
what followed the same token before, and so they make the model grow previous-token and
induction heads [1]_. Rotary positions matter: with learned absolute positions the same recipe
did not find them in twice the steps.

One seed gives the same weights on one machine with one number of threads.

References
----------
.. [1] Olsson et al., "In-context Learning and Induction Heads", 2022, arXiv:2209.11895.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attnlens.demo import TEXT_FILE

log = logging.getLogger("attnlens.demo")

BOS: Final = "<s>"
BOS_ID: Final = 0
VOCABULARY: Final = 512
CONTEXT: Final = 256
PERIODS: Final = (6, 40)
HELD_OUT: Final = 0.05


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes
    ----------
    steps : int
        Optimizer steps.
    seed : int
        Of the initial weights and of all batches.
    learning_rate : float
        Peak of the one-cycle schedule.
    text_rows, repeated_rows : int
        Rows of text and of repeated stretches in a batch of 128-token rows.
    long_every : int
        Every so many steps the rows are 256 tokens long and half as many, so that the whole
        context has been seen.
    """

    steps: int = 1500
    seed: int = 0
    learning_rate: float = 3e-3
    text_rows: int = 8
    repeated_rows: int = 24
    long_every: int = 8


def build_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Learn a byte-level byte-pair tokenizer of 512 tokens; every text can be encoded.

    Parameters
    ----------
    text : str
        What the merges are learned from.

    Returns
    -------
    PreTrainedTokenizerFast
        Its BOS token is ``<s>``, id 0, put before every text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=BOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """Make the untrained model: 3 layers, width 128, 8 heads, rotary positions."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=CONTEXT,
            bos_token_id=BOS_ID,
            eos_token_id=BOS_ID,
            tie_word_embeddings=False,
            attn_implementation="eager",
            use_cache=False,
        )
    )


def repeated_rows(
    n_rows: int, length: int, generator: torch.Generator, periods: tuple[int, int] = PERIODS
) -> tuple[Tensor, Tensor]:
    """Draw rows of BOS and a random stretch that repeats to the end.

    Parameters
    ----------
    n_rows, length : int
    generator : torch.Generator
    periods : tuple of int
        Shortest and longest period, both possible.

    Returns
    -------
    tokens : Tensor [row, pos], int64
    labels : Tensor [row, pos], int64
        The same, with -100 (ignored by the loss) where nothing could be known: the first round.
    """
    tokens = torch.full((n_rows, length), BOS_ID)
    labels = torch.full((n_rows, length), -100)
    for row in range(n_rows):
        period = int(torch.randint(periods[0], periods[1] + 1, (1,), generator=generator))
        stretch = torch.randint(BOS_ID + 1, VOCABULARY, (period,), generator=generator)
        tokens[row, 1:] = stretch.repeat(length // period + 1)[: length - 1]
        labels[row, 1 + period :] = tokens[row, 1 + period :]
    return tokens, labels


def text_rows(
    ids: Tensor, n_rows: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Cut rows of BOS and text from random places of the token sequence `ids`."""
    starts = torch.randint(0, len(ids) - length + 1, (n_rows,), generator=generator)
    tokens = torch.full((n_rows, length), BOS_ID)
    for row, start in enumerate(starts.tolist()):
        tokens[row, 1:] = ids[start : start + length - 1]
    return tokens, tokens


def batches(ids: Tensor, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one (tokens, labels) pair per step, each [row, pos] int64."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.steps):
        long = step % recipe.long_every == recipe.long_every - 1
        length, share = (CONTEXT, 2) if long else (CONTEXT // 2, 1)
        text = text_rows(ids, max(1, recipe.text_rows // share), length, generator)
        again = repeated_rows(max(1, recipe.repeated_rows // share), length, generator)
        yield torch.cat([text[0], again[0]]), torch.cat([text[1], again[1]])


def text_loss(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Mean loss in nats per token over consecutive 128-token rows of `ids`."""
    width = CONTEXT // 2 - 1
    rows = ids[: len(ids) // width * width].reshape(-1, width)
    tokens = torch.cat([torch.full((len(rows), 1), BOS_ID), rows], dim=1)
    with torch.inference_mode():
        return float(model(tokens, labels=tokens).loss)


def repeated_loss(model: LlamaForCausalLM) -> float:
    """Mean loss in nats per token on second and later rounds of repeated stretches."""
    tokens, labels = repeated_rows(32, CONTEXT // 2, torch.Generator().manual_seed(10_000))
    with torch.inference_mode():
        return float(model(tokens, labels=labels).loss)


def head_scores(
    model: LlamaForCausalLM, *, period: int = 31, n_rows: int = 32
) -> dict[str, Tensor]:
    """Score every head on a random stretch seen twice: BOS, stretch, stretch.

    Parameters
    ----------
    model : LlamaForCausalLM
        With eager attention.
    period : int
        Tokens in the stretch.
    n_rows : int
        Number of stretches.

    Returns
    -------
    dict of str to Tensor [layer, head]
        ``previous-token``: mean weight on the token before, over all queries but the first;
        ``duplicate-token``: on the same token one period back, over queries of the second round;
        ``induction``: on the token that followed it.
    """
    generator = torch.Generator().manual_seed(20_000)
    tokens, _ = repeated_rows(n_rows, 2 * period + 1, generator, (period, period))
    with torch.inference_mode():
        attentions = model(tokens, output_attentions=True).attentions
    pattern = torch.stack(attentions).float().mean(1)  # layer, head, query_pos, key_pos

    def along(offset: int) -> Tensor:
        first = 1 if offset == 1 else period + 1
        diagonal = pattern.diagonal(-offset, dim1=-2, dim2=-1)  # entry i: query i + offset
        return diagonal[..., first - offset :].mean(-1)

    return {
        "previous-token": along(1),
        "induction": along(period - 1),
        "duplicate-token": along(period),
    }


def best(scores: Tensor) -> tuple[float, str]:
    """Return the largest value of [layer, head] scores and its head as ``layer.head``."""
    flat = int(scores.argmax())
    return float(scores.max()), f"{flat // scores.shape[1]}.{flat % scores.shape[1]}"


def describe(model: LlamaForCausalLM, held_out: Tensor) -> dict[str, Any]:
    """Measure losses and head scores, as plain data."""
    model.eval()
    heads = {name: best(score) for name, score in head_scores(model).items()}
    return {
        "text_loss": text_loss(model, held_out),
        "repeated_loss": repeated_loss(model),
        "heads": heads,
    }


def save_folder(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str
) -> None:
    """Write a Hugging Face folder with float16 weights; the model in memory stays float32."""
    import copy

    folder.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to(torch.float16)
    half.config._name_or_path = ""
    half.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
