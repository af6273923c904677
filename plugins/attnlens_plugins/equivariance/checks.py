"""The rows of the certificate: what was tried, what it must do, and what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    heads : list of str
        Heads of a symmetry that fail, as ``layer.head``.
    """

    name: str
    symmetry: str
    what: str
    must_hold: bool
    value: Any
    tolerance: Any
    heads: tuple[str, ...] = ()

    def verdict(self, layer: int) -> Verdict:
        """Judge one layer."""
        value, allowed = float(self.value[layer]), float(self.tolerance[layer])
        if not np.isfinite(value):
            return "none"
        if not self.must_hold:
            return "broken" if value > max(allowed, 0.0) else "no change"
        if value > allowed:
            return "fails"
        return "undecided" if allowed > UNDECIDED else "holds"

    @property
    def verdicts(self) -> list[Verdict]:
        """Judge all layers."""
        return [self.verdict(i) for i in range(len(self.value))]

    @property
    def applies(self) -> bool:
        """Whether it applies to any layer."""
        return any(v != "none" for v in self.verdicts)


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
        heads: tuple[str, ...] = ()
        if name == "shift" and result.attrs["sinks"]:
            must, what = False, what + " (there are sinks)"
        if name == "head-order" and result.attrs["numbered_heads"]:
            must, what = False, what + f" ({result.attrs['numbered_heads']})"
        if must:
            heads = failing(result[variable], result[allowed])
            shown, allowed_here = _worst(values, tolerance)
        else:
            shown, allowed_here = _mean(values), np.nan_to_num(tolerance).max(1)
        yield Check(name, symmetry, what.format(**words), must, shown, allowed_here, heads)
    yield from _rotation(result)


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
    layers = result.sizes["layer"]
    allowed = np.full(layers, float(result["rotation_tolerance"]))
    symmetry = "basis of the residual stream"
    # An RMSNorm that nothing but its gain follows commutes with rotations; others should not.
    promised = result.attrs["norm"] == "rms" and not _gains_outside(result)
    yield Check(
        "rotation", symmetry, "the stream rotated", promised, result["rotation_error"].values,
        allowed,
    )  # fmt: skip
    if result.attrs["norm"] == "layer" and result.attrs["pre_norm"]:
        yield Check(
            "rotation-kept", symmetry, "… keeping the all-ones direction", True,
            result["rotation_kept_error"].values, allowed,
        )  # fmt: skip


def _gains_outside(result: xr.Dataset) -> bool:
    """Whether norms write to the stream, so that their gains are on the wrong side."""
    named = [str(name) for name in result["rotation_norm"].values]
    return not result.attrs["pre_norm"] or any(name.endswith("_post") for name in named)


def failing(error: xr.DataArray, tolerance: xr.DataArray) -> tuple[str, ...]:
    """Name the heads whose error exceeds what rounding may do, as ``layer.head``."""
    beyond = (error > tolerance).transpose("layer", "head").values
    return tuple(f"{i}.{j}" for i, j in np.argwhere(beyond))


def _worst(values: Any, tolerance: Any) -> tuple[Any, Any]:
    """Of each layer, the head that comes nearest to its tolerance, or exceeds it most."""
    ratio = np.where(np.isfinite(values), values / np.maximum(tolerance, 1e-300), -1.0)
    at = ratio.argmax(1)
    rows = np.arange(len(values))
    return values[rows, at], tolerance[rows, at]


def _mean(values: Any) -> Any:
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known.any(1), total / known.sum(1), np.nan)
