"""The demo model's card."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from attnlens.demo import TEXT_FILE
from attnlens.demo.scores import Measures

if TYPE_CHECKING:
    from attnlens.demo.train import Recipe

_BUNDLED = (
    "Genesis 1-23, Ruth, Psalms 1-41, Ecclesiastes, Jonah, Matthew 1-20, Luke 1-2, "
    "1 Corinthians 13 and James of the King James Bible (1611), from Debian's package "
    "`bible-kjv-text`, bundled as `attnlens/demo/text.txt`. The text is in the public domain: its "
    "copyright has expired. (In the United Kingdom, printing it is a privilege of the Crown.)"
)


def model_card(
    measures: Measures, recipe: Recipe, *, step: int, seconds: float, source: Path
) -> str:
    """Write the card: what the model is, what it was trained on, and what was measured.

    Parameters
    ----------
    measures : Measures
        Of the model as it was in memory, in float32.
    recipe : Recipe
    step : int
        Steps done.
    seconds : float
        Time since training began.
    source : Path
        The text.

    Returns
    -------
    str
        Markdown.
    """
    text = _BUNDLED if source == TEXT_FILE else f"`{source.name}`, given by the user."
    data = textwrap.fill(
        f"Text: {text} Its last 5 % were not trained on. Beside the text, the model saw random "
        f"tokens: stretches of {recipe.periods[0]} to {recipe.periods[1]} tokens, repeated to the "
        "end of the row.",
        100,
        break_on_hyphens=False,
    )
    training = textwrap.fill(
        f"`python -m attnlens.demo.train`, seed {recipe.seed}: {step} of {recipe.steps} steps, "
        f"each of {recipe.text_rows} rows of text and {recipe.repeated_rows} repeated rows of "
        f"128 tokens; AdamW, one cycle up to {recipe.learning_rate:g}; {seconds / 60:.1f} minutes "
        "on a processor, without a GPU.",
        100,
        break_on_hyphens=False,
    )
    heads = "\n".join(
        f"| {name} | {measures.best(name)[1]} | {measures.best(name)[0]:.3f} |"
        for name in measures.heads
    )
    return f"""---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---

# attnlens demo model

A Llama with 3 layers of 8 heads, width 128, rotary positions, a context of 256 tokens and a
byte-level byte-pair vocabulary of 512, in float16. It is bundled with attnlens so that every
command can be tried without a download; as a language model it is of no use.

## Data

{data}

## Training

{training}

## Losses

Nats per token; an untrained model has {math.log(512):.2f}.

| on | loss |
|---|---|
| text that was not trained on | {measures.text_loss:.3f} |
| repeated random tokens, from the second round on | {measures.repeated_loss:.3f} |

## Heads

The best head of each kind, as layer.head, on random stretches of 31 tokens seen twice: mean
weight on the token before; on the token that followed the same token one period ago; on that same
token one period ago. Chance is about 0.06, 0.02 and 0.02.

| kind | head | score |
|---|---|---|
{heads}
"""
