"""How good the demo model is: its losses, and what its heads do.

Computed from Hugging Face's own eager attention, so that it can be held against what attnlens
finds in the same model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from attnlens.demo.rows import CONTEXT, repeated_rows, with_bos

_TRAINED_PERIODS: Final = (6, 40)


@dataclass(frozen=True)
class Measures:
    """What was measured.

    Attributes
    ----------
    text_loss : float
        Nats per token on text that was not trained on, in 128-token rows.
    repeated_loss : float
        Nats per token on repeated stretches of 6 to 40 tokens, from their second round on.
    heads : dict of str to Tensor [layer, head]
        Scores of `head_scores`.
    """

    text_loss: float
    repeated_loss: float
    heads: dict[str, Tensor]

    def best(self, name: str) -> tuple[float, str]:
        """Return the largest score of that name and its head as ``layer.head``."""
        scores = self.heads[name]
        flat = int(scores.argmax())
        return float(scores.max()), f"{flat // scores.shape[1]}.{flat % scores.shape[1]}"

    def __str__(self) -> str:
        heads = ", ".join(
            f"{name} {self.best(name)[0]:.2f} ({self.best(name)[1]})" for name in self.heads
        )
        return f"text {self.text_loss:.2f}, repeated {self.repeated_loss:.2f}, {heads}"


@torch.inference_mode()
def measure(model: LlamaForCausalLM, held_out: Tensor) -> Measures:
    """Measure losses and heads.

    Parameters
    ----------
    model : LlamaForCausalLM
        Measured in eval mode with eager attention, which alone gives patterns; left with the
        attention that it had.
    held_out : Tensor [pos], int64
        Text that was not trained on.
    """
    model.eval()
    fused = model.config._attn_implementation
    model.set_attn_implementation("eager")
    width = CONTEXT // 2 - 1
    text = with_bos(held_out[: len(held_out) // width * width].reshape(-1, width))
    generator = torch.Generator().manual_seed(10_000)
    again, labels = repeated_rows(32, CONTEXT // 2, generator, _TRAINED_PERIODS)
    measures = Measures(
        text_loss=float(model(text, labels=text).loss),
        repeated_loss=float(model(again, labels=labels).loss),
        heads=head_scores(model),
    )
    model.set_attn_implementation(fused)
    return measures


@torch.inference_mode()
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
        ``induction``: over queries of the second round, on the token that followed the same
        token in the first; ``duplicate-token``: on that same token itself.
    """
    generator = torch.Generator().manual_seed(20_000)
    tokens, _ = repeated_rows(n_rows, 2 * period + 1, generator, (period, period))
    pattern = torch.stack(model(tokens, output_attentions=True).attentions)
    pattern = pattern.float().mean(1)  # layer, head, query_pos, key_pos

    def mean_at(offset: int, first: int) -> Tensor:
        # Entry i of this diagonal is the weight of query i + offset on key i.
        return pattern.diagonal(-offset, dim1=-2, dim2=-1)[..., first - offset :].mean(-1)

    return {
        "previous-token": mean_at(1, 1),
        "induction": mean_at(period - 1, period + 1),
        "duplicate-token": mean_at(period, period + 1),
    }
