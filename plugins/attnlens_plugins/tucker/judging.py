"""What ``tucker`` claims: few directions, or one interaction that is most of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

import attnlens

#: Claim of each mode, and what its directions are.
_MODES = {
    "head": ("few-head-directions", "heads"),
    "token": ("few-token-directions", "tokens"),
    "query_pos": ("few-query-directions", "query positions"),
    "key_pos": ("few-key-directions", "key positions"),
    "d_model": ("few-feature-directions", "features"),
    "d_head": ("few-feature-directions", "features"),
    "d_model_2": ("few-feature-directions", "features"),
    "d_model_in": ("few-input-directions", "input features"),
    "query_d_model": ("few-query-directions", "query features"),
    "key_d_model": ("few-key-directions", "key features"),
}

#: Ranks are one number for each twin, and three of them say little about their spread. A tenth of
#: the twins' mean, and at least one, is taken as the least spread: a claim then needs about half
#: of the twins' directions.
_SPREAD, _LEAST_SPREAD, _ALPHA = 0.1, 1.0, 0.05
#: Spread of the strongest interaction's share, in the same way.
_SHARE_FLOOR = 0.05


def findings(result: xr.Dataset) -> Iterator[attnlens.Finding]:
    """Judge a result."""
    for name in result.attrs["modes"]:
        yield _mode(result, name)
    yield _strongest(result)


def _bounds(twins: xr.DataArray, floor: float) -> tuple[float, float]:
    found = attnlens.nulls.twin_range(
        list(twins.astype(np.float64)), floor=floor, over=(), alpha=_ALPHA
    )
    return float(found["low"]), float(found["high"])


def _mode(result: xr.Dataset, name: str) -> attnlens.Finding:
    claim, what = _MODES[name]
    count = result[f"rank_{name}"].item()
    size = result.attrs["sizes"][result.attrs["modes"].index(name)]
    share = result.attrs["energy"]
    text = f"{count} of {size} directions hold {share:.0%} of the energy of the {what}"
    evidence: dict[str, Any] = {"directions": count, "of": size, "energy": share}
    if f"rank_{name}_twin" not in result:
        return attnlens.Finding(
            claim=claim, holds=False, text=f"{text}; there are no twins.", evidence=evidence
        )
    twins = result[f"rank_{name}_twin"]
    low, _ = _bounds(twins, max(_SPREAD * float(twins.mean()), _LEAST_SPREAD))
    of_twins = twins.values.astype(int)
    seen = f"{of_twins.min()} to {of_twins.max()}" if np.ptp(of_twins) else f"{of_twins[0]}"
    holds = count < low
    more = count > of_twins.max()
    verdict = "far fewer than" if holds else "more than" if more else "not far fewer than"
    return attnlens.Finding(
        claim=claim,
        holds=holds,
        text=f"{text}, {verdict} in the twins ({seen}).",
        evidence=evidence,
        null={"directions": of_twins.tolist(), "bound": low},
    )


def _strongest(result: xr.Dataset) -> attnlens.Finding:
    claim = "dominant-interaction"
    share = result["share"].values[0].item()
    evidence = {"share": share, "explained": result.attrs["explained"]}
    text = f"The strongest interaction: {result['sentence'].values[0]}"
    if "strongest_twin" not in result:
        return attnlens.Finding(
            claim=claim, holds=False, text=f"{text} There are no twins.", evidence=evidence
        )
    twins = result["strongest_twin"]
    _, high = _bounds(twins, _SHARE_FLOOR)
    return attnlens.Finding(
        claim=claim,
        holds=share > high,
        text=f"{text} Twins' strongest: {twins.min().item():.1%} to {twins.max().item():.1%}.",
        evidence=evidence,
        null={"shares": twins.values.tolist(), "bound": high},
    )
