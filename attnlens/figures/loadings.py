"""Loadings of components: over tokens, and over heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation, blended_transform_factory

from attnlens.errors import AnalysisError
from attnlens.figures.style import (
    MUTED,
    PALETTE,
    PAPER,
    colormap,
    fit,
    put_title,
    styled,
)
from attnlens.figures.tokens import escape_math, token_axis
from attnlens.figures.values import Array, as_matrix, colour_limits, names_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap

_MOST_ROWS = 240  # heads that loading_matrix shows; the largest are kept
_MOST_COMPONENTS = 40


@styled
def token_loadings(
    target: FigureBase,
    values: Any,
    tokens: Sequence[str | bytes],
    *,
    title: str | None = None,
    label: str = "Loading",
    components: Sequence[str] | None = None,
    per_row: int = 40,
    most: int = 200,
    cmap: str | Colormap | None = None,
    note: str | None = None,
) -> list[Axes]:
    """Draw how each component loads on each token of a text, wrapped like the text.

    Parameters
    ----------
    target : Figure or SubFigure
    values : array-like [component, pos]
        A DataArray is transposed. Values of both signs get a scale about 0.
    tokens : sequence of str or bytes [pos]
        Shown literally.
    title : str, optional
    label : str
        What the colour means.
    components : sequence of str, optional
        Names of the rows.
    per_row : int
        Tokens in a line.
    most : int
        Tokens drawn at most; the title's note says when there are more.
    cmap : str or Colormap, optional
    note : str, optional
        How to read the figure.

    Returns
    -------
    list of matplotlib.axes.Axes
        One for each line of text.

    Raises
    ------
    attnlens.errors.AnalysisError
        When there are more or fewer tokens than positions.
    """
    if tuple(getattr(values, "dims", ())) == ("pos", "component"):
        values = values.transpose("component", "pos")
    matrix = as_matrix(getattr(values, "values", values), "token_loadings")
    names = list(components) if components else names_of(values, "component", matrix.shape[0])
    if len(tokens) != matrix.shape[1]:
        raise AnalysisError(
            f"{len(tokens)} tokens label loadings on {matrix.shape[1]} positions.",
            hint="Pass the tokens of exactly the positions that are drawn.",
        )
    notes = [note] if note else []
    if len(tokens) > most:
        notes.append(f"The first {most} of {len(tokens)} tokens.")
    if matrix.shape[0] > _MOST_COMPONENTS:
        notes.append(f"The first {_MOST_COMPONENTS} of {matrix.shape[0]} components.")
    matrix, tokens = matrix[:_MOST_COMPONENTS, :most], tokens[:most]
    names = names[: matrix.shape[0]]
    n_rows = -(-len(tokens) // per_row)
    width = min(len(tokens), per_row)
    band = max(matrix.shape[0] * 0.2, 0.3)
    fit(target, max(width * 0.205 + 1.5, 4.6), n_rows * (band + 0.72) + 0.75)
    axes = [target.subplots()] if n_rows == 1 else list(target.subplots(n_rows, 1))
    signed = bool((matrix < 0).any())
    low, high = colour_limits(matrix, None, None if signed else 0.0, None, 0.0 if signed else None)
    chosen = colormap(cmap, diverging=signed)
    for r, ax in enumerate(axes):
        part = matrix[:, r * per_row : (r + 1) * per_row]
        image = ax.imshow(
            np.ma.masked_invalid(part), cmap=chosen, vmin=low, vmax=high, aspect="auto"
        )
        token_axis(ax, tokens[r * per_row : (r + 1) * per_row], "x", length=part.shape[1])
        ax.set_yticks(range(len(names)), [escape_math(name) for name in names], fontsize=7.5)
        ax.tick_params(axis="y", length=0)
        ax.set_xlim(-0.5, width - 0.5)  # the last line is as long as the others
        _bare(ax)
        for edge in range(part.shape[1] + 1):
            ax.axvline(edge - 0.5, color=PAPER, linewidth=0.8)
        for edge in range(1, part.shape[0]):
            ax.axhline(edge - 0.5, color=PAPER, linewidth=1.4)
    axes[len(axes) // 2].set_ylabel("Component")
    _bar(target, axes, image, label)
    put_title(target, axes[0], title, " ".join(notes) or None)
    return axes


@styled
def loading_matrix(
    target: FigureBase,
    values: Any,
    *,
    title: str | None = None,
    label: str = "Loading",
    rows: Sequence[str] | None = None,
    components: Sequence[str] | None = None,
    groups: Sequence[Hashable] | None = None,
    sort: bool = True,
    cmap: str | Colormap | None = None,
    note: str | None = None,
) -> list[Axes]:
    """Draw how heads load on components; heads that load alike lie side by side.

    Parameters
    ----------
    target : Figure or SubFigure
    values : array-like [row, component] or [layer, head, component]
        Three dimensions are flattened and the rows named ``layer.head``.
    title : str, optional
    label : str
        What the colour means.
    rows, components : sequence of str, optional
        Names.
    groups : sequence, or array-like [layer, head], optional
        The group of each row: groups lie together, with a strip of colour at the left. Negative
        numbers and None mean none, and come last.
    sort : bool
        Order rows by likeness (average linkage on cosine distance, optimal leaf order); with
        groups, inside each group.
    cmap : str or Colormap, optional
    note : str, optional
        How to read the figure.

    Returns
    -------
    list of matplotlib.axes.Axes
        Panels from left to right: long lists of heads go on in the next. Of more than 240 rows
        those with the largest loadings are drawn, and the note says so.

    Raises
    ------
    attnlens.errors.AnalysisError
        When names or groups do not match the rows.
    """
    matrix, names = _rows(values, rows)
    n_rows, n_components = matrix.shape
    columns = list(components) if components else names_of(values, "component", n_components)
    labels = None if groups is None else list(np.asarray(groups, dtype=object).ravel())
    for what, given in (("row names", names), ("groups", labels)):
        if given is not None and len(given) != n_rows:
            raise AnalysisError(f"{len(given)} {what} for {n_rows} rows of loadings.")
    notes = [note] if note else []
    order = _order(matrix, labels, sort=sort)
    if n_rows > _MOST_ROWS:
        size = np.linalg.norm(np.nan_to_num(matrix), axis=1)
        kept = set(np.argsort(-size, kind="stable")[:_MOST_ROWS].tolist())
        order = [i for i in order if i in kept]
        notes.append(f"The {_MOST_ROWS} of {n_rows} heads that load most.")
    n_panels = -(-len(order) // 40)
    tall = -(-len(order) // n_panels)
    panel = max(n_components * 0.3 + 0.75, 1.3)
    fit(target, max(n_panels * panel + 1.0, 4.6), tall * 0.155 + (1.5 if labels else 1.25))
    axes = [target.subplots()] if n_panels == 1 else list(target.subplots(1, n_panels))
    signed = bool((matrix < 0).any())
    low, high = colour_limits(matrix, None, None if signed else 0.0, None, 0.0 if signed else None)
    chosen = colormap(cmap, diverging=signed)
    colours = _group_colours(labels)
    for p, ax in enumerate(axes):
        part = order[p * tall : (p + 1) * tall]
        image = ax.imshow(
            np.ma.masked_invalid(matrix[part]), cmap=chosen, vmin=low, vmax=high, aspect="auto"
        )
        ax.set_yticks(range(len(part)), [escape_math(names[i]) for i in part], fontsize=7.2)
        ax.set_xticks(range(n_components), [escape_math(c) for c in columns], fontsize=7.5)
        ax.set_ylim(tall - 0.5, -0.5)
        ax.tick_params(length=0, pad=7 if labels else 3, axis="y")
        ax.tick_params(length=0, axis="x")
        _bare(ax)
        for edge in range(1, n_components):
            ax.axvline(edge - 0.5, color=PAPER, linewidth=1.4)
        if labels is not None:
            _strip(ax, [labels[i] for i in part], colours)
    if rows is None and np.ndim(getattr(values, "values", values)) == 3:
        axes[0].set_ylabel("Head (layer.head)")
    for ax in axes:
        ax.set_xlabel("Component")
    _bar(target, axes, image, label)
    _group_legend(target, colours, labels)
    put_title(target, axes[0], title, None)
    if notes:
        axes[0].set_title(" ".join(notes), fontsize=8.0, color=MUTED)
    return axes


def _rows(values: Any, rows: Sequence[str] | None) -> tuple[Array, list[str]]:
    dims = tuple(getattr(values, "dims", ()))
    if {"layer", "head"} <= set(dims) and len(dims) == 3:
        values = values.transpose("layer", "head", ...)
    array = np.asarray(getattr(values, "values", values), dtype=np.float64)
    if array.ndim == 3:
        layers = names_of(values, "layer", array.shape[0])
        heads = names_of(values, "head", array.shape[1])
        names = [f"{a}.{b}" for a in layers for b in heads]
        array = array.reshape(-1, array.shape[-1])
    else:
        names = names_of(
            values, str(dims[0]) if dims else "head", array.shape[0] if array.ndim else 0
        )
    return as_matrix(array, "loading_matrix"), list(rows) if rows is not None else names


def _order(matrix: Array, labels: list[Hashable] | None, *, sort: bool) -> list[int]:
    if labels is None:
        members = [list(range(len(matrix)))]
    else:
        kinds = sorted({k for k in labels if not _no_group(k)}, key=str)
        members = [[i for i, k in enumerate(labels) if k == kind] for kind in kinds]
        members.append([i for i, k in enumerate(labels) if _no_group(k)])
    return [i for group in members for i in (_alike(matrix, group) if sort else group)]


def _alike(matrix: Array, group: list[int]) -> list[int]:
    """Order rows so that like follows like."""
    if len(group) < 3:
        return group
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
    from scipy.spatial.distance import pdist

    part = np.nan_to_num(matrix[group])
    norms = np.linalg.norm(part, axis=1, keepdims=True)
    unit = np.divide(part, norms, out=np.zeros_like(part), where=norms > 0)
    distances = pdist(unit)  # of unit rows: a function of the cosine, and defined for zero rows
    tree = linkage(distances, "average")
    if len(group) <= 400:  # the optimal order costs the cube of the rows
        tree = optimal_leaf_ordering(tree, distances)
    return [group[i] for i in leaves_list(tree)]


def _no_group(kind: Hashable) -> bool:
    return kind is None or (not isinstance(kind, str) and float(kind) < 0)  # type: ignore[arg-type]


def _group_colours(labels: list[Hashable] | None) -> dict[Hashable, str]:
    kinds = sorted({k for k in labels or [] if not _no_group(k)}, key=str)
    return {kind: PALETTE[i % len(PALETTE)] for i, kind in enumerate(kinds)}


def _strip(ax: Axes, kinds: list[Hashable], colours: dict[Hashable, str]) -> None:
    # In inches from the axes' edge: the labels keep their distance however wide the panel is.
    edge = ScaledTranslation(0, 0, ax.transAxes)  # type: ignore[arg-type]
    place = blended_transform_factory(ax.figure.dpi_scale_trans + edge, ax.transData)
    for i, kind in enumerate(kinds):
        ax.add_patch(
            Rectangle(
                (-0.08, i - 0.5), 0.06, 1, transform=place, clip_on=False,
                facecolor=colours.get(kind, "#e4e6e8"), linewidth=0,
            )
        )  # fmt: skip
        if i and kinds[i - 1] != kind:
            ax.axhline(i - 0.5, color=MUTED, linewidth=0.8)


def _group_legend(
    target: FigureBase, colours: dict[Hashable, str], labels: list[Hashable] | None
) -> None:
    if labels is None:
        return
    handles = [Patch(facecolor=c, label=escape_math(str(k))) for k, c in colours.items()][:16]
    if any(_no_group(k) for k in labels):
        handles.append(Patch(facecolor="#e4e6e8", label="none"))
    target.legend(
        handles=handles, loc="outside lower left", ncols=min(len(handles), 8),
        title="Group (strip at the left)", title_fontsize=8.0, alignment="left", handlelength=1.1,
        handleheight=1.1, columnspacing=1.2,
    )  # fmt: skip


def _bare(ax: Axes) -> None:
    for spine in ax.spines.values():
        spine.set_visible(False)


def _bar(target: FigureBase, axes: list[Axes], image: ScalarMappable, label: str) -> None:
    bar = target.colorbar(image, ax=axes, fraction=0.025, pad=0.015, aspect=26, shrink=0.9)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()
    bar.ax.tick_params(length=2, labelsize=7.5)
    bar.set_label(escape_math(label), fontsize=8.5)
