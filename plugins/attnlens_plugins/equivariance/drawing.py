"""Figures of ``equivariance``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.equivariance import words
from attnlens_plugins.equivariance.checks import Check, checks
from attnlens_plugins.words import span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _MUTED, _PAPER = "#1c2733", "#5b6875", "#ffffff"
_HOLDS, _FAILS, _UNDECIDED, _STILL = "#bfe3d5", "#c8321e", "#e3e6e9", "#eef1f3"
#: Columns that fit beside each other with their numbers written out.
_WRITTEN = 16

#: verdict: colour and meaning, in the order of the legend
_LEGEND = (
    (_HOLDS, "✓  holds: nothing moves beyond rounding"),
    ("#f5c98b", "how much the output or the weights change"),
    (_FAILS, "✗  fails, though it should hold"),
    (_UNDECIDED, "?  undecided: the dtype is too coarse, or nothing was tested"),
)


def certificate(result: xr.Dataset, figure: Figure) -> str:
    """Draw the certificate: changes by layers."""
    rows = checks(result)
    layers = result.sizes["layer"]
    wide = min(layers * 0.62, 9.0) if layers <= _WRITTEN else min(max(layers * 0.16, 6.0), 14.0)
    lines = _lines(rows)
    height = len(lines) * 0.27 + 1.5
    figure.set_size_inches(wide + 4.1, height)
    ax = figure.subplots()
    written = layers <= _WRITTEN
    for y, line in enumerate(lines):
        if isinstance(line, str):
            ax.text(
                -0.008, y + 0.12, line, transform=ax.get_yaxis_transform(), ha="right",
                va="center", fontsize=8.8, fontweight="bold", color=_INK,
            )  # fmt: skip
            continue
        ax.text(
            -0.008, y, line.what, transform=ax.get_yaxis_transform(), ha="right", va="center",
            fontsize=8.3, color=_INK if line.must_hold else _MUTED,
        )  # fmt: skip
        for layer in range(layers):
            _cell(ax, layer, y, line, written=written)
        if not written:
            ax.text(
                1.006, y, _summary(line), transform=ax.get_yaxis_transform(), va="center",
                fontsize=8.0, color=_MUTED,
            )  # fmt: skip
    ax.set_xlim(-0.5, layers - 0.5)
    ax.set_ylim(len(lines) - 0.4, -0.6)
    step = max(1, -(-layers // 24))
    ax.set_xticks(range(0, layers, step))
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("Layer")
    ax.set_yticks([])
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    _legend(ax, rows)
    figure.suptitle("What leaves attention unchanged, and what does not", x=0.012, ha="left")
    return _alt(rows)


def _lines(rows: list[Check]) -> list[Check | str]:
    lines: list[Check | str] = []
    for row in rows:
        if not any(isinstance(x, Check) and x.symmetry == row.symmetry for x in lines):
            lines.append(row.symmetry[0].upper() + row.symmetry[1:])
        lines.append(row)
    return lines


def _cell(ax: Axes, layer: int, y: int, check: Check, *, written: bool) -> None:
    from matplotlib.patches import Rectangle

    verdict = check.verdict(layer)
    value = float(check.value[layer])
    colour, text, ink = {
        "holds": (_HOLDS, "✓", "#14543c"),
        "fails": (_FAILS, "✗", _PAPER),
        "undecided": (_UNDECIDED, "?", _MUTED),
        "no change": (_STILL, "0", _MUTED),
        "none": (_PAPER, "", _MUTED),
        "broken": (_amber(value), _amount(value), _INK),
    }[verdict]
    gap = 0.04 if written else 0.0
    ax.add_patch(
        Rectangle(
            (layer - 0.5 + gap, y - 0.44), 1 - 2 * gap, 0.88, facecolor=colour, linewidth=0,
        )
    )  # fmt: skip
    if written or verdict in ("fails", "undecided"):
        ax.text(
            layer, y, text, ha="center", va="center", fontsize=8.0 if written else 6.0, color=ink,
            fontweight="bold" if verdict == "fails" else "normal",
        )  # fmt: skip


def _summary(check: Check) -> str:
    """Say in a few characters what a row of many layers shows."""
    verdicts = [v for v in check.verdicts if v != "none"]
    if check.must_hold:
        wrong = sum(v != "holds" for v in verdicts)
        return "✓" if not wrong else f"not in {wrong} of {len(verdicts)}"
    low, high = _amount(float(np.nanmin(check.value))), _amount(float(np.nanmax(check.value)))
    return low if low == high else f"{low}–{high}"


def _amber(value: float) -> Any:
    """Colour by how much changes: pale for little, deep from all of it."""
    from matplotlib.colors import to_rgb

    share = float(np.clip(value, 0, 1)) ** 0.6
    low, high = np.array(to_rgb("#fdf1dc")), np.array(to_rgb("#ee9f3c"))
    return tuple(low + (high - low) * share)


def _amount(value: float) -> str:
    if value < 0.001:
        return "<0.1%"
    if value < 0.0995:
        return f"{value:.1%}"
    return f"{value:.0%}" if value < 9.995 else f"{value:.0f}×"


def _legend(ax: Axes, rows: list[Check]) -> None:
    from matplotlib.patches import Patch

    seen = {v for row in rows for v in row.verdicts}
    wanted = (True, "broken" in seen, "fails" in seen, "undecided" in seen)
    handles = [
        Patch(facecolor=colour, label=label)
        for (colour, label), there in zip(_LEGEND, wanted, strict=True)
        if there
    ]
    ax.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(1.0, -0.01), ncols=1,
        handlelength=1.2, handleheight=0.9, borderaxespad=0.3,
    )  # fmt: skip


def _alt(rows: list[Check]) -> str:
    parts = []
    for row in rows:
        verdicts = [v for v in row.verdicts if v != "none"]
        if row.must_hold:
            held = sum(v == "holds" for v in verdicts)
            parts.append(f"{row.what}: holds in {held} of {len(verdicts)} layers")
        else:
            low, high = np.nanmin(row.value), np.nanmax(row.value)
            parts.append(f"{row.what.removeprefix('… ')}: changes {low:.0%} to {high:.0%}")
    return "A table of changes by layers. " + "; ".join(parts) + "."


def positionality(result: xr.Dataset, figure: Figure) -> str:
    """Draw positionality on the head grid."""
    values = result["positionality"]
    if not bool(values.notnull().any()):
        raise attnlens.Skip("positionality was not measured: it takes at least two prompts")
    attnlens.figures.head_grid(
        figure,
        values,
        title="Does a head follow content or positions?",
        label="Positionality: 0 content, 1 positions",
        null=result.get("positionality_twin"),
        centre=0.5,
        vmin=0.0,
        vmax=1.0,
        cmap="diverging",
        note="Tokens shuffled, positions and mask in place",
    )
    seen = attnlens.figures.extremes(values, "{:.2f}")
    text = f"Positionality, a grid of layers by heads, 0 content to 1 positions: {seen}."
    return text + _chance(result.get("positionality_twin"))


def reactions(result: xr.Dataset, figure: Figure) -> str:
    """Draw the two distances that positionality is made of."""
    content, position = result["content_distance"], result["position_distance"]
    if not bool(content.notnull().any()):
        raise attnlens.Skip("positionality was not measured: it takes at least two prompts")
    figure.set_size_inches(5.6, 4.9)
    ax = figure.subplots()
    x = position.transpose("layer", "head").values
    y = content.transpose("layer", "head").values
    layers = np.broadcast_to(result["layer"].values[:, None], x.shape)
    shown = ax.scatter(
        x.ravel(), y.ravel(), c=layers.ravel(), cmap=attnlens.figures.SEQUENTIAL, vmin=-0.35 *
        max(int(layers.max()), 1), s=float(np.clip(2600 / x.size, 14, 60)), linewidths=0.5,
        edgecolors=_PAPER,
    )  # fmt: skip
    top = float(np.nanmax([x, y])) * 1.08
    ax.plot([0, top], [0, top], color="#c3cad1", linewidth=0.9, zorder=0)
    ax.set_xlim(0, top)
    ax.set_ylim(0, top)
    ax.set_aspect("equal")
    ax.set_xlabel("Change seen from the positions")
    ax.set_ylabel("Change seen from the tokens")
    for text, side, along in (("follows positions", 1, "bottom"), ("follows content", -1, "top")):
        ax.annotate(
            text, (top * 0.5, top * 0.5), xytext=(-3 * side, 3 * side), textcoords="offset points",
            rotation=45, rotation_mode="anchor", ha="center", va=along, color=_MUTED, fontsize=8.0,
        )  # fmt: skip
    score = np.where(np.isfinite(x) & np.isfinite(y), y - x, np.nan)
    for i, j in _extremes(score):
        ax.annotate(
            f"{i}.{j}", (x[i, j], y[i, j]), xytext=(5, 3), textcoords="offset points",
            fontsize=7.5, color=_INK,
        )  # fmt: skip
    bar = figure.colorbar(shown, ax=ax, fraction=0.045, pad=0.03)
    bar.set_label("Layer")
    bar.set_ticks(sorted({int(v) for v in np.linspace(0, layers.max(), 5)}))
    bar.ax.set_ylim(0, max(int(layers.max()), 1))
    bar.outline.set_visible(False)
    figure.suptitle("How much attention moves when tokens are shuffled", x=0.012, ha="left")
    return (
        "A dot for each head: how far its attention moves under a shuffle, seen from the tokens "
        f"and seen from the positions. {int((score > 0).sum())} of "
        f"{int(np.isfinite(score).sum())} heads lie above the diagonal and follow positions. "
        f"Distance from the diagonal: {attnlens.figures.extremes(score, '{:+.2f}')}."
    )


def _extremes(score: Any) -> list[tuple[int, int]]:
    """Return the heads farthest to either side, for naming."""
    flat = [(float(v), i, j) for (i, j), v in np.ndenumerate(score) if np.isfinite(v)]
    flat.sort()
    most = 4 if len(flat) <= 200 else 2
    chosen = flat[:most] + flat[-most:]
    return list(dict.fromkeys((i, j) for _, i, j in chosen))


def head_distances(result: xr.Dataset, figure: Figure) -> str:
    """Draw all pairs of heads, in the order of the tree that joins the nearest."""
    if "distance" not in result or result.sizes["one"] < 2:
        raise attnlens.Skip("heads were not compared")
    order = result["order"].values
    parts = [("distance_qk", "Where they look"), ("distance_vo", "What they move")]
    count = len(order)
    side = float(np.clip(0.075 * count, 3.2, 6.4))
    figure.set_size_inches(2 * side + 1.5, side + 1.25)
    axes = np.ravel(figure.subplots(1, 2))
    labels = [str(v) for v in result["one"].values[order]]
    step = max(1, -(-count // max(int(side / 0.125), 1)))
    # Where no heads come near each other, half the scale would be empty.
    low = 0.0 if float(result["nearest_distance"].min()) < 0.6 else 0.5
    clusters = result["cluster"].transpose("layer", "head").values.ravel()[order]
    for ax, (name, title) in zip(axes, parts, strict=True):
        values = np.ma.masked_invalid(result[name].values[np.ix_(order, order)])
        values[np.eye(count, dtype=bool)] = np.ma.masked  # a head with itself says nothing
        image = ax.imshow(
            values, cmap=attnlens.figures.SEQUENTIAL.reversed(), vmin=low, vmax=1, aspect="equal"
        )
        _outline(ax, clusters)
        ax.set_title(title, color=_INK, fontweight="bold")
        ax.set_xticks(range(0, count, step), labels[::step], rotation=90, fontsize=6.5)
        ax.set_yticks(range(0, count, step), labels[::step], fontsize=6.5)
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    bar = figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.02)
    bar.set_label("Distance: 0 equal, 1 unrelated, √2 opposite")
    bar.outline.set_visible(False)
    figure.suptitle("Which heads are alike, whatever their bases", x=0.012, ha="left")
    groups = words.count(len(set(clusters[clusters >= 0].tolist())), "group")
    nearest = float(result["nearest_distance"].min())
    return (
        f"Two maps of the distances between all {count} heads; the nearest two are {nearest:.2f} "
        f"apart; outlined: {groups}."
    )


def _outline(ax: Axes, clusters: Any) -> None:
    """Frame the groups, which lie side by side in the tree's order."""
    from matplotlib.patches import Rectangle

    start = 0
    for end in range(1, len(clusters) + 1):
        if end < len(clusters) and clusters[end] == clusters[start]:
            continue
        if clusters[start] >= 0 and end - start > 1:
            ax.add_patch(
                Rectangle(
                    (start - 0.5, start - 0.5), end - start, end - start, facecolor="none",
                    edgecolor="#d55e00", linewidth=1.4, clip_on=False,
                )
            )  # fmt: skip
        start = end


def nearest_heads(result: xr.Dataset, figure: Figure) -> str:
    """Draw the distance to the nearest other head on the head grid."""
    if "nearest_distance" not in result or not bool(result["nearest_distance"].notnull().any()):
        raise attnlens.Skip("heads were not compared")
    values = result["nearest_distance"]
    attnlens.figures.head_grid(
        figure,
        values,
        title="How far is the head most like it?",
        label="Distance: 0 equal, 1 unrelated, √2 opposite",
        null=result.get("nearest_distance_twin"),
        vmin=0.0,
        cmap=attnlens.figures.SEQUENTIAL.reversed(),
    )
    seen = attnlens.figures.extremes(values, "{:.2f}")
    text = f"Distance to the nearest other head, a grid of layers by heads: {seen}."
    return text + _chance(result.get("nearest_distance_twin"))


def _chance(twins: xr.DataArray | None) -> str:
    """Say what twins have."""
    if twins is None:
        return ""
    return f" Twins: {span(float(twins.min()), float(twins.max()), '{:.2f}')}."


_NAMED = {
    "cka": "CKA, debiased",
    "procrustes": "Procrustes",
    "rsa": "RSA",
    "gram": "Gram matrices",
}


def pairs(result: xr.Dataset, figure: Figure) -> str:
    """Draw the invariants of pairs over depth, beside random pairings."""
    if "pairs_value" not in result:
        raise attnlens.Skip("no pairs were given (equivariance.pairs)")
    figure.set_size_inches(8.6, 2.75)
    axes = np.ravel(figure.subplots(1, len(_NAMED), sharex=True))
    layers = result["layer"].values
    for ax, (name, title) in zip(axes, _NAMED.items(), strict=True):
        one = result.sel(invariant=name)
        floor, high = one["pairs_null_mean"].values, one["pairs_null_high"].values
        ax.fill_between(layers, floor, high, color="#d9d4cb", linewidth=0, label="paired at random")
        ax.plot(layers, floor, color="#a49d92", linewidth=0.9)
        if "pairs_twin" in result:
            for values in one["pairs_twin"].transpose("twin", "layer").values:
                ax.plot(layers, values, color=_MUTED, linewidth=0.8, linestyle=(0, (4, 2)))
            ax.plot([], [], color=_MUTED, linewidth=0.8, linestyle=(0, (4, 2)), label="twins")
        ax.plot(layers, one["pairs_value"].values, color="#1d6f93", linewidth=1.8, marker="o",
                markersize=3.5, label="the pairs")  # fmt: skip
        ax.set_title(title, color=_INK)
        drawn = [one[name] for name in ("pairs_null_mean", "pairs_value", "pairs_twin")
                 if name in one]  # fmt: skip
        lowest = min(float(values.min()) for values in drawn)
        ax.set_ylim(min(-0.05, lowest - 0.05) if np.isfinite(lowest) else -0.05, 1.05)
        ax.set_xlabel("Input of layer")
        ax.grid(axis="y")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("Similarity")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("How alike are texts with one meaning?", x=0.012, ha="left")
    cka = result["pairs_value"].sel(invariant="cka").values
    if not np.isfinite(cka).any():
        return "Four similarities by layer; the debiased CKA is not defined: no text differs"
    low, high = np.nanmin(cka), np.nanmax(cka)
    return f"Four similarities by layer; the debiased CKA is {words.span(low, high)}"
