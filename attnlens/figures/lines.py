"""Values over depth, and families of curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from attnlens.errors import AnalysisError
from attnlens.figures.naming import DASHES, last_finite, name_ends
from attnlens.figures.style import (
    ACCENT,
    INK,
    MUTED,
    PAPER,
    SEQUENTIAL,
    WARM,
    Target,
    axes_of,
    fit,
    put_title,
    styled,
)
from attnlens.figures.tokens import escape_math
from attnlens.figures.values import (
    Array,
    Cell,
    Marks,
    as_array,
    as_grid,
    as_marks,
    finite_range,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

_BAND = "#c9c2b8"
_HIGHLIGHTS = (WARM, "#7a3e9d", "#00735c", "#a8174d", "#0b5394", "#6b5b00", "#333333", "#c48a00")


@styled
def depth_plot(
    target: Target,
    values: Any,
    *,
    title: str | None = None,
    label: str = "",
    null: Any = None,
    lines: Mapping[str, float] | None = None,
    marks: Marks | None = None,
    ylim: tuple[float | None, float | None] | None = None,
    log: bool = False,
    note: str | None = None,
) -> Axes:
    """Draw a value per head against depth: heads as dots, each layer's median as a line.

    Parameters
    ----------
    target : Figure, SubFigure or Axes
    values : array-like [layer, head]
    title : str, optional
    label : str
        What the value is, with its unit.
    null : array-like [twin, layer, head] or [layer, head] or (low, high), optional
        What twins gave: each layer's range is shaded, its median dashed.
    lines : mapping of name to value, optional
        Reference lines, such as the closed form for uniform attention.
    marks : mapping or pairs, optional
        Heads to name, as in :func:`head_grid`.
    ylim : (low, high), optional
    log : bool
        Logarithmic values.
    note : str, optional
        How to read the figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    attnlens.errors.AnalysisError
        When the values, or the twins', are not over these layers.
    """
    grid = as_grid(values, "depth_plot")
    n_layers, n_heads = grid.values.shape
    fit(target, float(np.clip(0.34 * n_layers + 2.6, 5.4, 9.6)), 3.7)
    ax = axes_of(target)
    x = np.arange(n_layers, dtype=np.float64)
    handles: list[Any] = []
    if null is not None:
        handles += _depth_band(ax, x, null, n_layers)
    # Heads lie side by side within their layer, in order, so that none hides another.
    spread = (np.arange(n_heads) - (n_heads - 1) / 2) / max(n_heads, 2) * 0.62
    ax.scatter(
        np.repeat(x, n_heads) + np.tile(spread, n_layers), grid.values.ravel(),
        s=float(np.clip(900 / (n_layers * n_heads) ** 0.62, 7, 26)), color=ACCENT, alpha=0.55,
        linewidths=0, zorder=3,
    )  # fmt: skip
    median = _median(grid.values)
    ends = (x - 0.31, x + 0.31)
    if n_layers == 1:
        ax.plot(
            [ends[0][0], ends[1][0]], [median[0], median[0]], color=INK, linewidth=1.8, zorder=4
        )
    else:
        ax.plot(x, median, color=INK, linewidth=1.8, zorder=4)
    handles = [
        Line2D([], [], linestyle="", marker="o", color=ACCENT, alpha=0.6, label="a head"),
        Line2D([], [], color=INK, linewidth=1.8, label="median"),
        *handles,
    ]
    for value in (lines or {}).values():
        ax.axhline(value, color=MUTED, linewidth=1.0, linestyle=DASHES, zorder=2)
    if log:
        ax.set_yscale("log")
    if ylim is not None:
        ax.set_ylim(*ylim)
    ax.set_xlim(-0.6, n_layers - 0.4)
    handles += name_ends(ax, [(float(y), name, MUTED) for name, y in (lines or {}).items()])
    step = max(int(np.ceil(n_layers / 24)), 1)
    ax.set_xticks(x[::step], [str(n) for n in grid.layers[::step]])
    ax.grid(axis="y")
    ax.set_xlabel("Layer")
    ax.set_ylabel(escape_math(label))
    for k, (name, cells) in enumerate(as_marks(marks).items()):
        colour = _HIGHLIGHTS[k % len(_HIGHLIGHTS)]
        places = [place for place in map(grid.locate, cells) if place is not None]
        for i, j in places:
            ax.plot(
                x[i] + spread[j], grid.values[i, j], "o", color="none", markeredgecolor=colour,
                markersize=8, markeredgewidth=1.5, zorder=5,
            )  # fmt: skip
            ax.annotate(
                f"{grid.layers[i]}.{grid.heads[j]}", (x[i] + spread[j], grid.values[i, j]),
                xytext=(6, 4), textcoords="offset points", fontsize=7.5, color=colour, zorder=5,
                bbox={"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "pad": 0.6},
            )  # fmt: skip
        if name and places:
            ring = Line2D([], [], linestyle="", marker="o", markerfacecolor="none")
            ring.set(markeredgecolor=colour, markersize=7, label=escape_math(name))
            handles.append(ring)
    _legend_below(ax, handles)
    put_title(target, ax, title, note)
    return ax


@styled
def curves(
    target: Target,
    values: Any,
    *,
    x: Any = None,
    title: str | None = None,
    label: str = "",
    xlabel: str = "",
    highlight: Mapping[str, int | Cell] | None = None,
    lines: Mapping[str, Any] | None = None,
    null: Any = None,
    xlog: bool = False,
    ylog: bool = False,
    ylim: tuple[float | None, float | None] | None = None,
    note: str | None = None,
) -> Axes:
    """Draw many curves quietly and a few loudly, such as each head's cumulative energy.

    Parameters
    ----------
    target : Figure, SubFigure or Axes
    values : array-like [layer, head, point] or [line, point]
        Three dimensions: curves are coloured by layer. A DataArray's third dimension may have
        any name; its coordinate is used for `x`.
    x : array-like [point], optional
        By default 1, 2, ....
    title : str, optional
    label, xlabel : str
        What the axes are, with units.
    highlight : mapping of name to line or (layer, head), optional
        Curves to draw bold and to name at their right end.
    lines : mapping of name to a value or to values [point], optional
        Reference lines, dashed.
    null : array-like [..., point], optional
        What twins gave; the range at each point is shaded.
    xlog, ylog : bool
        Logarithmic axes.
    ylim : (low, high), optional
    note : str, optional
        How to read the figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    attnlens.errors.AnalysisError
        When the numbers of points differ.
    """
    array, layers, heads, x = _curve_values(values, x)
    points = _points(x, array.shape[-1])
    fit(target, 6.8, 4.0)
    ax = axes_of(target)
    handles: list[Any] = []
    if null is not None:
        flat = as_array(null, "The twins' curves").reshape(-1, _last(null, len(points)))
        low, high = (_quiet(f, flat) for f in (np.nanmin, np.nanmax))
        ax.fill_between(points, low, high, color=_BAND, alpha=0.45, linewidth=0, zorder=1)
        handles.append(Patch(facecolor=_BAND, alpha=0.5, label="range of twins"))
    by_layer = array.ndim == 3
    flat = array.reshape(-1, array.shape[-1])
    group = np.repeat(np.arange(len(layers)), len(heads)) if by_layer else np.zeros(len(flat))
    segments = [np.column_stack([points, row]) for row in flat]
    shades = ListedColormap(
        SEQUENTIAL(np.linspace(0.3, 1.0, max(len(layers), 1) if by_layer else 2))
    )
    collection = LineCollection(
        segments, array=group, cmap=shades, norm=Normalize(-0.5, max(len(layers), 1) - 0.5),
        linewidths=0.9, alpha=float(np.clip(9 / len(flat) ** 0.6, 0.3, 0.9)), zorder=2,
    )  # fmt: skip
    ax.add_collection(collection)
    ax.update_datalim(np.column_stack([points[[0, -1]], finite_range(flat) or (0.0, 1.0)]))
    ends: list[tuple[float, str, str]] = []
    for k, (name, which) in enumerate((highlight or {}).items()):
        row = _row(which, layers, heads, len(flat))
        colour = _HIGHLIGHTS[k % len(_HIGHLIGHTS)]
        ax.plot(points, flat[row], color=PAPER, linewidth=3.6, zorder=4)
        ax.plot(points, flat[row], color=colour, linewidth=2.0, zorder=4)
        ends.append((last_finite(flat[row]), name, colour))
    for name, line in (lines or {}).items():
        y = np.broadcast_to(as_array(line, name), points.shape)
        ax.plot(points, y, color=MUTED, linewidth=1.2, linestyle=DASHES, zorder=3)
        ends.append((last_finite(y), name, MUTED))
    if xlog:
        ax.set_xscale("log")
    if ylog:
        ax.set_yscale("log")
    ax.autoscale_view()
    if ylim is not None:
        ax.set_ylim(*ylim)
    if len(points) > 1:
        ax.set_xlim(points.min(), points.max())
    ax.grid(True)
    ax.set_xlabel(escape_math(xlabel))
    ax.set_ylabel(escape_math(label))
    if not xlog:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=bool(np.all(points == points.round()))))
    handles += name_ends(ax, ends)
    if by_layer:
        _layer_bar(ax, collection, layers)
    _legend_below(ax, handles)
    put_title(target, ax, title, note)
    return ax


def _depth_band(ax: Axes, x: Array, null: Any, n_layers: int) -> list[Any]:
    chance = as_array(getattr(null, "values", null), "The twins' values")
    if hasattr(null, "dims") and "layer" in null.dims:
        chance = np.moveaxis(chance, list(null.dims).index("layer"), 0).reshape(n_layers, -1)
    elif chance.ndim == 1 and chance.size == 2:
        chance = np.tile(chance, (n_layers, 1))
    elif chance.ndim in (2, 3) and chance.shape[-2] == n_layers:
        chance = np.moveaxis(chance, -2, 0).reshape(n_layers, -1)
    else:
        raise AnalysisError(
            f"The twins' values have the shape {chance.shape}; {n_layers} layers are drawn.",
            hint="Pass [twin, layer, head], [layer, head] or (low, high).",
        )
    low, high = (_quiet(f, chance.T) for f in (np.nanmin, np.nanmax))
    wide = np.concatenate([[x[0] - 0.45], x, [x[-1] + 0.45]])
    low, high, middle = (np.pad(v, 1, mode="edge") for v in (low, high, _median(chance)))
    ax.fill_between(wide, low, high, color=_BAND, alpha=0.45, linewidth=0, zorder=1)
    ax.plot(wide, middle, color="#8d8375", linewidth=1.1, linestyle=(0, (1, 1.5)), zorder=2)
    return [Patch(facecolor=_BAND, alpha=0.5, label="range of twins")]


def _layer_bar(ax: Axes, collection: LineCollection, layers: list[int]) -> None:
    bar = ax.figure.colorbar(collection, ax=ax, fraction=0.035, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.solids.set_alpha(1.0)  # type: ignore[union-attr]
    shown = range(0, len(layers), max(int(np.ceil(len(layers) / 12)), 1))
    bar.set_ticks(list(shown), labels=[str(layers[i]) for i in shown])
    bar.ax.tick_params(length=0, labelsize=7.5)
    bar.set_label("Layer", fontsize=8.5)


def _legend_below(ax: Axes, handles: list[Any]) -> None:
    if handles:
        ax.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16),
            ncols=min(len(handles), 5), handletextpad=0.5, columnspacing=1.4,
        )  # fmt: skip


def _curve_values(values: Any, x: Any) -> tuple[Array, list[int], list[int], Any]:
    dims = tuple(getattr(values, "dims", ()))
    if {"layer", "head"} <= set(dims) and len(dims) == 3:
        point = next(d for d in dims if d not in ("layer", "head"))
        grid = as_grid(values, "curves", ("layer", "head", str(point)))
        if x is None and point in values.coords:
            x = values.coords[point].values
        return grid.values, grid.layers, grid.heads, x
    array = as_array(getattr(values, "values", values), "curves")
    if array.ndim == 1:
        array = array[None]
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise AnalysisError(
            f"curves draws [layer, head, point] or [line, point], not the shape {array.shape}."
        )
    lines = list(range(array.shape[0]))
    return array, lines, list(range(array.shape[1])) if array.ndim == 3 else [0], x


def _points(x: Any, n: int) -> Array:
    points = np.arange(1, n + 1, dtype=np.float64) if x is None else as_array(x, "x")
    if points.shape != (n,):
        raise AnalysisError(f"{points.size} values of x for curves of {n} points.")
    return points


def _last(null: Any, n: int) -> int:
    last = np.shape(null)[-1] if np.ndim(null) else 0
    if last != n:
        raise AnalysisError(f"The twins' curves have {last} points, the curves have {n}.")
    return n


def _row(which: int | Cell, layers: list[int], heads: list[int], n: int) -> int:
    if isinstance(which, tuple):
        if which[0] in layers and which[1] in heads:
            return layers.index(which[0]) * len(heads) + heads.index(which[1])
    elif 0 <= which < n:
        return int(which)
    raise AnalysisError(f"There is no curve {which!r} to highlight among {n}.")


def _median(values: Array) -> Array:
    return _quiet(np.nanmedian, values.T)


def _quiet(reduce: Any, values: Array) -> Array:
    """Reduce over the first dimension; NaN, without a warning, where nothing is finite."""
    values = np.where(np.isfinite(values), values, np.nan)
    empty = np.isnan(values).all(axis=0)
    filled = np.where(empty, 0.0, values)
    return np.where(empty, np.nan, reduce(filled, axis=0))
