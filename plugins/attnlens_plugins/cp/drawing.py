"""Figures of ``cp``, drawn from a result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.cp import claims
from attnlens_plugins.cp.fitting import STABLE

#: Names of the modes for people.
MODES = {
    "d_model": "what is written",
    "d_model_2": "what is written",
    "d_model_in": "what is read",
    "query_d_model": "what asks",
    "key_d_model": "what is asked for",
}


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


def seen_words(names: Any, values: Any, what: str) -> str:
    """Tell which tokens directions raise and lower most.

    Parameters
    ----------
    names, values : ndarray [component, end, place]
    what : str
        What a direction is called.
    """
    told = [
        f"{what} {c + 1} raises “{attnlens.figures.visible_token(str(names[c, 0, 0]))}” most "
        f"({values[c, 0, 0]:+.2g}) and lowers "
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
    count = result.sizes["component"]
    seen = seen_heads(result["loadings"], "Component")
    groups = None
    if result.attrs["n_clusters"]:
        label = result["cluster"].transpose("layer", "head").values.ravel()
        groups = [int(g) + 1 if g >= 0 else -1 for g in label]
    attnlens.figures.loading_matrix(
        figure,
        result["loadings"],
        title="Which heads belong to which component",
        label="Loading of the head",
        groups=groups,
    )
    return f"Loadings of the heads on {count} components, like heads side by side. {seen}"


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
                shown = np.clip(shown, -20, 105)
                ax.set_ylim(-25, 108)
            ax.plot(ranks, shown, "o-", color="#1d6f93", markersize=3.5, linewidth=1.4)
            ax.axvline(result.attrs["rank"], color="#c2571a", linewidth=1.2, linestyle=(0, (4, 2)))
            if line is not None:
                ax.axhline(line, color="#8d8375", linewidth=1, linestyle=(0, (1, 1.5)))
            ax.set_xlabel("Rank")
            ax.set_title(label)
            ax.grid(True)
        figure.suptitle(
            f"Rank {result.attrs['rank']} was chosen by the match between halves", x=0.01, ha="left"
        )
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
    if not quality.size:
        raise attnlens.Skip("heads are not in groups: there is one component, or too few heads")
    count = result.attrs["n_clusters"]
    text = f"Best partition by loadings: silhouette {float(quality.max()):.2f}"
    if not count:
        text += "; what its groups write is no more alike than in models with random weights"
    label = result["cluster"] if count else result["group"]
    attnlens.figures.category_grid(
        figure,
        label + (label >= 0),
        title="Clusters of heads by their loadings" if count else "No clusters of heads",
        legend_title="Cluster" if count else "Group (no cluster)",
        marks=types,
        note=text + ".",
    )
    named = "; ".join(f"{k}: {', '.join(f'{a}.{b}' for a, b in v)}" for k, v in types.items())
    return f"{text}. Heads of known types: {named or 'none'}."


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
    )
    return f"Vocabulary of the components, {MODES[mode]}: " + seen_words(
        result[f"words_{mode}"].transpose("component", "end", "place").values,
        result[f"logits_{mode}"].transpose("component", "end", "place").values,
        "component",
    )


def word_bars(figure: Any, names: Any, values: Any, titles: list[str], title: str) -> None:
    """Draw the tokens at both ends of directions.

    Parameters
    ----------
    figure : Figure
    names, values : ndarray [component, end, place]
        Tokens and logits, the top end first.
    titles : list of str
    title : str
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
        label="Change of the logit per unit step along the direction",
        most=12,
    )


def positions(result: xr.Dataset, figure: Any) -> str:
    """Draw how components depend on the position."""
    result, where = one_part(result)
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
    figure.set_size_inches(7.4 if len(panels) == 1 else 10.5, 4.0)
    spots = np.atleast_1d(figure.subplots(1, len(panels)))
    for ax, (name, dim, label) in zip(spots, panels, strict=True):
        values = result[name].transpose("component", dim)
        attnlens.figures.curves(
            ax,
            values.values,
            x=values[dim].values,
            label=label,
            xlabel="Position",
            highlight={f"{n}": i for i, n in enumerate(names[:8])},
        )
    with attnlens.figures.style():
        figure.suptitle(f"Components over positions{where}", x=0.012, ha="left")
    seen = []
    for name, dim, label in panels:
        values = result[name].transpose("component", dim)
        peaks = [
            f"component {c} peaks at {values[dim].values[place]} ({row[place]:+.2g}, "
            f"median {np.median(row):+.2g})"
            for c, row in zip(names[:_TOLD], values.values, strict=False)
            for place in [int(np.abs(row).argmax())]
        ]
        seen.append(f"{label}: {'; '.join(peaks)}{_rest(len(names))}.")
    return " ".join(seen)
