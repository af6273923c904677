"""Train the demo model from the bundled text.

::

    python -m attnlens.demo.train --out FOLDER [--checkpoints FOLDER --every N]

A three-layer Llama with a byte-level byte-pair tokenizer learns two things at once: the text,
and random stretches of tokens that repeat. The stretches can be predicted only by looking up
what followed the same token before, and so they make the model grow previous-token and
induction heads [1]_. Both come at once, in a sharp change: with the default seed between steps
700 and 800.

One seed gives the same weights on one machine with one number of threads.

References
----------
.. [1] Olsson et al., "In-context Learning and Induction Heads", 2022, arXiv:2209.11895.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM

from attnlens.demo import TEXT_FILE
from attnlens.demo.build import build_model, build_tokenizer, save_folder
from attnlens.demo.card import model_card
from attnlens.demo.rows import CONTEXT, repeated_rows, text_rows
from attnlens.demo.scores import measure

log = logging.getLogger("attnlens.demo")

#: Share of the text, at its end, that is never trained on.
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
        Rows of each kind in a batch of 128-token rows.
    periods : tuple of int
        Shortest and longest stretch.
    long_from, long_every : int
        From that step on, every so many steps rows have 256 tokens and are half as many, so that
        the whole context is seen. Before, short rows let the heads form sooner.
    """

    steps: int = 1500
    seed: int = 0
    learning_rate: float = 3e-3
    text_rows: int = 8
    repeated_rows: int = 24
    periods: tuple[int, int] = (6, 40)
    long_from: int = 1000
    long_every: int = 4


def batches(ids: Tensor, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens and labels [row, pos] of each step."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.steps):
        long = step >= recipe.long_from and step % recipe.long_every == 0
        length, share = (CONTEXT, 2) if long else (CONTEXT // 2, 1)
        text = text_rows(ids, recipe.text_rows // share, length, generator)
        again = repeated_rows(recipe.repeated_rows // share, length, generator, recipe.periods)
        yield torch.cat([text[0], again[0]]), torch.cat([text[1], again[1]])


def train(model: LlamaForCausalLM, ids: Tensor, recipe: Recipe) -> Iterator[tuple[int, float]]:
    """Train in place, yielding before each step its number and the loss of the step before.

    Parameters
    ----------
    model : LlamaForCausalLM
    ids : Tensor [pos], int64
        The text to train on.
    recipe : Recipe

    Yields
    ------
    step : int
        From 0; after the last step once more, with the number of steps.
    loss : float
        Nats per token; NaN before the first step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=max(recipe.steps, 2), pct_start=0.3
    )
    loss = float("nan")
    for step, (tokens, labels) in enumerate(batches(ids, recipe)):
        yield step, loss
        model.train()
        result = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        result.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss = float(result.detach())
    yield recipe.steps, loss


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    recipe = Recipe(steps=options.steps, seed=options.seed)
    text = options.text.read_text(encoding="utf-8")
    tokenizer = build_tokenizer(text)
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    ids = torch.tensor(encoded["input_ids"])
    trained = int(len(ids) * (1 - HELD_OUT))
    if len(ids) - trained < CONTEXT:
        raise SystemExit(
            f"{options.text} has {len(ids)} tokens; at least {int(CONTEXT / HELD_OUT)} are needed."
        )
    model = build_model(recipe.seed)
    started = time.perf_counter()
    for step, loss in train(model, ids[:trained], recipe):
        done = step == recipe.steps
        folders = [options.out] if done else []
        if options.checkpoints is not None and (done or step % options.every == 0):
            folders.append(options.checkpoints / f"step{step}")
        if folders or step % 50 == 0:
            measures = measure(model, ids[trained:])
            seconds = time.perf_counter() - started
            log.info("step %d, %.0f s: loss %.2f, %s", step, seconds, loss, measures)
            card = model_card(measures, recipe, step=step, seconds=seconds, source=options.text)
            for folder in folders:
                save_folder(folder, model, tokenizer, card)
    log.info("%s", options.out)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m attnlens.demo.train", description="Train the demo model."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained model")
    parser.add_argument("--text", type=Path, default=TEXT_FILE, help="UTF-8 text to train on")
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints step0, step50, ...")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="the weights depend on it")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.every < 1 or options.threads < 1:
        parser.error("--steps, --every and --threads must be 1 or more")
    if not options.text.is_file():
        parser.error(f"there is no text file {options.text}")
    return options


if __name__ == "__main__":
    main()
