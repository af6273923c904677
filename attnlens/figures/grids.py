"""Heat maps and categories over the layer x head grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from attnlens.errors import AnalysisError
from attnlens.figures.style import (
    FAINT,
    INK,
    MUTED,
    PALETTE,
    PAPER,
    Target,
    axes_of,
    colormap,
    fit,
    is_dark,
    put_title,
    styled,
)
from attnlens.figures.tokens import escape_math
from attnlens.figures.values import (
    Array,
    Grid,
    Marks,
    as_grid,
    as_marks,
    colour_limits,
    null_range,
    short_number,
    ticks,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap

_ANNOTATE = 200  # cells; more are left to their colour
_MARKERS = "osD^vP*X"
_MARK_COLOURS = (
    "#d55e00",
    "#e3a400",
    "#b0307c",
    "#111111",
    "#0072b2",
    "#009e73",
    "#7a6a00",
    "#666",
)


@styled
def head_grid(
    target: Target,
    values: Any,
    *,
    title: str | None = None,
    label: str = "",
    cmap: str | Colormap | None = None,
    null: Any = None,
    marks: Marks | None = None,
    centre: float | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
    annotate: bool | None = None,
    note: str | None = None,
) -> Axes:
    """Draw one value per head as a heat map of layer by head, readable from 1 x 1 to 48 x 64.

    Parameters
    ----------
    target : Figure, SubFigure or Axes
    values : array-like [layer, head]
        A DataArray is transposed, and its coordinates number the layers and heads. Cells that are
        not finite are hatched.
    title : str, optional
        What is seen.
    label : str
        What the colour means, with its unit; stands at the colour bar.
    cmap : str or Colormap, optional
        ``"sequential"``, ``"diverging"`` or any that matplotlib knows. Without it: diverging when
        `centre` is given, sequential otherwise.
    null : array-like or (low, high), optional
        What twins gave, over any dimensions; its range is hatched on the colour bar.
    marks : mapping of label to (layer, head) pairs, mapping of (layer, head) to label, or pairs
        Heads to outline and to name in a legend. Heads that are not drawn are left out.
    centre : float, optional
        The value at the middle of a diverging scale.
    vmin, vmax : float, optional
        Ends of the colour scale.
    annotate : bool, optional
        Write the values into the cells; by default when there are at most 200.
    note : str, optional
        A quiet line under the title: how to read the figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    attnlens.errors.AnalysisError
        When the values are not over layers and heads, or there are none.
    """
    grid = as_grid(values, "head_grid")
    chance = null_range(null)
    low, high = colour_limits(grid.values, chance, vmin, vmax, centre)
    flat = len(grid.layers) < 5  # too low for a colour bar beside it
    cell = _fit_grid(target, grid, bar=True, flat=flat, legend=len(as_marks(marks)), title=title)
    ax = axes_of(target)
    chosen = colormap(cmap, diverging=centre is not None)
    image = ax.imshow(
        np.ma.masked_invalid(grid.values), cmap=chosen, vmin=low, vmax=high, aspect="auto"
    )
    _hatch_missing(ax, ~np.isfinite(grid.values))
    _number_axes(ax, grid, cell)
    few = grid.values.size <= _ANNOTATE and cell >= 0.3
    if few if annotate is None else annotate:
        for (i, j), value in np.ndenumerate(grid.values):
            if np.isfinite(value):
                dark = is_dark(image.to_rgba(np.array([value]))[0])
                _write(ax, j, i, short_number(value, grid.values), dark=dark, cell=cell)
    _colour_bar(ax, image, label, chance, flat=flat)
    _outline(ax, grid, marks)
    put_title(target, ax, title, note)
    return ax


@styled
def category_grid(
    target: Target,
    categories: Any,
    *,
    title: str | None = None,
    names: Mapping[Any, str] | None = None,
    none: str = "none",
    legend_title: str | None = None,
    marks: Marks | None = None,
    note: str | None = None,
) -> Axes:
    """Draw the group that each head belongs to, as coloured cells of the layer x head grid.

    Parameters
    ----------
    target : Figure, SubFigure or Axes
    categories : array-like [layer, head] of int or str
        Negative numbers, NaN, None and the empty string mean that the head is in no group.
    title : str, optional
    names : mapping, optional
        Category to the name shown in the legend; by default the category itself.
    none : str
        Name of what is in no group.
    legend_title : str, optional
    marks : mapping or pairs, optional
        As in :func:`head_grid`.
    note : str, optional
        How to read the figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    attnlens.errors.AnalysisError
        When the categories are not over layers and heads, or there are none.
    """
    raw = np.asarray(getattr(categories, "values", categories), dtype=object)
    if raw.ndim != 2 or not raw.size:
        raise AnalysisError(f"category_grid draws categories over (layer, head), not {raw.shape}.")
    if tuple(getattr(categories, "dims", ())) == ("head", "layer"):
        categories, raw = categories.transpose("layer", "head"), raw.T
    kinds = _kinds(raw)
    index = {kind: i for i, kind in enumerate(kinds)}
    codes = np.array([[index.get(_kind(v), -1) for v in row] for row in raw], dtype=np.float64)
    shaped = categories.copy(data=codes) if hasattr(categories, "coords") else codes
    grid = as_grid(shaped, "category_grid")
    entries = len(kinds) + len(as_marks(marks))
    cell = _fit_grid(target, grid, bar=False, flat=False, legend=0, title=title, entries=entries)
    ax = axes_of(target)
    paint = np.array([to_rgb(_colour(int(code))) for code in grid.values.ravel()])
    ax.imshow(paint.reshape(*grid.values.shape, 3), aspect="auto")
    write = len(kinds) > 1 and grid.values.size <= 2 * _ANNOTATE and cell >= 0.22
    for (i, j), code in np.ndenumerate(grid.values):
        if code >= len(PALETTE):  # the colours go round again: told apart by a hatch
            ax.add_patch(
                Rectangle(
                    (j - 0.5, i - 0.5), 1, 1, facecolor="none", edgecolor=PAPER, linewidth=0,
                    hatch=_hatch(int(code)),
                )
            )  # fmt: skip
        if write and code >= 0:
            dark = is_dark(to_rgb(_colour(int(code))))
            _write(ax, j, i, _short(kinds[int(code)]), dark=dark, cell=cell)
    _number_axes(ax, grid, cell)
    _legend_of_kinds(ax, kinds, grid.values, names or {}, none, legend_title)
    _outline(ax, grid, marks)
    put_title(target, ax, title, note)
    return ax


def _fit_grid(
    target: Target, grid: Grid, *, bar: bool, flat: bool, legend: int, title: str | None,
    entries: int = 0,
) -> float:  # fmt: skip
    """Size an empty figure so that cells are about square; return a cell's side, in inches."""
    rows, columns = len(grid.layers), len(grid.heads)
    cell = float(np.clip(min(7.6 / columns, 8.0 / rows), 0.125, 0.46))
    width = columns * cell + 0.75 + (0.95 if bar and not flat else 0) + (0 if bar else 1.5)
    height = rows * cell + 1.05 + (0.75 if bar and flat else 0) + (0.3 if legend else 0)
    fit(target, max(width, 4.6), max(height, 1.9, 0.2 * entries + 1.1))
    return cell


def _number_axes(ax: Axes, grid: Grid, cell: float) -> None:
    fits = max(int(0.24 / cell + 0.99), 1)  # cells that one tick label takes
    columns = ticks(len(grid.heads), max(len(grid.heads) // fits, 1))
    rows = ticks(len(grid.layers), max(len(grid.layers) // max(int(0.17 / cell + 0.99), 1), 1))
    ax.set_xticks(columns, [str(grid.heads[i]) for i in columns])
    ax.set_yticks(rows, [str(grid.layers[i]) for i in rows])
    ax.set_xlabel("Head")
    ax.set_ylabel("Layer")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if grid.values.size <= 1200:  # thin gaps between cells help the eye count
        ax.set_xticks(np.arange(-0.5, len(grid.heads)), minor=True)
        ax.set_yticks(np.arange(-0.5, len(grid.layers)), minor=True)
        ax.grid(which="minor", color=PAPER, linewidth=min(1.2, cell * 4))
        ax.set_axisbelow(False)
        ax.tick_params(which="minor", length=0)


def _write(ax: Axes, x: float, y: float, text: str, *, dark: bool, cell: float) -> None:
    size = min(8.0, 72 * cell * 0.92 / (0.62 * max(len(text), 2)))
    ax.text(
        x, y, escape_math(text), ha="center", va="center", fontsize=size,
        color=PAPER if dark else INK, in_layout=False,
    )  # fmt: skip


def _hatch_missing(ax: Axes, missing: Any) -> None:
    for i, j in np.argwhere(missing):
        ax.add_patch(
            Rectangle(
                (j - 0.5, i - 0.5), 1, 1, facecolor="none", edgecolor="#b9b3aa", hatch="////",
                linewidth=0,
            )
        )  # fmt: skip


def _colour_bar(
    ax: Axes, image: ScalarMappable, label: str, chance: tuple[float, float] | None, *, flat: bool
) -> None:
    figure = ax.figure
    bar = figure.colorbar(
        image, ax=ax, orientation="horizontal" if flat else "vertical",
        fraction=0.08, pad=0.03, aspect=28 if flat else 24,
    )  # fmt: skip
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()
    bar.ax.tick_params(length=2, labelsize=7.5)
    bar.set_label(escape_math(label), fontsize=8.5)
    if chance is None:
        return
    low, high = (float(np.clip(v, *image.get_clim())) for v in chance)
    ends = image.get_clim()
    thin = (ends[1] - ends[0]) * 0.006
    low, high = (low, high) if high - low > 2 * thin else (low - thin, high + thin)
    span = bar.ax.axvspan if flat else bar.ax.axhspan
    span(low, high, facecolor="none", edgecolor=PAPER, hatch="//////", linewidth=0)
    span(low, high, facecolor="none", edgecolor=INK, linewidth=1.0)
    middle = (low + high) / 2
    if flat:
        where, anchor = (middle, 1.25), {"ha": "center", "va": "bottom"}
        transform = bar.ax.get_xaxis_transform()
    else:
        where, anchor = (-0.35, middle), {"ha": "right", "va": "center", "rotation": "vertical"}
        transform = bar.ax.get_yaxis_transform()
    bar.ax.text(*where, "twins", transform=transform, fontsize=7.5, color=INK, **anchor)  # type: ignore[arg-type]


def _outline(ax: Axes, grid: Grid, marks: Marks | None) -> None:
    handles = []
    for k, (name, cells) in enumerate(as_marks(marks).items()):
        colour = _MARK_COLOURS[k % len(_MARK_COLOURS)]
        marker = _MARKERS[k % len(_MARKERS)]
        places = [place for place in map(grid.locate, cells) if place is not None]
        for i, j in places:
            for edge, line in ((PAPER, 3.4), (colour, 1.8)):
                ax.add_patch(
                    Rectangle(
                        (j - 0.5, i - 0.5), 1, 1, facecolor="none", edgecolor=edge,
                        linewidth=line, zorder=4, clip_on=False,
                    )
                )  # fmt: skip
            ax.plot(
                j + 0.5, i - 0.5, marker, color=colour, markeredgecolor=PAPER, markersize=6,
                markeredgewidth=0.8, zorder=5, clip_on=False,
            )  # fmt: skip
        if name and places:
            handles.append(
                Line2D([], [], linestyle="", marker=marker, color=colour, label=escape_math(name))
            )
    if handles:
        legend = ax.get_legend()
        second = ax.legend(
            handles=handles, loc="upper left" if legend is None else "lower left",
            bbox_to_anchor=(0, -0.02) if legend is None else (1.01, 0),
            ncols=min(len(handles), 3) if legend is None else 1,
            handletextpad=0.3, columnspacing=1.2, borderaxespad=1.9 if legend is None else 0,
        )  # fmt: skip
        if legend is not None:
            ax.add_artist(legend)
        second.set_zorder(6)


def _kind(value: Hashable) -> Hashable | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return value
    number = float(value)  # type: ignore[arg-type]
    if np.isnan(number) or number < 0:
        return None
    return int(number) if number.is_integer() else number


def _kinds(raw: Any) -> list[Hashable]:
    found = {kind for kind in map(_kind, raw.ravel()) if kind is not None}
    return sorted(found, key=lambda kind: (isinstance(kind, str), kind))


def _short(kind: Hashable) -> str:
    text = str(kind)
    return text if len(text) <= 3 else text[:2]


def _colour(code: int) -> str:
    return "#f1f3f4" if code < 0 else PALETTE[code % len(PALETTE)]


def _hatch(code: int) -> str:
    return ("", "////", "....", "xxxx")[max(code, 0) // len(PALETTE) % 4]


def _legend_of_kinds(
    ax: Axes, kinds: list[Hashable], codes: Array, names: Mapping[Any, str], none: str,
    title: str | None,
) -> None:  # fmt: skip
    handles = []
    for i, kind in enumerate(kinds[:32]):
        n = int((codes == i).sum())
        text = f"{names.get(kind, str(kind))}  ({n})"
        patch = Patch(facecolor=_colour(i), edgecolor=PAPER, hatch=_hatch(i), linewidth=0)
        patch.set_label(escape_math(text))
        handles.append(patch)
    if len(kinds) > 32:
        handles.append(Patch(facecolor="none", label=f"and {len(kinds) - 32} more"))
    if (codes < 0).any():
        text = f"{none}  ({int((codes < 0).sum())})"
        handles.append(Patch(facecolor=_colour(-1), edgecolor=FAINT, label=escape_math(text)))
    legend = ax.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0,
        title=None if title is None else escape_math(title), alignment="left",
        handlelength=1.1, handleheight=1.1,
    )  # fmt: skip
    legend.get_title().set_color(MUTED)
