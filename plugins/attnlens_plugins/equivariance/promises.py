"""Certificates in words: symmetries that the architecture promises, and whether they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.equivariance import words
from attnlens_plugins.equivariance.checks import Check, checks

_LAW = "This follows from the architecture, and is no claim about what was learned."


def certificates(result: xr.Dataset) -> Iterator[attnlens.Finding]:
    """State which symmetries hold, and what breaks the others."""
    rows = {check.name: check for check in checks(result)}
    yield _permutation(result, rows)
    yield _softmax(result, rows)
    if "gauge-qk" in rows or "gauge-vo" in rows:
        yield _gauge(result, rows)
    if "rotation" in rows:
        yield _rotation(result, rows)


def _outcome(rows: Sequence[Check]) -> tuple[bool, str]:
    """Tell whether symmetries hold everywhere, and in words where they do not."""
    heads = [head for row in rows for head in row.heads]
    broken = [i for row in rows for i, v in enumerate(row.verdicts) if v == "fails"]
    vague = sorted({i for row in rows for i, v in enumerate(row.verdicts) if v == "undecided"})
    if heads:
        return False, f"It fails in {words.heads(list(dict.fromkeys(heads)))}."
    if broken:
        return False, f"It fails in {words.layers(broken)}."
    if vague:
        return False, f"The dtype is too coarse to decide it in {words.layers(vague)}."
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
            f"the output of all {n} heads (largest departure {words.small(check.value)}; rounding "
            f"allows {words.small(check.tolerance)}). {_LAW}"
        )
    else:
        text = f"Permuting tokens, positions and mask together should permute the output. {why}"
    left = [
        f"{words.percent(rows[name].value)} when {what} behind"
        for name, what in (("positions-left", "positions stay"), ("mask-left", "the mask stays"))
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
            f"(largest change {words.small(rows['shift'].value)})."
        )
    else:
        texts.append(f"Adding a constant to a row of scores should change nothing. {why}")
    dims = result["key_bias_null_dims"].values
    d_head = _head_width(result)
    if "scale" in rows:
        texts.append(
            f"Doubling the scores moves {words.percent(rows['scale'].value)} of the weight."
        )
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
            f"{words.percent(rows['key-bias-bound'].value)} of the weight."
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
    parts = [rows[name] for name in ("head-order", "gauge-qk", "gauge-vo") if name in rows]
    parts = [row for row in parts if row.must_hold]
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
            f"({dims / total:.1%}) are redundant. {_order(rows)}Patterns and results are the same "
            f"in any basis; q, k, v and z are not. {_LAW}"
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


def _order(rows: dict[str, Check]) -> str:
    check = rows.get("head-order")
    if check is None:
        return ""
    if check.must_hold:
        return "Heads may be listed in any order, too. "
    return f"Heads may not be listed in another order: {check.what.partition('(')[2][:-1]}. "


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
