"""What ``cp`` claims: only what lies clearly outside the twins, all claims judged together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins import words
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
_REBUILD_FLOOR, _REBUILD_MOST = 0.03, 0.5
#: Spread of a head's cohesion below which a difference means nothing, and the least that counts.
_COHESION_FLOOR, _COHESION_LEAST = 0.03, 0.2
#: The least mean silhouette of a partition whose groups may be clusters.
_SILHOUETTE_LEAST = 0.5
#: What is alike in heads whose slices of a tensor are.
_ALIKE = {
    "result": "What they write",
    "z": "What they write",
    "second_moment": "Where in the residual stream they write",
    "pattern": "Where they attend",
    "qk": "What they match",
    "ov": "What they read and write",
}
#: Core consistency, in percent, under which components are no clean trilinear model.
_CONSISTENT = 50
#: The share of the energy that a fit explains is one number for each twin, and three of them say
#: little about its spread. Among random models of 2 x 4 to 12 x 12 heads its standard deviation
#: is about 0.02; with this floor a claim needs about 0.3.
_SHARE_FLOOR, _SHARE_ALPHA = 0.06, 0.05


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


def cluster_labels(result: xr.Dataset) -> xr.DataArray:
    """Give the groups of heads that are clusters a number from 0, all other heads -1.

    Where nothing speaks against clusters as such, a group of two or more heads is one when at
    least half of them are far more like their group, in their whole slices of the tensor, than
    heads of the twins are like theirs (without twins: when their cohesion is above a half).
    """
    label = result["group"]
    found = np.full(label.shape, -1)
    if _unclustered(result) is not None:
        return label.copy(data=found)
    flags = _cohesive(result).transpose(*label.dims).values
    number = 0
    for kind in range(int(label.max()) + 1):
        members = label.values == kind
        if members.sum() >= 2 and flags[members].mean() >= 0.5:
            found[members] = number
            number += 1
    return label.copy(data=found)


def _unclustered(result: xr.Dataset) -> str | None:
    """Say why no group of heads can be a cluster; None where one can."""
    attrs = result.attrs
    if attrs["degenerate"]:
        return "the components cancel each other (degenerate)"
    if result.sizes.get("part", 1) > 1:
        return "layers were decomposed each alone, and their components have nothing in common"
    if attrs["rank"] < 2:
        return "one component cannot tell groups apart"
    if not result["group_quality"].size:
        wanted, n = attrs["clusters"], result["group"].size
        if wanted != "auto" and int(wanted) >= n:
            return f"{wanted} groups were asked for, of {n} heads"
        return "too few heads differ"
    if not attrs["stable"]:
        return f"the components do not come back in other {attrs['split']}s"
    quality = float(result["group_quality"].max())
    best = f"the best partition by loadings ({attrs['n_groups']} groups) has a mean silhouette of"
    if quality < _SILHOUETTE_LEAST:
        return f"{best} {quality:.2f}, under {_SILHOUETTE_LEAST}"
    of_twins = result["quality_twin"].values.tolist() if "quality_twin" in result else []
    if of_twins and quality <= max(of_twins):
        return f"{best} {quality:.2f}, no more than twins ({_span(of_twins, '{:.2f}')})"
    return None


def _cohesive(result: xr.Dataset) -> xr.DataArray:
    """Tell which heads are far more like their group than heads of the twins are like theirs."""
    if "cohesion_twin" not in result:
        return result["cohesion"] > 0.5
    # Heads that are alone have no cohesion, and say nothing of what chance would give.
    of_twins = xr.concat(
        [
            c.where(_in_company(g))
            for c, g in zip(result["cohesion_twin"], result["group_twin"], strict=True)
        ],
        "twin",
    )
    seen = result[["cohesion"]].assign(cohesion_twin=of_twins)
    beyond = _beyond(seen, "cohesion", _COHESION_FLOOR, _COHESION_LEAST)
    return xr.zeros_like(result["cohesion"], dtype=bool) if beyond is None else beyond


def _in_company(label: xr.DataArray) -> xr.DataArray:
    """Tell which heads share their group with others."""
    kinds, counts = np.unique(label.values, return_counts=True)
    return label.isin(kinds[(counts > 1) & (kinds >= 0)])


def _beyond(result: xr.Dataset, measure: str, floor: float, least: float) -> Any:
    if f"{measure}_twin" not in result:
        return None
    twins = result[f"{measure}_twin"]
    if not twins.notnull().any():
        return None
    bounds = attnlens.nulls.twin_range(list(twins), floor=floor, alpha=ALPHA)
    # A layer in which no twin has a value has no bounds: any layer's will do.
    bounds = bounds.fillna(bounds.max())
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
    return words.span(min(values), max(values), form)


def _unjudged(claim: str, what: str, why: str) -> attnlens.Finding:
    return attnlens.Finding(claim=claim, holds=False, text=f"{what} not judged: {why}.")


def _type(result: xr.Dataset, claim: str) -> attnlens.Finding:
    measure, floor, least, phrase = _TYPES[claim]
    what = claim.replace("-", " ").capitalize()
    if measure not in result:
        why = "the attention that tells was not captured"
        if not result.attrs["types"]:
            why = "types of heads were not asked for (types=false)"
        return _unjudged(claim, f"{what} were", why)
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
        where = np.unravel_index(int(np.nanargmax(values.values)), values.shape)
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
        text=f"{words.heads_that(len(cells), values.size, said)}; twins at most "
        f"{null['highest']:.0%}: {_listed(_names(cells))}.",
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
    twin_ranks = f"{_span(of_twins.tolist(), '{}')} in twins"
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
    said = f"are rebuilt by the others with only {_span(list(left.values()))} of their norm left"
    return attnlens.Finding(
        claim=claim,
        holds=True,
        text=f"{words.heads_that(len(cells), values.size, said)} (twins at least "
        f"{null['lowest']:.0%}): {_listed(_names(cells))}. {share.capitalize()} ({twin_ranks}).",
        evidence=evidence | {"errors": left},
        null=null,
    )


def _clusters(result: xr.Dataset) -> attnlens.Finding:
    claim, attrs = "head-clusters", result.attrs
    why = _unclustered(result)
    evidence: dict[str, Any] = {"clusters": 0, "heads": [], "groups": int(attrs["n_groups"])}
    null = {}
    if result["group_quality"].size:
        evidence["silhouette"] = float(result["group_quality"].max())
        evidence["cohesion"] = result["cohesion"].max().item()
    if "cohesion_twin" in result:
        null["silhouette"] = result["quality_twin"].values.tolist()
        null["highest_cohesion"] = result["cohesion_twin"].max().item()
    if why is not None:
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"No clusters of heads: {why}.",
            evidence=evidence,
            null=null,
        )
    if not null:
        return _unjudged(claim, "Clusters of heads were", "there are no twins")
    count = int(result["cluster"].max()) + 1
    values, alike = result["cohesion"], _ALIKE[attrs["tensor"]]
    if count:
        members = [_names(_cells(result["cluster"] == c)) for c in range(count)]
        evidence |= {"clusters": count, "heads": members}
        inside = values.where(result["cluster"] >= 0).mean().item()
        text = (
            f"{count} cluster{'s' if count > 1 else ''} of heads by their loadings: "
            f"{'; '.join(_listed(m) for m in members[:6])}. {alike} is more alike inside than "
            f"outside by a mean cosine of {inside:.2f} (twins at most "
            f"{null['highest_cohesion']:.2f}); mean silhouette {evidence['silhouette']:.2f} "
            f"(twins {_span(null['silhouette'], '{:.2f}')})."
        )
    else:
        n_beyond = int(_cohesive(result).sum())
        text = (
            f"No clusters of heads: in none of the {evidence['groups']} groups by loadings (mean "
            f"silhouette {evidence['silhouette']:.2f}) are half of the heads clearly more alike "
            f"than in the twins. {alike} is more alike inside than outside by a cosine of at most "
            f"{values.max().item():.2f} (twins {null['highest_cohesion']:.2f}; at least "
            f"{_COHESION_LEAST} is asked), clearly so for {n_beyond} of {values.size} heads."
        )
    return attnlens.Finding(claim=claim, holds=count > 0, text=text, evidence=evidence, null=null)


def _rank(result: xr.Dataset) -> attnlens.Finding:
    claim, attrs = "rank", result.attrs
    explained = 1.0 - float(attrs["error"]) ** 2
    evidence: dict[str, Any] = {
        "rank": int(attrs["rank"]),
        "explained": explained,
        "stable": bool(attrs["stable"]),
        "confidence": float(attrs["confidence"]),
        "degenerate": bool(attrs["degenerate"]),
        "converged": bool(attrs["converged"]),
    }
    text = f"{attrs['reason']} Rank {attrs['rank']} explains {explained:.0%} of the energy"
    consistency = float(result["scan_core_consistency"].sel(rank=attrs["rank"]))
    warning = ""
    if consistency < _CONSISTENT:
        evidence["core_consistency"] = consistency
        warning = (
            f" Core consistency is {consistency:.0f}% (100% for components that do not mix): read "
            "them with care."
        )
    if attrs["degenerate"]:
        warning += " Components cancel each other (degenerate): lower the rank."
    elif not attrs["converged"]:
        warning += " The fit did not settle; more restarts (n_restarts) may find a better one."
    if "explained_twin" not in result:
        return attnlens.Finding(
            claim=claim,
            holds=False,
            text=f"{text}; there are no twins.{warning}",
            evidence=evidence,
        )
    of_twins = xr.DataArray(1.0 - result["error_twin"].values ** 2, dims="twin")
    bounds = attnlens.nulls.twin_range(
        list(of_twins), floor=_SHARE_FLOOR, over=(), alpha=_SHARE_ALPHA
    )
    differs = explained > float(bounds["high"]) or explained < float(bounds["low"])
    sure = attrs["stable"] and not attrs["degenerate"]
    text += f" (twins {_span(of_twins.values.tolist())} at this rank).{warning}"
    return attnlens.Finding(
        claim=claim,
        holds=bool(sure and differs),
        text=text,
        evidence=evidence,
        null={
            "explained": of_twins.values.tolist(),
            # No share lies beyond these, whatever the interval.
            "low": max(float(bounds["low"]), 0.0),
            "high": min(float(bounds["high"]), 1.0),
        },
    )
