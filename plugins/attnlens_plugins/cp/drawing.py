"""Figures of ``cp``, drawn from a result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.ticker import MaxNLocator

import attnlens
from attnlens_plugins.cp import claims
from attnlens_plugins.cp.fitting import STABLE
from attnlens_plugins.cp.results import READ_MODES

#: Names of the modes for people.
MODES = {
    "d_model": "what is written",
    "d_model_2": "what is written",
    "d_model_in": "what is read",
    "query_d_model": "what asks",
    "key_d_model": "what is asked for",
}

#: What the numbers beside tokens are.
WRITTEN = "Change of the logit per unit step along the direction"
READ = "Product of the token's embedding with the direction"
#: Core consistency, in percent, that is still drawn as it is.
_LOWEST = -20
#: Layers whose positions are drawn, where each has components of its own.
_LAYERS = 6


#: Components that an alternative text tells one by one.
_TOLD = 6


def _rest(count: int) -> str:
    return f"; and {count - _TOLD} more" if count > _TOLD else ""


def seen_heads(loadings: xr.DataArray, what: str) -> str:
    """Tell which heads load most on each component.

    Parameters
    ----------
    loadings : DataArray [layer, head, component]
    what : str
        What a component is called.
    """
    loadings = loadings.transpose("layer", "head", ...)
    layers, heads = loadings["layer"].values, loadings["head"].values
    told = []
    for c in range(min(loadings.shape[-1], _TOLD)):
        values = loadings.values[..., c]
        order = np.argsort(-np.nan_to_num(np.abs(values)).ravel(), kind="stable")[:3]
        places = [np.unravel_index(i, values.shape) for i in order]
        named = ", ".join(f"{layers[i]}.{heads[j]} ({values[i, j]:+.2f})" for i, j in places)
        told.append(f"{what} {c + 1}: heads {named}")
    return f"{'; '.join(told)}{_rest(loadings.shape[-1])}."


def seen_words(
    names: Any, values: Any, what: str, does: tuple[str, str] = ("raises", "lowers")
) -> str:
    """Tell which tokens directions raise and lower most.

    Parameters
    ----------
    names, values : ndarray [component, end, place]
    what : str
        What a direction is called.
    does : pair of str
        What it does to the tokens at either end.
    """
    told = [
        f"{what} {c + 1} {does[0]} “{attnlens.figures.visible_token(str(names[c, 0, 0]))}” most "
        f"({values[c, 0, 0]:+.2g}) and {does[1]} "
        f"“{attnlens.figures.visible_token(str(names[c, 1, 0]))}” most ({values[c, 1, 0]:+.2g})"
        for c in range(min(len(names), _TOLD))
    ]
    return f"{'; '.join(told)}{_rest(len(names))}."


def one_part(result: xr.Dataset) -> tuple[xr.Dataset, str]:
    """Return the strongest layer's components where layers were decomposed each alone."""
    if "part" not in result.dims:
        return result, ""
    strongest = int(np.argmax(result["weights"].max("component").values))
    chosen = result.isel(part=strongest)
    return chosen, f" (layer {int(chosen['part'])}; the others are in the result)"


def head_loadings(result: xr.Dataset, figure: Any) -> str:
    """Draw how heads load on components."""
    values = result["loadings"]
    names = None
    seen = seen_heads(values, "Component")
    if result.sizes.get("part", 1) > 1:
        values, names = _of_each_layer(values)
    groups = None
    if result.attrs["n_clusters"]:
        label = result["cluster"].transpose("layer", "head").values.ravel()
        groups = [int(g) + 1 if g >= 0 else -1 for g in label]
    attnlens.figures.loading_matrix(
        figure,
        values,
        title="Which heads belong to which component",
        label="Loading of the head",
        groups=groups,
        components=names,
    )
    return (
        f"Loadings of the heads on {values.sizes['component']} components, like heads side by side"
        + ("; each layer has components of its own. " if names else ". ")
        + seen
    )


def _of_each_layer(loadings: xr.DataArray) -> tuple[xr.DataArray, list[str]]:
    """Give the components of each layer columns of their own, named ``layer:component``."""
    layers, numbers = loadings["layer"].values, loadings["component"].values
    parts = [loadings.where(loadings["layer"] == n, 0.0) for n in layers]
    names = [f"{n}:{c}" for n in layers for c in numbers]
    return xr.concat(parts, "component").assign_coords(component=names), names


def rank_selection(result: xr.Dataset, figure: Any) -> str:
    """Draw error, stability and core consistency over the ranks."""
    ranks = result["rank"].values
    if len(ranks) < 2:
        raise attnlens.Skip(f"one rank was asked for: {ranks[0]}")
    panels: list[tuple[str, str, float | None]] = [("scan_error", "Relative error", None)]
    if "scan_stability" in result:
        panels.append(("scan_stability", "Worst match between halves", STABLE))
    panels.append(("scan_core_consistency", "Core consistency (%)", 80.0))
    figure.set_size_inches(3.3 * len(panels), 3.4)
    axes = np.atleast_1d(figure.subplots(1, len(panels)))
    with attnlens.figures.style():
        for ax, (name, label, line) in zip(axes, panels, strict=True):
            values = result[name]
            if "split" in values.dims:
                for row in values.values:
                    ax.plot(ranks, row, ".", color="#97c6c8", markersize=5)
                values = values.median("split")
            shown = values.values
            if name == "scan_core_consistency":
                ax.set_ylim(_LOWEST, 108)
                below = shown < _LOWEST
                ax.plot(
                    ranks[below], np.full(below.sum(), _LOWEST + 4), "v", color="#1d6f93",
                    markersize=5,
                )  # fmt: skip
                if below.any():
                    ax.set_xlabel(f"Rank (triangles: under {_LOWEST})")
                shown = np.where(below, np.nan, shown)
            ax.plot(ranks, shown, "o-", color="#1d6f93", markersize=3.5, linewidth=1.4)
            ax.axvline(result.attrs["rank"], color="#c2571a", linewidth=1.2, linestyle=(0, (4, 2)))
            if line is not None:
                ax.axhline(line, color="#8d8375", linewidth=1, linestyle=(0, (1, 1.5)))
            ax.set_xlabel(ax.get_xlabel() or "Rank")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set_title(label)
            ax.grid(True)
        rank = result.attrs["rank"]
        title = f"Rank {rank} was chosen by the match between halves"
        if not result.attrs["stable"]:
            title = f"No rank is stable; rank {rank}, the smallest tried, is shown"
        if "scan_stability" not in result:
            title = f"Rank {rank} is shown: there are no halves to choose by"
        figure.suptitle(title, x=0.01, ha="left")
    return f"Error, stability and core consistency over ranks. {result.attrs['reason']}"


def token_text(result: xr.Dataset, figure: Any) -> str:
    """Draw the token loadings over one prompt."""
    result, where = one_part(result)
    if "token_loadings" not in result:
        raise attnlens.Skip(f"{result.attrs['tensor']} has no tokens")
    prompt = int(result["token_prompt"].values[0])
    here = result.isel(token=np.flatnonzero(result["token_prompt"].values == prompt))
    attnlens.figures.token_loadings(
        figure,
        here["token_loadings"].transpose("component", "token").values,
        [str(t) for t in here["token_text"].values],
        title=f"Which tokens each component is about: prompt {prompt}{where}",
        components=[str(c) for c in result["component"].values],
        most=120,
    )
    loadings = here["token_loadings"].transpose("component", "token")
    seen = []
    for name, row in zip(result["component"].values[:_TOLD], loadings.values, strict=False):
        place = int(np.abs(row).argmax())
        token = attnlens.figures.visible_token(str(here["token_text"].values[place]))
        seen.append(f"component {name} most on “{token}” ({row[place]:+.2g})")
    text = f"Loadings on the {here.sizes['token']} tokens of prompt {prompt}: {'; '.join(seen)}"
    return f"{text}{_rest(result.sizes['component'])}."


def cluster_map(result: xr.Dataset, figure: Any) -> str:
    """Draw the groups of heads and the heads of known types on the layer x head grid."""
    types = claims.typed_heads(result)
    quality = result["group_quality"]
    if not quality.size and not types:
        raise attnlens.Skip("there are neither groups of heads nor heads of a known type")
    count = result.attrs["n_clusters"]
    text = "Heads are not in groups: there is one component, or too few heads"
    if quality.size:
        text = f"Best partition by loadings: silhouette {float(quality.max()):.2f}"
        if not count:
            text += "; none of its groups is a cluster"
    label = result["cluster"] if count else result["group"]
    attnlens.figures.category_grid(
        figure,
        label + (label >= 0),
        title="Clusters of heads by their loadings" if count else "No clusters of heads",
        legend_title="Cluster" if count else "Group (no cluster)",
        marks=_told_apart(types),
        note=text + ".",
    )
    named = "; ".join(f"{k}: {', '.join(f'{a}.{b}' for a, b in v)}" for k, v in types.items())
    return f"{text}. Heads of known types: {named or 'none'}."


def _told_apart(types: dict[str, list[tuple[int, int]]]) -> dict[str, list[tuple[int, int]]]:
    """Name every head once: one of several types by all of them."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for kind, cells in types.items():
        for cell in cells:
            kinds.setdefault(cell, []).append(kind)
    found: dict[str, list[tuple[int, int]]] = {}
    for cell, names in sorted(kinds.items()):
        found.setdefault(" and ".join(names), []).append(cell)
    return found


def words(result: xr.Dataset, figure: Any) -> str:
    """Draw the tokens that each feature direction raises most."""
    result, where = one_part(result)
    modes = [m for m in MODES if f"words_{m}" in result]
    if not modes:
        raise attnlens.Skip("there is no unembedding, no vocabulary or no feature mode")
    mode = modes[-1] if "words_d_model" not in result else "d_model"
    word_bars(
        figure,
        result[f"words_{mode}"].transpose("component", "end", "place").values,
        result[f"logits_{mode}"].transpose("component", "end", "place").values,
        [f"Component {int(c)}" for c in result["component"].values],
        f"Vocabulary of each component: {MODES[mode]}{where}",
        READ if mode in READ_MODES else WRITTEN,
    )
    does = "points to" if mode in READ_MODES else "raises"
    undoes = "away from" if mode in READ_MODES else "lowers"
    return f"Vocabulary of the components, {MODES[mode]}: " + seen_words(
        result[f"words_{mode}"].transpose("component", "end", "place").values,
        result[f"logits_{mode}"].transpose("component", "end", "place").values,
        "component",
        (does, undoes),
    )


def word_bars(
    figure: Any, names: Any, values: Any, titles: list[str], title: str, label: str = WRITTEN
) -> None:
    """Draw the tokens at both ends of directions.

    Parameters
    ----------
    figure : Figure
    names, values : ndarray [component, end, place]
        Tokens and logits, the top end first.
    titles : list of str
    title, label : str
    """
    groups = {}
    for c, name in enumerate(titles[:12]):
        top, low = (
            [(str(w), float(v)) for w, v in zip(names[c, e, :6], values[c, e, :6], strict=True)]
            for e in (0, 1)
        )
        groups[name] = [*top, *low[::-1]]
    attnlens.figures.bars(
        figure,
        groups,
        title=title,
        label=label,
        most=12,
    )


def positions(result: xr.Dataset, figure: Any) -> str:
    """Draw how components depend on the position."""
    names = [str(c) for c in result["component"].values]
    if "position_loadings" in result:
        panels = [("position_loadings", "pos", "Mean loading at the position")]
    elif "factor_query_pos" in result:
        panels = [
            ("factor_query_pos", "query_pos", "Loading of the query's position"),
            ("factor_key_pos", "key_pos", "Loading of the key's position"),
        ]
    else:
        raise attnlens.Skip(f"{result.attrs['tensor']} has no positions")
    if result.sizes[panels[0][1]] < 2:
        raise attnlens.Skip("there is one position")
    rows = [(result, "")]
    if "part" in result.dims:
        shown = result.isel(part=slice(_LAYERS))
        rows = [(shown.sel(part=n), f"Layer {n}. ") for n in shown["part"].values]
    figure.set_size_inches(7.4 if len(panels) == 1 else 10.5, 1.2 + 2.8 * len(rows))
    spots = figure.subplots(len(rows), len(panels), squeeze=False)
    for row, (part, where) in zip(spots, rows, strict=True):
        for ax, (name, dim, label) in zip(row, panels, strict=True):
            values = part[name].transpose("component", dim)
            attnlens.figures.curves(
                ax,
                values.values,
                x=values[dim].values,
                label=f"{where}{label}",
                xlabel="Position",
                highlight={f"{n}": i for i, n in enumerate(names[:8])},
            )
    with attnlens.figures.style():
        figure.suptitle("Components over positions", x=0.012, ha="left")
    seen = []
    for name, dim, label in panels:
        values = rows[0][0][name].transpose("component", dim)
        peaks = [
            f"component {c} peaks at {values[dim].values[place]} ({row[place]:+.2g}, "
            f"median {np.median(row):+.2g})"
            for c, row in zip(names[:_TOLD], values.values, strict=False)
            for place in [int(np.abs(row).argmax())]
        ]
        seen.append(f"{rows[0][1]}{label}: {'; '.join(peaks)}{_rest(len(names))}.")
    left_out = result.sizes.get("part", 1) - len(rows)
    if left_out > 0:
        seen.append(f"{left_out} more layers are in the result.")
    return " ".join(seen)
