"""What ``cp`` claims: only what lies clearly outside the twins, all claims judged together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.cp.clusters import REASONABLE
from attnlens_plugins.cp.heads import ENERGY

#: Families of heads, all tested at once on every run.
_FAMILIES = 6
ALPHA = attnlens.nulls.ALPHA / _FAMILIES

#: claim: measure, spread below which nothing is claimed, least value, and what is said.
_TYPES: dict[str, tuple[str, float, float, str]] = {
    "previous-token-heads": (
        "previous_token", 0.03, 0.3, "put {0} of their attention on the token before"
    ),
    "sink-heads": ("sink", 0.03, 0.3, "put {0} of their attention on the first token"),
    "duplicate-token-heads": (
        "duplicate_token", 0.03, 0.2,
        "put {0} of their attention on the same token's last occurrence (random tokens)",
    ),
    "induction-heads": (
        "induction", 0.03, 0.3,
        "put {0} of their attention on the token after its last occurrence (random tokens)",
    ),
}  # fmt: skip
#: Spread of a head's rebuild error below which nothing is claimed, and the most that is redundant.
_REBUILD_FLOOR, _REBUILD_MOST = 0.03, 0.8
#: Spread of a head's explained share below which a difference means nothing.
_EXPLAINED_FLOOR = 0.02
#: The best silhouette is one number for each twin, and three of them say little about its spread.
#: Among models with random weights (tests, 2 x 4 to 12 x 12 heads) its standard deviation stays
#: under this floor; with it, a claim needs about five such deviations.
_QUALITY_FLOOR, _QUALITY_ALPHA = 0.1, 0.05


def findings(result: xr.Dataset) -> Iterator[attnlens.Finding]:
    """Judge a result."""
    yield _rank(result)
    yield _clusters(result)
    yield _redundant(result)
    for claim in _TYPES:
        yield _type(result, claim)


def typed_heads(result: xr.Dataset) -> dict[str, list[tuple[int, int]]]:
    """Name the heads of each known type: far outside the twins, or plainly so without twins."""
    found = {}
    for measure, floor, least, _ in _TYPES.values():
        if measure in result:
            beyond = _beyond(result, measure, floor, least)
            if beyond is None:
                beyond = result[measure] > max(least, 0.5)
            heads = _cells(beyond)
            if heads:
                found[measure.replace("_", " ")] = heads
    return found


def has_clusters(result: xr.Dataset) -> bool:
    """Tell whether the best partition of heads is more than a cut through a cloud."""
    quality = _quality(result)
    if not quality > REASONABLE:
        return False
    bounds = quality_bounds(result)
    return bounds is None or quality > bounds[1]


def quality_bounds(result: xr.Dataset) -> tuple[float, float] | None:
    """Return between which bounds chance keeps the best silhouette; None without twins."""
    if "quality_twin" not in result:
        return None
    known = result["quality_twin"].dropna("twin")
    if not known.size:  # no twin has as much as one partition
        return (0.0, REASONABLE)
    bounds = attnlens.nulls.twin_range(
        list(known), floor=_QUALITY_FLOOR, over=(), alpha=_QUALITY_ALPHA
    )
    return float(bounds["low"]), float(bounds["high"])


def _quality(result: xr.Dataset) -> float:
    values = result["group_quality"]
    return float(values.max()) if values.size else float("nan")


def _beyond(result: xr.Dataset, measure: str, floor: float, least: float) -> Any:
    if f"{measure}_twin" not in result:
        return None
    bounds = attnlens.nulls.twin_range(list(result[f"{measure}_twin"]), floor=floor, alpha=ALPHA)
    return attnlens.nulls.above(result[measure], bounds) & (result[measure] > least)


def _cells(mask: xr.DataArray) -> list[tuple[int, int]]:
    mask = mask.transpose("layer", "head")
    layers, heads = mask["layer"].values, mask["head"].values
    return [(int(layers[i]), int(heads[j])) for i, j in np.argwhere(mask.values)]


def _names(cells: list[tuple[int, int]]) -> list[str]:
    return [f"{a}.{b}" for a, b in cells]


def _listed(names: list[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _values(values: xr.DataArray, cells: list[tuple[int, int]]) -> dict[str, float]:
    return {f"{a}.{b}": float(values.sel(layer=a, head=b)) for a, b in cells}


def _span(values: list[float], form: str = "{:.0%}") -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _unjudged(claim: str, what: str, why: str) -> attnlens.Finding:
    return attnlens.Finding(claim=claim, holds=False, text=f"{what} not judged: {why}.")


def _type(result: xr.Dataset, claim: str) -> attnlens.Finding:
    measure, floor, least, phrase = _TYPES[claim]
    what = claim.replace("-", " ").capitalize()
    if measure not in result:
        return _unjudged(claim, f"{what} were", "the attention that tells was not captured")
    beyond = _beyond(result, measure, floor, least)
    if beyond is None:
        return _unjudged(claim, f"{what} were", "there are no twins")
    values, twins = result[measure], result[f"{measure}_twin"]
    null = {
        "twins": twins.sizes["twin"],
        "lowest": twins.min().item(),
        "highest": twins.max().item(),
    }
    cells = _cells(beyond)
    if not cells:
        where = np.unravel_index(int(values.fillna(-1).argmax()), values.shape)
        name = f"{values['layer'].values[where[0]]}.{values['head'].values[where[1]]}"
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"No {what.lower()}: the highest score is {values.max().item():.2f} ({name}); "
            f"twins reach {null['highest']:.2f}.",
            evidence={"heads": [], "highest": values.max().item()},
            null=null,
        )
    scores = _values(values, cells)
    said = phrase.format(_span(list(scores.values())))
    return attnlens.Finding(
        claim=claim,
        holds=True,
        text=f"{len(cells)} of {values.size} heads {said}; twins at most {null['highest']:.0%}: "
        f"{_listed(_names(cells))}.",
        evidence={"heads": _names(cells), "scores": scores},
        null=null,
    )


def _redundant(result: xr.Dataset) -> attnlens.Finding:
    claim = "redundant-heads"
    if "rebuild_error_twin" not in result:
        return _unjudged(claim, "Redundancy was", "there are no twins")
    values, twins = result["rebuild_error"], result["rebuild_error_twin"]
    bounds = attnlens.nulls.twin_range(list(twins), floor=_REBUILD_FLOOR, alpha=ALPHA)
    cells = _cells(attnlens.nulls.below(values, bounds) & (values < _REBUILD_MOST))
    rank, of_twins = int(result["head_rank"]), result["head_rank_twin"].values.astype(int)
    share = f"{rank} of {values.size} directions hold {ENERGY:.0%} of the heads' energy"
    evidence = {"heads": _names(cells), "head_rank": rank, "energy": ENERGY}
    null = {
        "lowest": twins.min().item(),
        "highest": twins.max().item(),
        "head_rank": of_twins.tolist(),
    }
    twin_ranks = f"{of_twins.min()} to {of_twins.max()} in twins"
    if not cells:
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"No head is rebuilt by the others much better than in the twins: at least "
            f"{values.min().item():.0%} of its norm is left (twins {null['lowest']:.0%}); "
            f"{share} ({twin_ranks}).",
            evidence=evidence | {"lowest": values.min().item()},
            null=null,
        )
    left = _values(values, cells)
    return attnlens.Finding(
        claim=claim,
        holds=True,
        text=f"{len(cells)} of {values.size} heads are rebuilt by the others with only "
        f"{_span(list(left.values()))} of their norm left (twins at least {null['lowest']:.0%}): "
        f"{_listed(_names(cells))}. {share.capitalize()} ({twin_ranks}).",
        evidence=evidence | {"errors": left},
        null=null,
    )


def _clusters(result: xr.Dataset) -> attnlens.Finding:
    claim = "head-clusters"
    quality, count = _quality(result), int(result.attrs["n_groups"])
    if not np.isfinite(quality):
        why = (
            "one component cannot tell groups apart"
            if result.attrs["rank"] < 2
            else "too few heads differ"
        )
        return attnlens.Finding(
            claim=claim, holds=False, text=f"No clusters of heads: {why}.", evidence={"clusters": 0}
        )
    bounds = quality_bounds(result)
    if bounds is None:
        return _unjudged(claim, "Clusters of heads were", "there are no twins")
    twins = result["quality_twin"].values
    null = {"silhouette": twins.tolist(), "bound": bounds[1]}
    holds = has_clusters(result) and not result.attrs["degenerate"]
    sizes = np.bincount(result["group"].values[result["group"].values >= 0]).tolist()
    evidence = {"clusters": count if holds else 0, "sizes": sizes, "silhouette": quality}
    seen = (
        f"{np.nanmin(twins):.2f} to {np.nanmax(twins):.2f}" if np.isfinite(twins).any() else "none"
    )
    if holds:
        return attnlens.Finding(
            claim=claim,
            holds=True,
            text=f"Heads fall into {count} clusters by their loadings (sizes "
            f"{', '.join(map(str, sizes))}): mean silhouette {quality:.2f}, twins {seen}.",
            evidence=evidence,
            null=null,
        )
    return attnlens.Finding(
        claim=claim,
        holds=False,
        text=f"No clusters of heads: the best partition ({count} groups) has a mean silhouette of "
        f"{quality:.2f}; twins {seen}, and above {max(bounds[1], REASONABLE):.2f} is asked.",
        evidence=evidence,
        null=null,
    )


def _rank(result: xr.Dataset) -> attnlens.Finding:
    claim, attrs = "rank", result.attrs
    explained = 1.0 - float(attrs["error"]) ** 2
    evidence = {
        "rank": int(attrs["rank"]),
        "explained": explained,
        "stable": bool(attrs["stable"]),
        "confidence": float(attrs["confidence"]),
        "degenerate": bool(attrs["degenerate"]),
        "converged": bool(attrs["converged"]),
    }
    text = f"{attrs['reason']} It explains {explained:.0%} of the energy"
    if "explained_twin" not in result:
        return attnlens.Finding(
            claim=claim, holds=False, text=f"{text}; there are no twins.", evidence=evidence
        )
    twins = result["explained_twin"]
    bounds = attnlens.nulls.twin_range(list(twins), floor=_EXPLAINED_FLOOR, alpha=ALPHA)
    values = result["explained"]
    beyond = attnlens.nulls.above(values, bounds) | attnlens.nulls.below(values, bounds)
    of_twins = [1.0 - float(e) ** 2 for e in result["error_twin"].values]
    cells = _cells(beyond)
    evidence["heads"] = _names(cells)
    holds = bool(
        attrs["stable"] and cells and attrs["confidence"] > 0.5 and not attrs["degenerate"]
    )
    text += f" (twins {_span(of_twins)} at this rank)"
    text += (
        f", and {len(cells)} of {values.size} heads far more or less than chance."
        if cells
        else "; no head lies outside what the twins give."
    )
    return attnlens.Finding(
        claim=claim, holds=holds, text=text, evidence=evidence, null={"explained": of_twins}
    )
