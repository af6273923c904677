"""What ``equivariance`` says: certificates of the architecture, then claims about the heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.equivariance import words
from attnlens_plugins.equivariance.distances import EQUAL
from attnlens_plugins.equivariance.promises import certificates
from attnlens_plugins.words import heads_that, span

#: Families of heads that are tested at once.
_FAMILIES = 3
ALPHA = attnlens.nulls.ALPHA / _FAMILIES
#: Spread of positionality, and of a nearest distance, below which a difference means nothing.
_POSITION_FLOOR, _NEAR_FLOOR = 0.05, 0.02
#: A positional head is above the one, a content head below the other.
_POSITIONAL, _CONTENT = 0.8, 0.2
#: Heads farther apart than this are not called alike, whatever the twins' heads are.
_ALIKE = 0.7


def findings(result: xr.Dataset) -> Iterator[attnlens.Finding]:
    """State the certificates, then judge the heads beside the twins."""
    yield from certificates(result)
    yield _positional(result, "positional-heads", above=True)
    if bool(result["positionality"].notnull().any()):  # else the first has said why not
        yield _positional(result, "content-heads", above=False)
    if "distance" in result:
        yield _equal(result)
        yield _alike(result)
    if "pairs_value" in result:
        yield _pairs(result)


def _positional(result: xr.Dataset, claim: str, *, above: bool) -> attnlens.Finding:
    values = result["positionality"].transpose("layer", "head")
    word = "positions" if above else "content"
    if not bool(values.notnull().any()):
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text="Positionality was not measured: with positions embedded in the residual stream "
            "it takes at least two prompts.",
        )
    if "positionality_twin" not in result:
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"Heads that follow {word} were not judged: there are no twins.",
        )
    twins = result["positionality_twin"]
    bounds = attnlens.nulls.twin_range(list(twins), floor=_POSITION_FLOOR, alpha=ALPHA)
    judge = attnlens.nulls.above if above else attnlens.nulls.below
    plain = values > _POSITIONAL if above else values < _CONTENT
    found = _cells(judge(values, bounds) & plain)
    null = {"twins": twins.sizes["twin"], "lowest": twins.min(), "highest": twins.max()}
    total = values.size
    if not found:
        text = (
            f"None of {total} heads follows {word} clearly more than the heads of twins do "
            f"(positionality {values.min().item():.2f} to {values.max().item():.2f}; twins: "
            f"{twins.min().item():.2f} to {twins.max().item():.2f})."
        )
        return attnlens.Finding(claim=claim, holds=False, text=text, null=null)
    own = {head: float(values.sel(layer=i, head=j)) for head, (i, j) in found.items()}
    lead = "read the same places whatever stands there" if above else "find tokens wherever they go"
    text = (
        f"{heads_that(len(found), total, lead)}: positionality "
        f"{span(min(own.values()), max(own.values()), '{:.2f}')} (0 is content, 1 is position; "
        f"twins: {span(twins.min().item(), twins.max().item(), '{:.2f}')}): "
        f"{words.some(list(own))}."
    )
    return attnlens.Finding(
        claim=claim, holds=True, text=text, evidence={"heads": list(own), "values": own}, null=null
    )


def _equal(result: xr.Dataset) -> attnlens.Finding:
    pairs = _near_pairs(result, "distance", EQUAL)
    if not pairs:
        return attnlens.Finding(
            claim="equal-heads",
            holds=False,
            text="No two heads are the same up to a change of basis.",
            evidence={"smallest_distance": float(result["nearest_distance"].min())},
        )
    named = [f"{a} and {b}" for a, b in pairs]
    text = f"{len(pairs)} pairs of heads are the same up to a change of basis: {words.some(named)}."
    evidence: dict[str, Any] = {"pairs": named}
    if "merged_logits" in result:
        moved = result["merged_logits"].item()
        evidence["merged_logits"] = moved
        text += (
            " Those within a layer can be merged into one head with twice the output: done to the "
            f"live model, it moved the logits by {moved:.1e} of the largest."
        )
    return attnlens.Finding(claim="equal-heads", holds=True, text=text, evidence=evidence)


def _alike(result: xr.Dataset) -> attnlens.Finding:
    claim, values = "similar-heads", result["nearest_distance"].transpose("layer", "head")
    if "nearest_distance_twin" not in result:
        return attnlens.Finding(
            claim=claim, holds=False, text="Similar heads were not judged: there are no twins."
        )
    twins = result["nearest_distance_twin"]
    bounds = attnlens.nulls.twin_range(list(twins), floor=_NEAR_FLOOR, alpha=ALPHA)
    found = _cells(attnlens.nulls.below(values, bounds) & (values < _ALIKE))
    null = {"twins": twins.sizes["twin"], "lowest": twins.min(), "highest": twins.max()}
    near = f"twins: {span(twins.min().item(), twins.max().item(), '{:.2f}')}"
    if not found:
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"No heads are clearly alike: the distance to the nearest other head is "
            f"{values.min().item():.2f} to {values.max().item():.2f} (0 is equal, 1 unrelated; "
            f"{near}).",
            null=null,
        )
    groups = _groups(result, set(found))
    listed = "; ".join(", ".join(group) for group in groups[:8])
    more = f"; and {len(groups) - 8} more groups" if len(groups) > 8 else ""
    text = (
        f"{heads_that(len(found), values.size, 'have another that is alike, whatever the bases')} "
        f"(distance below {_ALIKE}; {near})"
        + (
            f", in {len(groups)} groups: {listed}{more}."
            if groups
            else f": {words.some(list(found))}."
        )
    )
    return attnlens.Finding(
        claim=claim, holds=True, text=text, evidence={"heads": list(found), "groups": groups},
        null=null,
    )  # fmt: skip


def _groups(result: xr.Dataset, among: set[str]) -> list[list[str]]:
    numbers = result["cluster"].transpose("layer", "head").values
    found: dict[int, list[str]] = {}
    for (i, j), number in np.ndenumerate(numbers):
        if number >= 0 and f"{i}.{j}" in among:
            found.setdefault(int(number), []).append(f"{i}.{j}")
    return [group for group in found.values() if len(group) > 1]


def _near_pairs(result: xr.Dataset, name: str, below: float) -> list[tuple[str, str]]:
    values = result[name].values
    labels = result["one"].values
    upper = np.triu(values < below, 1)
    return [(str(labels[i]), str(labels[j])) for i, j in np.argwhere(upper)]


def _pairs(result: xr.Dataset) -> attnlens.Finding:
    value = result["pairs_value"].sel(invariant="cka")
    p = result["pairs_p"].sel(invariant="cka")
    n = result.attrs["pairs"]
    biased = result["pairs_null_mean"].sel(invariant="cka_biased")
    beyond = p <= 0.05 / p.size
    other = result.attrs["pairs_other"]
    null: dict[str, Any] = {"shuffled": result["pairs_null_mean"].sel(invariant="cka").values}
    learned = ""
    if "pairs_twin" in result:
        twins = result["pairs_twin"].sel(invariant="cka")
        null["twins_highest"] = twins.max("twin").values
        bounds = attnlens.nulls.twin_range(list(twins), floor=0.05, over=())
        beyond = beyond & attnlens.nulls.above(value, bounds)
        learned = " and more than in twins, whose texts share words too"
    layers = [int(i) for i in np.flatnonzero(beyond.values)]
    caveat = (
        f"With {n} pairs the plain CKA would be {biased.max().item():.2f} for texts paired at "
        "random, so that the debiased one is used."
    )
    what = f"each text in this model and in {other}" if other else "the two texts of a pair"
    cka = span(value.min().item(), value.max().item(), "{:.2f}")
    if layers:
        text = (
            f"Representations of {what} agree up to a rotation in {words.layers(layers)}, more "
            f"than those of texts paired at random{learned} (debiased CKA {cka}). {caveat}"
        )
    else:
        text = (
            f"Representations of {what} agree in no layer clearly more than by chance (debiased "
            f"CKA {cka}). {caveat}"
        )
    return attnlens.Finding(
        claim="same-meaning",
        holds=bool(layers),
        text=text,
        evidence={"layers": layers, "cka": value.values, "p": p.values, "pairs": n},
        null=null,
    )


def _cells(mask: xr.DataArray) -> dict[str, tuple[int, int]]:
    mask = mask.transpose("layer", "head")
    layers, heads = mask["layer"].values, mask["head"].values
    found = [(int(layers[i]), int(heads[j])) for i, j in np.argwhere(mask.values)]
    return {f"{i}.{j}": (i, j) for i, j in found}
