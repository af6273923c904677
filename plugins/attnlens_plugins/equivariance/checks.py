"""The rows of the certificate: what was tried, what it must do, and what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import xarray as xr

from attnlens_plugins.equivariance.rounding import UNDECIDED

Verdict = Literal["holds", "broken", "fails", "undecided", "no change", "none"]


@dataclass(frozen=True)
class Check:
    """One row: a change that the model should not notice, or one that it should.

    Attributes
    ----------
    name : str
        Stable and short.
    symmetry : str
        The symmetry that it belongs to, for people.
    what : str
        What was changed.
    must_hold : bool
        Whether the architecture promises that nothing moves.
    value, tolerance : float64[layer]
        The largest change among the layer's heads and what rounding may do to it, for a symmetry;
        the mean over heads for what should break it. NaN where it does not apply.
    heads : tuple of str
        Heads of a symmetry that fail, as ``layer.head``.
    untested : tuple of str
        Heads of which nothing is known: what should have changed them did not either.
    unknown : tuple of int
        Layers in which nothing was tested.
    """

    name: str
    symmetry: str
    what: str
    must_hold: bool
    value: Any
    tolerance: Any
    heads: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    unknown: tuple[int, ...] = ()

    def verdict(self, layer: int) -> Verdict:
        """Judge one layer; what was not tested, or drowns in rounding, is undecided."""
        value, allowed = float(self.value[layer]), float(self.tolerance[layer])
        if layer in self.unknown:
            return "undecided"
        if np.isnan(value) and (np.isnan(allowed) or not self.must_hold):
            return "none"
        if not self.must_hold:
            if value > max(allowed, 0.0):
                return "broken"
            return "undecided" if allowed > UNDECIDED else "no change"
        return judged(value, allowed)

    @property
    def verdicts(self) -> list[Verdict]:
        """Judge all layers."""
        return [self.verdict(i) for i in range(len(self.value))]

    @property
    def applies(self) -> bool:
        """Whether it applies to any layer."""
        return any(v != "none" for v in self.verdicts)


def judged(value: float, allowed: float) -> Verdict:
    """Judge a change that a symmetry should not make: NaN fails, too."""
    if not value <= allowed:
        return "fails"
    return "holds" if allowed <= UNDECIDED else "undecided"


#: name, symmetry, what, must hold, variable, tolerance's variable
_HEADS: tuple[tuple[str, str, str, bool, str, str], ...] = (
    (
        "permutation", "order of tokens", "tokens, positions and mask permuted together", True,
        "permutation_error", "permutation_tolerance",
    ),
    (
        "positions-left", "order of tokens", "… but positions left behind", False,
        "positions_broken", "permutation_tolerance",
    ),
    (
        "mask-left", "order of tokens", "… but the mask left behind", False,
        "mask_broken", "permutation_tolerance",
    ),
    (
        "shift", "softmax", "a constant added to each row of scores", True,
        "shift_error", "shift_tolerance",
    ),
    (
        "scale", "softmax", "… but the scores doubled", False, "scale_change", "shift_tolerance",
    ),
    (
        "key-bias", "softmax", "a vector added to all keys{null}", True,
        "key_bias_error", "key_bias_tolerance",
    ),
    (
        "key-bias-bound", "softmax", "{but} {bound} dimensions", False,
        "key_bias_change", "shift_tolerance",
    ),
    (
        "head-order", "heads and their bases", "heads in another order", True,
        "heads_error", "heads_tolerance",
    ),
    (
        "gauge-qk", "heads and their bases", "queries and keys in another basis", True,
        "gauge_qk_error", "gauge_qk_tolerance",
    ),
    (
        "gauge-qk-outside", "heads and their bases", "… but outside the group", False,
        "gauge_qk_outside", "gauge_qk_tolerance",
    ),
    (
        "gauge-vo", "heads and their bases", "values and outputs in another basis", True,
        "gauge_vo_error", "gauge_vo_tolerance",
    ),
    (
        "gauge-vo-outside", "heads and their bases", "… but values alone", False,
        "gauge_vo_outside", "gauge_vo_tolerance",
    ),
)  # fmt: skip


def checks(result: xr.Dataset) -> list[Check]:
    """Return the rows of a result's certificate that apply to the model."""
    return [check for check in _all(result) if check.applies]


def _all(result: xr.Dataset) -> Iterator[Check]:
    words = _words(result)
    for name, symmetry, what, must, variable, allowed in _HEADS:
        if variable not in result or allowed not in result:
            continue
        values = result[variable].transpose("layer", "head").values
        tolerance = result[allowed].transpose("layer", "head").values
        if name == "shift" and result.attrs["sinks"]:
            must, what = False, what + " (there are sinks)"
        if name == "head-order" and result.attrs["numbered_heads"]:
            must, what = False, what + f" ({result.attrs['numbered_heads']})"
        what = what.format(**words)
        if must:
            yield _symmetry(result, name, symmetry, what, values, tolerance)
        else:
            yield Check(name, symmetry, what, must, _mean(values), np.nan_to_num(tolerance).max(1))
        if name == "gauge-vo-outside":
            yield _at_the_logits("gauge-logits", symmetry, result, "gauge_logits_inside",
                                 "gauge_logits_allowed", must_hold=True)  # fmt: skip
    yield from _rotation(result)


#: Symmetry -> the variables' prefix for what the layer writes, all heads together.
_OUTPUT = {"permutation": "permutation_output", "head-order": "heads_output",
           "gauge-vo": "gauge_vo_output"}  # fmt: skip


def _symmetry(
    result: xr.Dataset, name: str, symmetry: str, what: str, values: Any, tolerance: Any
) -> Check:
    """Judge all heads and what they write together; leave out heads that nothing changes."""
    # What came out as NaN though it was tried is no small change.
    values = np.where(np.isnan(values) & np.isfinite(tolerance), np.inf, values)
    untested = np.zeros(values.shape, dtype=bool)
    unknown = np.zeros(len(values), dtype=bool)
    prefix = name.replace("-", "_")
    if f"{prefix}_outside" in result:
        outside = result[f"{prefix}_outside"].transpose("layer", "head").values
        untested = np.isfinite(values) & (np.maximum(outside, values) <= tolerance)
        untested &= tolerance <= UNDECIDED
        unknown = untested.all(1) | ~result[f"{prefix}_known"].values
        values = np.where(untested & ~unknown[:, None], np.nan, values)
    beyond = (values > tolerance) & ~unknown[:, None]
    if name in _OUTPUT and f"{_OUTPUT[name]}_error" in result:
        both = [result[f"{_OUTPUT[name]}_{end}"].values[:, None] for end in ("error", "tolerance")]
        values, tolerance = (
            np.hstack(pair) for pair in zip((values, tolerance), both, strict=True)
        )
    shown, allowed = _worst(values, tolerance)
    return Check(
        name, symmetry, what, True, shown, allowed, _names(beyond), _names(untested),
        tuple(np.flatnonzero(unknown).tolist()),
    )  # fmt: skip


def _at_the_logits(
    name: str, symmetry: str, result: xr.Dataset, change: str, allowed: str, *, must_hold: bool
) -> Check:
    """Judge the whole model at once, which is seen behind the last layer."""
    values, tolerance = (np.full(result.sizes["layer"], np.nan) for _ in range(2))
    values[-1], tolerance[-1] = result[change].item(), result[allowed].item()
    what = "… in all layers at once, at the logits"
    return Check(name, symmetry, what, must_hold, values, tolerance)


def _words(result: xr.Dataset) -> dict[str, str]:
    acting = [
        word
        for word, there in (
            ("rotated", result.attrs["positions"] == "rotary"),
            ("normalised", result.attrs["qk_norm"]),
            ("soft-capped", result.attrs["soft_capped"]),
        )
        if there
    ]
    partly = bool(result["key_bias_error"].notnull().any())
    bound = bool(result["key_bias_change"].notnull().any())
    return {
        "null": ", on unrotated dimensions" if bound else "",
        "but": "… but on" if partly else "a vector added to all keys, on",
        "bound": " or ".join(acting) or "other",
    }


def _rotation(result: xr.Dataset) -> Iterator[Check]:
    allowed = result["rotation_tolerance"].values
    unknown = tuple(np.flatnonzero(~result["rotation_carried"].values).tolist())
    symmetry = "basis of the residual stream"
    # An RMSNorm that nothing but its gain follows commutes with rotations; others should not.
    kinds = [("rotation", "rotation_logits", "the stream rotated", rotation_promised(result))]
    if result.attrs["norm"] == "layer" and result.attrs["pre_norm"]:
        kinds.append(
            ("rotation-kept", "rotation_kept_logits", "… keeping the all-ones direction", True)
        )
    for name, logits, what, must in kinds:
        values = result[f"{name.replace('-', '_')}_error"].values
        yield Check(name, symmetry, what, must, values, allowed, unknown=unknown)
        whole = _at_the_logits(f"{name}-logits", symmetry, result, logits,
                               "rotation_logits_allowed", must_hold=must)  # fmt: skip
        yield replace(whole, unknown=(len(values) - 1,) if unknown else ())


def rotation_promised(result: xr.Dataset) -> bool:
    """Whether the architecture promises that any rotation of the stream changes nothing."""
    return result.attrs["norm"] == "rms" and not _gains_outside(result)


def _gains_outside(result: xr.Dataset) -> bool:
    """Whether norms write to the stream, so that their gains are on the wrong side."""
    named = [str(name) for name in result["rotation_norm"].values]
    return not result.attrs["pre_norm"] or any(name.endswith("_post") for name in named)


def _names(mask: Any) -> tuple[str, ...]:
    return tuple(f"{i}.{j}" for i, j in np.argwhere(mask))


def _worst(values: Any, tolerance: Any) -> tuple[Any, Any]:
    """Of each layer, what exceeds its tolerance most; else what could be told least, or nearest."""
    known = ~np.isnan(values)
    ratio = np.where(known, np.where(known, values, 0) / np.maximum(tolerance, 1e-300), -1.0)
    coarse = known & (tolerance > UNDECIDED)
    vague = coarse.any(1, keepdims=True) & (ratio.max(1, keepdims=True) <= 1)
    at = np.where(vague, np.where(coarse, tolerance, -1.0), ratio).argmax(1)
    rows = np.arange(len(values))
    return values[rows, at], tolerance[rows, at]


def _mean(values: Any) -> Any:
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known.any(1), total / known.sum(1), np.nan)
