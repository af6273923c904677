"""Certificates in words: symmetries that the architecture promises, and whether they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    """Tell whether symmetries hold wherever they were tested, and in words what is not so.

    It holds if some layer was tested and none fails; what was not tested is named in any case.
    """
    wrong, vague, held = [], [], False
    for row in rows:
        lead = "It" if len(rows) == 1 else f"The check of {row.what.removeprefix('… ')}"
        if row.name.endswith("-logits"):
            lead = "The check of all layers at once, at the logits,"
        where = [i for i, v in enumerate(row.verdicts) if v == "fails"]
        unnamed = [i for i in where if not any(h.startswith(f"{i}.") for h in row.heads)]
        places = [words.heads(row.heads)] * bool(row.heads)
        places += [words.layers(unnamed)] * bool(unnamed)
        if where and row.name.endswith("-logits"):
            wrong.append(
                f"The logits move by {row.value[-1]:.1e} (rounding allows {row.tolerance[-1]:.1e})."
            )
        elif places:
            wrong.append(f"{lead} fails in {' and in '.join(places)}.")
        vague.append(_not_told(row, lead))
        held |= "holds" in row.verdicts
    if wrong:
        return False, " ".join(wrong)
    vague = [text for text in vague if text]
    return held and not any(_undecided(row) for row in rows), " ".join(vague)


def _undecided(row: Check) -> bool:
    """Whether a row leaves open what its sentence says.

    The sentence on bases names the layers that it is about, so that others may be untested.
    """
    told = [v for v in row.verdicts if v != "none"]
    allowed = row.unknown if row.name.startswith("gauge") and "holds" in told else ()
    return any(v == "undecided" and i not in allowed for i, v in enumerate(row.verdicts))


def _not_told(row: Check, lead: str) -> str:
    """Say of which layers and heads a symmetry says nothing."""
    coarse = [i for i, v in enumerate(row.verdicts) if v == "undecided" and i not in row.unknown]
    alone = [head for head in row.untested if int(head.split(".")[0]) not in row.unknown]
    parts = []
    if coarse:
        parts.append(f"{lead} is undecided in {words.layers(coarse)}: the dtype is too coarse.")
    if row.unknown or alone:
        where = [words.layers(row.unknown)] * bool(row.unknown)
        where += [words.heads(alone)] * bool(alone)
        parts.append(f"{lead} was not tested in {' and '.join(where)}{_why(row)}.")
    return " ".join(parts)


def _why(row: Check) -> str:
    if row.untested:
        return ": what should change something changes nothing there either"
    return ""


def _evidence(rows: Sequence[Check]) -> dict[str, Any]:
    return {
        row.name: {
            "largest": float(np.nanmax(row.value)),
            "allowed": float(np.nanmax(row.tolerance)),
            "failing": list(row.heads),
            "untested": list(row.untested),
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
            f"allows {words.small(check.tolerance)}). {why} {_LAW}"
        ).replace("  ", " ")
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
            f"(largest change {words.small(rows['shift'].value)}). {why}".strip()
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
    names = ("head-order", "gauge-qk", "gauge-vo", "gauge-logits")
    parts = [rows[name] for name in names if name in rows and rows[name].must_hold]
    holds, why = _outcome(parts)
    inside = result["gauge_logits_inside"].item()
    outside = result["gauge_logits_outside"].item()
    allowed = result["gauge_logits_allowed"].item()
    if holds and not outside > allowed:
        holds, why = False, "Maps outside the group change nothing either, so it was not tested."
    dims = int(result["gauge_qk_dims"].sum() + result["gauge_vo_dims"].sum())
    total = result.attrs["attention_parameters"]
    groups = " or ".join(dict.fromkeys(str(g) for g in result["gauge_qk_group"].values))
    values = " or ".join(dict.fromkeys(str(g) for g in result["gauge_vo_group"].values))
    shared = " per group of heads that share keys and values" if result.attrs["grouped"] else ""
    if holds:
        text = (
            f"The basis inside a head is arbitrary{_where(parts)}: another basis in all heads at "
            f"once moves the logits by {inside:.1e} of the largest (rounding allows {allowed:.1e}),"
            f" maps outside the group move them by {outside:.2g}. The group is {groups} for "
            f"queries and keys and {values} for values and outputs{shared}: at least {dims:,} of "
            f"{total:,} attention parameters ({dims / total:.1%}) are redundant, without those of "
            f"the biases alone. {why} {_order(result, rows)}Patterns and results are the same "
            f"in any basis; q, k, v and z are not. {_LAW}"
        ).replace("  ", " ")
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


def _where(parts: Sequence[Check]) -> str:
    """Name the layers that a certificate is about, if these are not all."""
    rows = [row for row in parts if row.name.startswith("gauge") and row.name != "gauge-logits"]
    layers = range(max(len(row.verdicts) for row in rows))
    good = [i for i in layers if all(r.verdicts[i] in ("holds", "none") for r in rows)]
    return "" if len(good) == len(layers) else f" in {words.layers(good)}"


def _order(result: xr.Dataset, rows: dict[str, Check]) -> str:
    check = rows.get("head-order")
    if check is None:
        return ""
    if not check.must_hold:
        return f"Heads may not be listed in another order: {check.what.partition('(')[2][:-1]}. "
    own = result.attrs["own_by_head"]
    along = f", each with {own}" if own else ""
    if result.attrs["grouped"]:
        return (
            "Heads that share keys and values may be listed in any order among themselves, and "
            f"their groups in any order{along}. "
        )
    return f"Heads may be listed in any order, too{along}. "


def _rotation(result: xr.Dataset, rows: dict[str, Check]) -> attnlens.Finding:
    both = [rows["rotation"], rows["rotation-logits"]]
    worst = float(np.nanmax(both[0].value))
    logits, allowed = result["rotation_logits"].item(), float(both[1].tolerance[-1])
    # Whether it holds is judged whatever the architecture promises.
    holds, why = _outcome([replace(row, must_hold=True) for row in both])
    verdicts = [v for row in both for v in replace(row, must_hold=True).verdicts]
    d = result.attrs["d_model"]
    if holds:
        text = (
            f"The residual stream has no preferred basis: carried through the model in a basis "
            f"turned by a rotation in O({d}), with the norms' gains folded into the weights, it "
            f"moves the logits by {logits:.1e} of the largest (rounding allows {allowed:.1e}; "
            f"largest departure of a layer {worst:.1e}). {_LAW}"
        )
    elif "fails" in verdicts:
        low = float(np.nanmin(both[0].value))
        text = (
            f"The residual stream has a preferred basis: a rotation changes what a layer adds to "
            f"it by {low:.1%} to {worst:.1%}, and the logits by {logits:.2g} of the "
            f"largest. {_reason(result, rows, why)}"
        ).strip()
    else:
        text = f"Whether the residual stream has a preferred basis was not decided. {why}".strip()
    return attnlens.Finding(
        claim="certificate.rotation",
        holds=holds,
        text=text,
        evidence={"largest": worst, "logits": logits, "logits_allowed": allowed},
    )


def _reason(result: xr.Dataset, rows: dict[str, Check], why: str) -> str:
    if rows["rotation"].must_hold:
        return f"The architecture promises that it has none. {why}"
    kept = [rows[name] for name in ("rotation-kept", "rotation-kept-logits") if name in rows]
    if kept:
        holds, departs = _outcome(kept)
        if holds:
            return (
                "Its LayerNorms subtract the mean, which singles out the all-ones direction; "
                f"rotations that keep it, O({result.attrs['d_model'] - 1}), change nothing."
            )
        return f"Rotations that keep the all-ones direction should change nothing. {departs}"
    named = [str(name) for name in result["rotation_norm"].values]
    if any(name.endswith("_post") for name in named):
        return "Norms behind attention and MLP write to the stream with a gain for each dimension."
    if not result.attrs["pre_norm"]:
        return "Its norms write to the stream, with a gain for each dimension."
    return ""
