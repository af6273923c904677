"""Which heads lie outside what chance would have, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xarray as xr

import attnlens

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
#: Attribute of a result that says why the activations were not measured.
UNMEASURED = "unmeasured"
#: Findings name so many layers, and in each so many heads.
_MOST_LAYERS = 6
_MOST_HEADS = 6


@dataclass(frozen=True)
class Claim:
    """One claim about heads.

    Attributes
    ----------
    word : str
        The finding's stable name.
    measure : str
    side : {"above", "below"}
        On which side of its layer's threshold a head lies that is claimed.
    phrase : str
        What is said of such heads.
    form : str
        How a value is written.
    minimum : float or None
        Where a threshold lies at least, whatever the twins do.
    """

    word: str
    measure: str
    side: str
    phrase: str
    form: str = "{:.1f}"
    minimum: float | None = None

    def span(self, low: float, high: float) -> str:
        """Write a range; a single value where both ends read alike."""
        first, last = self.form.format(low), self.form.format(high)
        return first if first == last else f"{first} to {last}"


CLAIMS = (
    Claim("sink-heads", "sink", "above",
          "put much of their attention on the first token", "{:.1%}", 0.3),
    Claim("focused-heads", "entropy_share", "below",
          "are more focused than chance, by their share of the possible entropy", "{:.1%}"),
    Claim("low-rank-heads", "effective_rank", "below",
          "have attention of low effective rank (of sigma)"),
    Claim("high-rank-heads", "effective_rank", "above",
          "have attention of high effective rank (of sigma)"),
    Claim("low-rank-scores", "score_rank", "below", "have scores of low effective rank"),
    Claim("low-rank-qk-weights", "qk_effective_rank", "below",
          "have W_Q W_K^T of low effective rank"),
    Claim("low-rank-ov-weights", "ov_effective_rank", "below",
          "have W_V W_O of low effective rank"),
)  # fmt: skip


def judge_all(result: xr.Dataset) -> Iterator[attnlens.Finding]:
    """Judge every claim about what was measured, and rank collapse."""
    reason = result.attrs.get(UNMEASURED)
    for claim in CLAIMS:
        if claim.measure in result:
            yield _judge(result, claim)
        elif reason and claim.measure in MEASURES:
            yield _not_judged(claim.word, MEASURES[claim.measure][0], reason)
    if "rank_one_residual" in result:
        yield _judge_collapse(result)
    elif reason:
        yield _not_judged("rank-collapse", "Rank collapse", reason)


def _not_judged(word: str, what: str, reason: str) -> attnlens.Finding:
    return attnlens.Finding(claim=word, holds=False, text=f"{what} was not judged: {reason}.")


def _judge(result: xr.Dataset, claim: Claim) -> attnlens.Finding:
    label, floor = (MEASURES | WEIGHTS)[claim.measure]
    values = result[claim.measure].transpose("layer", "head")
    if f"{claim.measure}_twin" not in result:
        return _not_judged(claim.word, label, "there are no twins")
    twins = result[f"{claim.measure}_twin"]
    threshold = _threshold(claim, twins, floor)
    if not bool(np.isfinite(threshold).all()):
        return _not_judged(claim.word, label, "so few values of twins do not tell what chance is")
    beyond = values > threshold if claim.side == "above" else values < threshold
    null = {
        "twins": twins.sizes["twin"],
        "lowest": twins.min().item(),
        "highest": twins.max().item(),
        "threshold": dict(zip(_layers(values), threshold.values, strict=True)),
    }
    if "causal_uniform" in values.attrs:
        null["causal_uniform"] = values.attrs["causal_uniform"]
    found = values.where(beyond) if bool(beyond.any()) else values
    evidence = {"lowest": found.min().item(), "highest": found.max().item()}
    if not bool(beyond.any()):
        nearest = "highest" if claim.side == "above" else "lowest"
        text = (
            f"{label}: none of {values.size} heads lies {claim.side} the threshold of its layer, "
            f"{claim.span(threshold.min().item(), threshold.max().item())}; the {nearest} is "
            f"{claim.form.format(evidence[nearest])}."
        )
        return attnlens.Finding(
            claim=claim.word, holds=False, text=text, evidence=evidence, null=null
        )
    order = np.argsort(found.values[beyond.values])
    heads = names(beyond)
    ranked = [heads[i] for i in (order[::-1] if claim.side == "above" else order)]
    return attnlens.Finding(
        claim=claim.word,
        holds=True,
        text=f"{len(heads)} of {values.size} heads {claim.phrase}: "
        f"{_by_layer(claim, found, threshold, ranked)}.",
        evidence={"heads": ranked, **evidence},
        null=null,
    )


def _threshold(claim: Claim, twins: xr.DataArray, floor: float) -> xr.DataArray:
    """Return beyond which value a head of each layer is claimed."""
    bounds = attnlens.nulls.twin_range(
        list(twins), floor=floor, alpha=attnlens.nulls.ALPHA / len(CLAIMS)
    )
    if claim.side == "below":  # no measure is negative
        return bounds["low"].clip(min=0.0)
    return bounds["high"].clip(min=claim.minimum)


def _by_layer(claim: Claim, found: xr.DataArray, threshold: xr.DataArray, ranked: list[str]) -> str:
    """Write which heads of each layer lie beyond its threshold, and where."""
    parts = []
    for layer, row, limit in zip(_layers(found), found.values, threshold.values, strict=True):
        heads = [head for head in ranked if head.split(".")[0] == layer]
        if heads:
            span = claim.span(np.nanmin(row), np.nanmax(row))
            limited = f"(threshold {claim.form.format(limit)})"
            parts.append(f"{_some(heads, _MOST_HEADS)} with {span} {limited}")
    rest = len(parts) - _MOST_LAYERS
    more = [f"and others in {rest} more layer{'s' * (rest > 1)}"] if rest > 0 else []
    return "; ".join([*parts[:_MOST_LAYERS], *more])


def _layers(values: xr.DataArray) -> list[str]:
    return [str(layer) for layer in values["layer"].values]


#: Distances from rank one that differ by less than this do not differ; and where collapse begins.
_RESIDUAL_FLOOR, _COLLAPSED = 0.02, 0.3


def _judge_collapse(result: xr.Dataset) -> attnlens.Finding:
    residual = result["rank_one_residual"]
    last = residual.isel(layer=-1)
    seen = f"from {residual[0].item():.2f} in the first layer to {last.item():.2f} in the last"
    evidence = {"first": residual[0], "last": last, "lowest": residual.min()}
    twins = result.get("rank_one_residual_twin")
    if twins is None or twins.sizes["twin"] < 2:
        which = "there are no twins" if twins is None else "one twin does not tell what chance is"
        text = f"Rank collapse was not judged ({seen}): {which}."
        return attnlens.Finding(claim="rank-collapse", holds=False, text=text, evidence=evidence)
    # Each layer has a level of its own; how far twins scatter around it, all layers tell together.
    level = twins.mean("twin")
    scatter = attnlens.nulls.twin_range(
        list(twins - level),
        floor=_RESIDUAL_FLOOR,
        over="layer",
        alpha=attnlens.nulls.ALPHA / len(CLAIMS),
    )
    threshold = (level.isel(layer=-1) + scatter["low"]).clip(0.0, _COLLAPSED).item()
    low = bool(last < threshold)
    text = (
        "The tokens' vectors collapse towards multiples of one vector: their distance from rank "
        f"one falls {seen}"
        if low
        else "The tokens' vectors do not collapse to rank one more than in the twins: their "
        f"distance from it goes {seen}"
    )
    return attnlens.Finding(
        claim="rank-collapse",
        holds=low,
        text=f"{text}, where the threshold is {threshold:.2f}.",
        evidence=evidence,
        null={"last": level.isel(layer=-1), "threshold": threshold},
    )


def names(chosen: xr.DataArray) -> list[str]:
    """Return the chosen heads as ``layer.head``."""
    layers, heads = chosen["layer"].values, chosen["head"].values
    return [f"{layers[i]}.{heads[j]}" for i, j in np.argwhere(chosen.values)]


def _some(heads: list[str], most: int) -> str:
    shown = ", ".join(heads[:most])
    return shown if len(heads) <= most else f"{shown} and {len(heads) - most} more"
