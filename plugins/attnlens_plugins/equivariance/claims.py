"""What ``equivariance`` says: certificates of the architecture, then claims about the heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.equivariance import words
from attnlens_plugins.equivariance.promises import certificates

#: Families of heads that are tested at once.
_FAMILIES = 3
ALPHA = attnlens.nulls.ALPHA / _FAMILIES
#: Spread of positionality, and of a nearest distance, below which a difference means nothing.
_POSITION_FLOOR, _NEAR_FLOOR = 0.05, 0.02
#: A positional head is above the one, a content head below the other.
_POSITIONAL, _CONTENT = 0.8, 0.2
#: Chance that random pairings alone give a claim in any layer.
_PAIRS_ALPHA = 0.05
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
    total = words.count(int(values.size), "head")
    span = _span(twins)
    bound = f"above {_POSITIONAL}" if above else f"below {_CONTENT}"
    if not found:
        text = (
            f"None of {total} follows {word} ({bound}, and clearly beyond the heads of twins: "
            f"positionality {_span(values)}; twins: "
            f"{span})."
        )
        return attnlens.Finding(claim=claim, holds=False, text=text, null=null)
    own = {head: float(values.sel(layer=i, head=j)) for head, (i, j) in found.items()}
    lead = "the same places whatever stands there" if above else "tokens wherever they go"
    verb = ("reads" if above else "finds") if len(found) == 1 else ("read" if above else "find")
    text = (
        f"{len(found)} of {total} {verb} {lead}: positionality "
        f"{words.span(min(own.values()), max(own.values()))} (0 is content, 1 is position; {bound} "
        f"is named if it is beyond the heads of twins, {span}): {words.some(list(own))}."
    )
    return attnlens.Finding(
        claim=claim, holds=True, text=text, evidence={"heads": list(own), "values": own}, null=null
    )


def _equal(result: xr.Dataset) -> attnlens.Finding:
    below = result.attrs["equal_below"]
    pairs = _near_pairs(result, "distance", below)
    if not pairs:
        return attnlens.Finding(
            claim="equal-heads",
            holds=False,
            text=f"No two heads are the same up to a change of basis (distance below {below:.0e}).",
            evidence={"smallest_distance": float(result["nearest_distance"].min())},
        )
    named = [f"{a} and {b}" for a, b in pairs]
    verb = "is" if len(pairs) == 1 else "are"
    text = (
        f"{words.count(len(pairs), 'pair')} of heads {verb} the same up to a change of basis "
        f"(distance below {below:.0e}): {words.some(named)}."
    )
    evidence: dict[str, Any] = {"pairs": named}
    holds = True
    if "merged_logits" in result:
        moved = result["merged_logits"].item()
        allowed = result["gauge_logits_allowed"].item() + 32 * below
        evidence |= {"merged_logits": moved, "merged_allowed": allowed}
        holds = moved <= allowed
        done = f"moves the logits by {moved:.1e} of the largest (allowed: {allowed:.1e})"
        if holds:
            text += (
                " Those within a layer can be merged into one head with twice the output: done to "
                f"the live model, it {done}."
            )
        else:
            text = (
                f"The weights of {words.count(len(pairs), 'pair')} of heads agree up to a change "
                f"of basis ({words.some(named)}), but they are not the same heads: merging those "
                f"within a layer in the live model {done}."
            )
    return attnlens.Finding(claim="equal-heads", holds=holds, text=text, evidence=evidence)


def _alike(result: xr.Dataset) -> attnlens.Finding:
    claim, values = "similar-heads", result["nearest_distance"].transpose("layer", "head")
    if not bool(values.notnull().any()):
        return attnlens.Finding(
            claim=claim, holds=False, text="There is one head, and no other that it could be like."
        )
    if "nearest_distance_twin" not in result:
        return attnlens.Finding(
            claim=claim, holds=False, text="Similar heads were not judged: there are no twins."
        )
    twins = result["nearest_distance_twin"]
    bounds = attnlens.nulls.twin_range(list(twins), floor=_NEAR_FLOOR, alpha=ALPHA)
    found = _cells(attnlens.nulls.below(values, bounds) & (values < _ALIKE))
    null = {"twins": twins.sizes["twin"], "lowest": twins.min(), "highest": twins.max()}
    span = f"twins: {_span(twins)}"
    if not found:
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"No heads are clearly alike: the distance to the nearest other head is "
            f"{_span(values)} (0 is equal, 1 unrelated; below "
            f"{_ALIKE}, and clearly below the {span}, would be alike).",
            null=null,
        )
    groups = _groups(result, set(found))
    listed = "; ".join(", ".join(group) for group in groups[:8])
    more = f"; and {words.count(len(groups) - 8, 'more group')}" if len(groups) > 8 else ""
    verb = "has" if len(found) == 1 else "have"
    text = (
        f"{len(found)} of {values.size} heads {verb} another that is alike, whatever their bases "
        f"(distance below {_ALIKE}; {span})"
        + (
            f", in {words.count(len(groups), 'group')}: {listed}{more}."
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
    p = result["pairs_p_any"].sel(invariant="cka")
    n, other = result.attrs["pairs"], result.attrs["pairs_other"]
    what = f"each text in this model and in {other}" if other else "the two texts of a pair"
    evidence = {"cka": value.values, "p": p.values, "pairs": n}
    null: dict[str, Any] = {"shuffled": result["pairs_null_mean"].sel(invariant="cka").values}
    span = _span(value)
    judged, beyond = p <= _PAIRS_ALPHA, ""
    if "pairs_twin" in result:
        twins = result["pairs_twin"].sel(invariant="cka")
        null["twins_highest"] = twins.max("twin").values
        bounds = attnlens.nulls.twin_range(list(twins), floor=0.05, over="layer")
        judged = judged & attnlens.nulls.above(value, bounds)
        beyond = f"twins: {_span(twins)}"
    layers = [int(i) for i in np.flatnonzero(judged.values)] if beyond else []
    start = f"Representations of {what}"
    if not bool(value.notnull().all()):
        text = (
            f"{start} cannot be compared in all layers: there, the texts do not vary on one side."
        )
        layers = []
    elif layers:
        text = (
            f"{start} are more alike at the input of {words.layers(layers)} than those of texts "
            f"paired at random, and than in twins (debiased CKA, which no rotation changes, "
            f"{span}; {beyond})."
        )
    elif not bool((p <= _PAIRS_ALPHA).any()):
        text = f"{start} are in no layer clearly more alike than by chance (debiased CKA {span})."
    elif beyond:
        text = (
            f"{start} are more alike than by chance, but not clearly more than in twins with "
            f"random weights, whose texts share words too (debiased CKA {span}; {beyond})."
        )
    else:
        text = (
            f"{start} are more alike than by chance (debiased CKA {span}); whether more than with "
            "random weights was not judged: there are no twins."
        )
    biased = result["pairs_null_mean"].sel(invariant="cka_biased").max().item()
    if np.isfinite(biased):
        text += (
            f" With {n} pairs the plain CKA would be {biased:.2f} for texts paired at random, so "
            "that the debiased one is used."
        )
    return attnlens.Finding(
        claim="same-meaning", holds=bool(layers), text=text, null=null,
        evidence={"layers": layers, **evidence},
    )  # fmt: skip


def _span(values: xr.DataArray) -> str:
    return words.span(values.min().item(), values.max().item())


def _cells(mask: xr.DataArray) -> dict[str, tuple[int, int]]:
    mask = mask.transpose("layer", "head")
    layers, heads = mask["layer"].values, mask["head"].values
    found = [(int(layers[i]), int(heads[j])) for i, j in np.argwhere(mask.values)]
    return {f"{i}.{j}": (i, j) for i, j in found}
