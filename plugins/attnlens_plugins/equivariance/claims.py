"""What ``equivariance`` says: certificates of the architecture, then claims about the heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.equivariance.checks import Check, checks
from attnlens_plugins.equivariance.distances import EQUAL

#: Families of heads that are tested at once.
_FAMILIES = 3
ALPHA = attnlens.nulls.ALPHA / _FAMILIES
#: Spread of positionality, and of a nearest distance, below which a difference means nothing.
_POSITION_FLOOR, _NEAR_FLOOR = 0.05, 0.02
#: A positional head is above the one, a content head below the other.
_POSITIONAL, _CONTENT = 0.8, 0.2
#: Heads farther apart than this are not called alike, whatever the twins' heads are.
_ALIKE = 0.7

_LAW = "This follows from the architecture, and is no claim about what was learned."


def findings(result: xr.Dataset) -> Iterator[attnlens.Finding]:
    """State the certificates, then judge the heads beside the twins."""
    rows = {check.name: check for check in checks(result)}
    yield _permutation(result, rows)
    yield _softmax(result, rows)
    if "gauge-qk" in rows or "gauge-vo" in rows:
        yield _gauge(result, rows)
    if "rotation" in rows:
        yield _rotation(result, rows)
    yield _positional(result, "positional-heads", above=True)
    yield _positional(result, "content-heads", above=False)
    if "distance" in result:
        yield _equal(result)
        yield _alike(result)
    if "pairs_value" in result:
        yield _pairs(result)


# -- certificates ---------------------------------------------------------------------------------


def _outcome(rows: Sequence[Check]) -> tuple[bool, str]:
    """Tell whether symmetries hold everywhere, and in words where they do not."""
    heads = [head for row in rows for head in row.heads]
    broken = [i for row in rows for i, v in enumerate(row.verdicts) if v == "fails"]
    vague = sorted({i for row in rows for i, v in enumerate(row.verdicts) if v == "undecided"})
    if heads:
        return False, f"It fails in {_heads(list(dict.fromkeys(heads)))}."
    if broken:
        return False, f"It fails in {_layers(broken)}."
    if vague:
        return False, f"The dtype is too coarse to decide it in {_layers(vague)}."
    return True, ""


def _evidence(rows: Sequence[Check]) -> dict[str, Any]:
    return {
        row.name: {
            "largest": float(np.nanmax(row.value)),
            "allowed": float(np.nanmax(row.tolerance)),
            "failing": list(row.heads),
        }
        for row in rows
        if row.must_hold
    }


def _permutation(result: xr.Dataset, rows: dict[str, Check]) -> attnlens.Finding:
    check = rows["permutation"]
    holds, why = _outcome([check])
    n = result.sizes["layer"] * result.sizes["head"]
    if holds:
        text = (
            f"Attention is blind to order: permuting tokens, positions and mask together permutes "
            f"the output of all {n} heads (largest departure {_small(check.value)}; rounding "
            f"allows {_small(check.tolerance)}). {_LAW}"
        )
    else:
        text = f"Permuting tokens, positions and mask together should permute the output. {why}"
    left = [
        f"{_percent(rows[name].value)} when {what} stay{'s' if name == 'mask-left' else ''} behind"
        for name, what in (("positions-left", "positions"), ("mask-left", "the mask"))
        if name in rows
    ]
    if left:
        text += (
            f" All that the model knows of order is in its positions and mask, so that it is not "
            f"expected to hold without them: the output changes by {' and by '.join(left)}."
        )
    else:
        text += " There are neither positions nor a mask that could break it."
    return attnlens.Finding(
        claim="certificate.permutation", holds=holds, text=text, evidence=_evidence([check])
    )


def _softmax(result: xr.Dataset, rows: dict[str, Check]) -> attnlens.Finding:
    parts = [rows[name] for name in ("shift", "key-bias") if name in rows]
    promised = [row for row in parts if row.must_hold]
    holds, why = _outcome(promised)
    texts = []
    if not parts:
        holds, texts = False, ["The pattern cannot be reached, so softmax was not checked."]
    elif result.attrs["sinks"]:
        shift = rows["shift"]
        texts.append(
            f"Adding a constant to a row of scores changes the pattern (by up to "
            f"{np.nanmax(shift.value):.2g}): the sinks stand beside the row and do not move along."
        )
    elif holds:
        texts.append(
            "Adding a constant to a row of scores changes nothing "
            f"(largest change {_small(rows['shift'].value)})."
        )
    else:
        texts.append(f"Adding a constant to a row of scores should change nothing. {why}")
    dims = result["key_bias_null_dims"].values
    d_head = _head_width(result)
    if "scale" in rows:
        texts.append(f"Doubling the scores moves {_percent(rows['scale'].value)} of the weight.")
    if parts and dims.max() > 0:
        where = f"all {d_head}" if dims.min() == d_head else f"{dims.max()} of {d_head}"
        texts.append(
            f"A vector added to all keys, such as the key bias, changes nothing on {where} "
            "dimensions of each head"
            + (", those that no rotary embedding turns." if dims.min() < d_head else ".")
        )
    elif parts and "key-bias-bound" in rows:
        texts.append(
            "No direction of the keys is null: a vector added to all of them moves "
            f"{_percent(rows['key-bias-bound'].value)} of the weight."
        )
    return attnlens.Finding(
        claim="certificate.softmax",
        holds=holds and not result.attrs["sinks"],
        text=" ".join(texts),
        evidence={**_evidence(promised), "null_dimensions": dims},
    )


def _head_width(result: xr.Dataset) -> int:
    groups = result.get("gauge_vo_group")
    if groups is not None and str(groups.values[0]).startswith("GL("):
        return int(str(groups.values[0])[3:-1])
    return int(result["key_bias_null_dims"].max())


def _gauge(result: xr.Dataset, rows: dict[str, Check]) -> attnlens.Finding:
    parts = [rows[name] for name in ("gauge-qk", "gauge-vo") if name in rows]
    holds, why = _outcome(parts)
    inside = result["gauge_logits_inside"].item()
    outside = result["gauge_logits_outside"].item()
    allowed = result["gauge_logits_allowed"].item()
    still = [
        name
        for name in ("gauge-qk-outside", "gauge-vo-outside")
        if name in rows and "no change" in rows[name].verdicts
    ]
    if holds and inside > allowed:
        holds, why = False, f"The logits move by {inside:.1e} (allowed: {allowed:.1e})."
    if holds and (still or outside <= allowed):
        holds, why = False, "Maps outside the group change nothing either, so it was not tested."
    dims = int(result["gauge_qk_dims"].sum() + result["gauge_vo_dims"].sum())
    total = result.attrs["attention_parameters"]
    groups = " or ".join(dict.fromkeys(str(g) for g in result["gauge_qk_group"].values))
    values = " or ".join(dict.fromkeys(str(g) for g in result["gauge_vo_group"].values))
    shared = " per group of heads that share keys and values" if result.attrs["grouped"] else ""
    if holds:
        text = (
            f"The basis inside a head is arbitrary: another basis in all heads at once moves the "
            f"logits by {inside:.1e} of the largest (rounding allows {allowed:.1e}), maps outside "
            f"the group move them by {outside:.2g}. The group is {groups} for queries and keys and "
            f"{values} for values and outputs{shared}: {dims:,} of {total:,} attention parameters "
            f"({dims / total:.1%}) are redundant. Patterns and results are the same in any basis; "
            f"q, k, v and z are not. {_LAW}"
        )
    else:
        text = f"Another basis of each head ({groups}; {values}) should change nothing. {why}"
    return attnlens.Finding(
        claim="certificate.gauge",
        holds=holds,
        text=text,
        evidence={
            **_evidence(parts),
            "logits": {"inside": inside, "outside": outside, "allowed": allowed},
            "redundant_dimensions": dims,
        },
    )


def _rotation(result: xr.Dataset, rows: dict[str, Check]) -> attnlens.Finding:
    check = rows["rotation"]
    worst = float(np.nanmax(check.value))
    logits = result["rotation_logits"].item()
    allowed = result["rotation_logits_allowed"].item()
    holds = all(v in ("holds", "none") for v in _judged(check)) and logits <= allowed
    d = result.attrs["d_model"]
    if holds:
        text = (
            f"The residual stream has no preferred basis: its norms commute with rotations in "
            f"O({d}) once their gains are folded into the weights (largest departure {worst:.1e}; "
            f"logits move by {logits:.1e} of the largest, rounding allows {allowed:.1e}). {_LAW}"
        )
    else:
        text = (
            f"The residual stream has a preferred basis: a rotation changes a norm's output by "
            f"{np.nanmin(check.value):.1%} to {worst:.1%}, and the logits by {logits:.2g} of the "
            f"largest. {_reason(result, rows)}"
        )
    return attnlens.Finding(
        claim="certificate.rotation",
        holds=holds,
        text=text,
        evidence={"largest": worst, "logits": logits, "logits_allowed": allowed},
    )


def _judged(check: Check) -> list[str]:
    """Judge a row as a symmetry, whether or not the architecture promises it."""
    return [
        "none" if not np.isfinite(v) else "holds" if v <= t else "fails"
        for v, t in zip(check.value, check.tolerance, strict=True)
    ]


def _reason(result: xr.Dataset, rows: dict[str, Check]) -> str:
    kept = rows.get("rotation-kept")
    if kept is not None and all(v in ("holds", "none") for v in _judged(kept)):
        return (
            "Its LayerNorms subtract the mean, which singles out the all-ones direction; rotations "
            f"that keep it, O({result.attrs['d_model'] - 1}), change nothing."
        )
    named = [str(name) for name in result["rotation_norm"].values]
    if any(name.endswith("_post") for name in named):
        return "Norms behind attention and MLP write to the stream with a gain for each dimension."
    if not result.attrs["pre_norm"]:
        return "Its norms write to the stream, with a gain for each dimension."
    return ""


# -- claims about heads -----------------------------------------------------------------------------


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
        f"{len(found)} of {total} heads {lead}: positionality {min(own.values()):.2f} to "
        f"{max(own.values()):.2f} (0 is content, 1 is position; twins: {twins.min().item():.2f} to "
        f"{twins.max().item():.2f}): {_some(list(own))}."
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
    return attnlens.Finding(
        claim="equal-heads",
        holds=True,
        text=f"{len(pairs)} pairs of heads are the same up to a change of basis, so that each pair "
        f"can be merged into one head with twice the output: {_some(named)}.",
        evidence={"pairs": named},
    )


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
    span = f"twins: {twins.min().item():.2f} to {twins.max().item():.2f}"
    if not found:
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"No heads are clearly alike: the distance to the nearest other head is "
            f"{values.min().item():.2f} to {values.max().item():.2f} (0 is equal, 1 unrelated; "
            f"{span}).",
            null=null,
        )
    groups = _groups(result, set(found))
    listed = "; ".join(", ".join(group) for group in groups[:8])
    more = f"; and {len(groups) - 8} more groups" if len(groups) > 8 else ""
    text = (
        f"{len(found)} of {values.size} heads have another that is alike, whatever their bases "
        f"(distance below {_ALIKE}; {span})"
        + (f", in {len(groups)} groups: {listed}{more}." if groups else f": {_some(list(found))}.")
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
    span = f"{value.min().item():.2f} to {value.max().item():.2f}"
    if layers:
        text = (
            f"Representations of {what} agree up to a rotation in {_layers(layers)}, more than "
            f"those of texts paired at random{learned} (debiased CKA {span}). {caveat}"
        )
    else:
        text = (
            f"Representations of {what} agree in no layer clearly more than by chance (debiased "
            f"CKA {span}). {caveat}"
        )
    return attnlens.Finding(
        claim="same-meaning",
        holds=bool(layers),
        text=text,
        evidence={"layers": layers, "cka": value.values, "p": p.values, "pairs": n},
        null=null,
    )


# -- words --------------------------------------------------------------------------------------


def _cells(mask: xr.DataArray) -> dict[str, tuple[int, int]]:
    mask = mask.transpose("layer", "head")
    layers, heads = mask["layer"].values, mask["head"].values
    found = [(int(layers[i]), int(heads[j])) for i, j in np.argwhere(mask.values)]
    return {f"{i}.{j}": (i, j) for i, j in found}


def _some(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _heads(names: Sequence[str]) -> str:
    return f"head{'s' if len(names) > 1 else ''} {_some(names)}"


def _layers(numbers: Sequence[int]) -> str:
    unique = sorted(set(numbers))
    return f"layer{'s' if len(unique) > 1 else ''} {_some([str(n) for n in unique])}"


def _small(values: Any) -> str:
    return f"{np.nanmax(values):.1e}"


def _percent(values: Any) -> str:
    low, high = np.nanmin(values), np.nanmax(values)
    return f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
