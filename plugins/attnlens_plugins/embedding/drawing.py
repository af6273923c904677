"""Figures of ``embedding``, drawn from a result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

import attnlens

_TITLES = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"}
#: Points up to which each is named.
_NAMED = 80
#: Width of a panel, and width and height of a name, in inches.
_PANEL, _NAME = 3.8, (0.32, 0.11)
_MARKERS = "osD^vP*X"


def panels(result: xr.Dataset, figure: Any) -> str:
    """Draw PCA and the maps side by side."""
    names = [str(m) for m in result["map"].values]
    color = result.attrs["color"] if f"label_{result.attrs['color']}" in result else "layer"
    labels = result[f"label_{color}"].values
    kinds = result["label_type"].values
    trust: dict[str, float] = {}
    figure.set_size_inches(4.3 * len(names) + 0.6, 4.6)
    with attnlens.figures.style():
        spots = np.atleast_1d(figure.subplots(1, len(names)))
        shades, order = _shades(labels, color)
        for ax, name in zip(spots, names, strict=True):
            _scatter(ax, result, name, labels, kinds, shades)
            trust[name] = result["trustworthiness"].sel(map=name).item()
            title = f"{_TITLES[name]} (trustworthiness {trust[name]:.2f}"
            if name == "pca":
                title += f", {result['variance'].sum().item():.0%} of the variance"
            ax.set_title(f"{title})")
        _legend(figure, color, order, shades, kinds)
        figure.suptitle(_heading(result), x=0.012, ha="left")
    return (
        f"{_heading(result)}: {len(labels)} points coloured by {color}, drawn by "
        f"{', '.join(f'{_TITLES[n]} (trustworthiness {t:.2f})' for n, t in trust.items())}."
        f"{_near(result, color)}"
    )


def _near(result: xr.Dataset, color: str) -> str:
    """Say how far points of one colour lie together."""
    if color not in result["label"].values:
        return ""
    same = result["purity"].sel(label=color)
    chance = result["purity_chance"].sel(label=color).item()
    told = [
        f"{same.sel(space=s).item():.0%} in {_TITLES.get(str(s), 'the data')}"
        for s in result["space"].values
        if np.isfinite(same.sel(space=s).item())
    ]
    if not told:
        return ""
    return (
        f" Of the {result.attrs['neighbors']} nearest points, those of the same {color} are "
        f"{', '.join(told)} (by chance {chance:.0%})."
    )


def _heading(result: xr.Dataset) -> str:
    return {
        "heads": "Heads that attend alike",
        "outputs": "Heads that write alike",
        "loadings": "Heads that load alike on cp's components",
        "features": "Feature factors of cp's components",
    }[result.attrs["of"]]


def _shades(labels: Any, color: str) -> tuple[dict[Any, Any], list[Any]]:
    """Choose a colour for each label: layers in order of depth, others from the palette."""
    order = sorted(set(labels.tolist()), key=lambda v: (str(v) in ("none", "-1"), v))
    if color == "layer":
        steps = np.linspace(0.25, 1.0, len(order))
        return {v: attnlens.figures.SEQUENTIAL(s) for v, s in zip(order, steps, strict=True)}, order
    palette = attnlens.figures.PALETTE
    shades = {
        v: "#c9ced3" if str(v) in ("none", "-1") else palette[i % len(palette)]
        for i, v in enumerate(order)
    }
    return shades, order


def _scatter(
    ax: Any, result: xr.Dataset, name: str, labels: Any, kinds: Any, shades: dict[Any, Any]
) -> None:
    places = result[name].values
    for i, kind in enumerate(_kinds(kinds)):
        here = kinds == kind
        ax.scatter(
            places[here, 0], places[here, 1], s=46 if kind != "none" else 30,
            c=[shades[v] for v in labels[here].tolist()], marker=_MARKERS[i % len(_MARKERS)],
            edgecolors="#1c2733" if kind != "none" else "white", linewidths=0.9, zorder=3,
        )  # fmt: skip
    if len(labels) <= _NAMED:
        for i in _readable(places):
            ax.annotate(
                str(result["point"].values[i]), places[i], xytext=(4, 3),
                textcoords="offset points", fontsize=6.5, color="#5b6875", zorder=4,
            )  # fmt: skip
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_aspect("equal", adjustable="datalim")


def _readable(places: Any) -> list[int]:
    """Choose the points whose names do not lie over those of earlier ones."""
    known = np.flatnonzero(np.isfinite(places).all(1))
    inches = _PANEL * places / max(float(np.ptp(places[known], axis=0).max()), 1e-300)
    chosen: list[int] = []
    for i in known:
        gap = np.abs(inches[chosen] - inches[i]) if chosen else np.full((1, 2), np.inf)
        if not (gap < _NAME).all(1).any():
            chosen.append(int(i))
    return chosen


def _kinds(kinds: Any) -> list[str]:
    """List the types of heads, those of none first."""
    return sorted({str(k) for k in kinds}, key=lambda k: (k != "none", k))


def _legend(figure: Any, color: str, order: list[Any], shades: dict[Any, Any], kinds: Any) -> None:
    from matplotlib.lines import Line2D

    shown = order
    if len(order) > 12:  # layers: first, last and some between
        shown = [order[i] for i in np.unique(np.linspace(0, len(order) - 1, 8).astype(int))]
    handles = [
        Line2D(
            [], [], linestyle="", marker="o", markersize=6, color=shades[v],
            label=f"{color} {v}" if color != "type" else str(v),
        )
        for v in shown
    ]  # fmt: skip
    if color == "cluster":
        for handle, v in zip(handles, shown, strict=True):
            handle.set_label("no cluster" if v < 0 else f"cluster {v + 1}")
    for i, kind in enumerate(_kinds(kinds)):
        if kind != "none" and color != "type":
            handles.append(
                Line2D(
                    [], [], linestyle="", marker=_MARKERS[i % len(_MARKERS)], markersize=6,
                    markerfacecolor="none", markeredgecolor="#1c2733", label=f"{kind} head",
                )
            )  # fmt: skip
    figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 6))


def trust(result: xr.Dataset, figure: Any) -> str:
    """Draw the purity of neighbourhoods beside chance."""
    purity = result["purity"]
    labels = [str(v) for v in result["label"].values if np.isfinite(purity.sel(label=v)).any()]
    if not labels:
        raise attnlens.Skip("no label has two kinds")
    groups = {}
    for label in labels:
        pairs = [
            (_TITLES.get(str(s), "the data"), purity.sel(space=s, label=label).item())
            for s in result["space"].values
        ]
        if label == "layer" and "purity_twin" in result:
            pairs.append(("twins (data)", result["purity_twin"].mean().item()))
        pairs.append(("by chance", result["purity_chance"].sel(label=label).item()))
        groups[f"Same {label}"] = pairs
    attnlens.figures.bars(
        figure,
        groups,
        title="Do neighbours share a label?",
        label=f"Share of the {result.attrs['neighbors']} nearest points",
        tokens=False,
        columns=len(groups),
    )
    told = "; ".join(
        f"{label}: {purity.sel(space='data', label=label).item():.0%} "
        f"(by chance {result['purity_chance'].sel(label=label).item():.0%})"
        for label in labels
    )
    return f"Share of neighbours in the data that have the same label: {told}."
