"""Which heads lie outside what chance would have, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins import words

#: Quantities over [layer, head]: what they are, and the spread below which nothing is claimed.
MEASURES: dict[str, tuple[str, float]] = {
    "entropy": ("Row entropy (nats)", 0.05),
    "entropy_share": ("Entropy, as a share of the possible", 0.02),
    "renyi2": ("Renyi-2 entropy (nats)", 0.05),
    "effective_rank": ("Effective rank (of sigma)", 1.0),
    "stable_rank": ("Stable rank (of sigma squared)", 0.1),
    "gap": ("Spectral gap, 1 - sigma_2 / sigma_1", 0.03),
    "quarter": ("Energy (sigma squared) in a quarter of the spectrum", 0.02),
    "sink": ("Attention on the first token", 0.03),
    "sink_share": ("Share of the first token's column in sigma squared", 0.03),
    "score_rank": ("Effective rank of the scores", 0.3),
}
WEIGHTS: dict[str, tuple[str, float]] = {
    "qk_effective_rank": ("Effective rank of W_Q W_K^T", 0.3),
    "ov_effective_rank": ("Effective rank of W_V W_O", 0.3),
}


@dataclass(frozen=True)
class Claim:
    """One claim about heads.

    Attributes
    ----------
    word : str
        The finding's stable name.
    measure : str
    side : {"above", "below"}
        On which side of the twins' bounds the heads lie.
    phrase : str
        What is said of them, with a place for their values.
    form : str
        How a value is written.
    minimum : float or None
        What a value must reach in any case.
    """

    word: str
    measure: str
    side: str
    phrase: str
    form: str
    minimum: float | None = None


CLAIMS = (
    Claim("sink-heads", "sink", "above",
          "put {} of their attention on the first token", "{:.0%}", 0.3),
    Claim("focused-heads", "entropy_share", "below",
          "are more focused than chance: {} of the possible entropy", "{:.0%}"),
    Claim("low-rank-heads", "effective_rank", "below",
          "have attention of low effective rank (of sigma): {}", "{:.1f}"),
    Claim("high-rank-heads", "effective_rank", "above",
          "have attention of high effective rank (of sigma): {}", "{:.1f}"),
    Claim("low-rank-scores", "score_rank", "below",
          "have scores of low effective rank: {}", "{:.1f}"),
    Claim("low-rank-qk-weights", "qk_effective_rank", "below",
          "have W_Q W_K^T of low effective rank: {}", "{:.1f}"),
    Claim("low-rank-ov-weights", "ov_effective_rank", "below",
          "have W_V W_O of low effective rank: {}", "{:.1f}"),
)  # fmt: skip


def judge_all(result: xr.Dataset) -> Iterator[attnlens.Finding]:
    """Judge every claim about what was measured, and rank collapse."""
    for claim in CLAIMS:
        if claim.measure in result:
            yield _judge(result, claim)
    if "rank_one_residual" in result:
        yield _judge_collapse(result)


def _judge(result: xr.Dataset, claim: Claim) -> attnlens.Finding:
    label, floor = (MEASURES | WEIGHTS)[claim.measure]
    values = result[claim.measure].transpose("layer", "head")
    if f"{claim.measure}_twin" not in result:
        return attnlens.Finding(
            claim=claim.word, holds=False, text=f"{label} was not judged: there are no twins."
        )
    twins = result[f"{claim.measure}_twin"]
    bounds = attnlens.nulls.twin_range(
        list(twins), floor=floor, alpha=attnlens.nulls.ALPHA / len(CLAIMS)
    )
    judge = attnlens.nulls.above if claim.side == "above" else attnlens.nulls.below
    beyond = judge(values, bounds)
    if claim.minimum is not None:
        beyond = beyond & (values > claim.minimum)
    heads = names(beyond)
    null = {
        "twins": twins.sizes["twin"],
        "lowest": twins.min().item(),
        "highest": twins.max().item(),
        "causal_uniform": values.attrs.get("causal_uniform"),
    }
    total = values.size
    if not heads:
        return attnlens.Finding(
            claim=claim.word,
            holds=False,
            text=f"{label}: none of {total} heads lies clearly {claim.side} the twins.",
            evidence={"lowest": values.min().item(), "highest": values.max().item()},
            null={k: v for k, v in null.items() if v is not None},
        )
    found = values.where(beyond)
    said = claim.phrase.format(words.span(found.min().item(), found.max().item(), claim.form))
    chance = words.span(null["lowest"], null["highest"], claim.form)
    order = np.argsort(found.values[beyond.values])
    if claim.side == "above":
        order = order[::-1]
    ranked = [heads[i] for i in order]
    return attnlens.Finding(
        claim=claim.word,
        holds=True,
        text=f"{words.heads_that(len(heads), total, said)} (twins: {chance}): {_some(ranked)}.",
        evidence={
            "heads": ranked,
            "lowest": found.min().item(),
            "highest": found.max().item(),
        },
        null={k: v for k, v in null.items() if v is not None},
    )


def _judge_collapse(result: xr.Dataset) -> attnlens.Finding:
    residual = result["rank_one_residual"]
    last = residual.isel(layer=-1)
    seen = f"from {residual[0].item():.2f} in the first layer to {last.item():.2f} in the last"
    evidence = {"first": residual[0], "last": last, "lowest": residual.min()}
    if "rank_one_residual_twin" not in result:
        text = f"Rank collapse was not judged ({seen}): there are no twins."
        return attnlens.Finding(claim="rank-collapse", holds=False, text=text, evidence=evidence)
    twins = result["rank_one_residual_twin"].isel(layer=-1)
    bounds = attnlens.nulls.twin_range(
        list(twins), floor=0.05, over=(), alpha=attnlens.nulls.ALPHA / len(CLAIMS)
    )
    low = bool(last < bounds["low"]) and bool(last < 0.3)
    text = (
        "The tokens' vectors collapse towards multiples of one vector: their distance from rank "
        f"one falls {seen}."
        if low
        else "The tokens' vectors do not collapse to rank one more than in the twins: their "
        f"distance from it goes {seen}."
    )
    null = {"last": twins.mean(), "low": bounds["low"]}
    return attnlens.Finding(
        claim="rank-collapse", holds=low, text=text, evidence=evidence, null=null
    )


def names(chosen: xr.DataArray) -> list[str]:
    """Return the chosen heads as ``layer.head``."""
    layers, heads = chosen["layer"].values, chosen["head"].values
    return [f"{layers[i]}.{heads[j]}" for i, j in np.argwhere(chosen.values)]


def _some(heads: list[str], most: int = 12) -> str:
    shown = ", ".join(heads[:most])
    return shown if len(heads) <= most else f"{shown} and {len(heads) - most} more"


def marks(result: xr.Dataset, measure: str, count: int = 3) -> dict[Any, str]:
    """Return the heads with the largest values of a measure, to be named in a figure."""
    values = result[measure].transpose("layer", "head")
    flat = np.argsort(np.nan_to_num(values.values.ravel(), nan=-np.inf))[::-1][:count]
    layers, heads = values["layer"].values, values["head"].values
    cells = [(int(layers[i // len(heads)]), int(heads[i % len(heads)])) for i in flat]
    return {cell: f"{cell[0]}.{cell[1]}" for cell in cells}
