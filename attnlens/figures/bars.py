"""Ranked bars in small panels, such as the top vocabulary of each component."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnlens.errors import AnalysisError
from attnlens.figures.style import (
    ACCENT,
    INK,
    MUTED,
    WARM,
    fit,
    put_title,
    styled,
)
from attnlens.figures.tokens import escape_math, show_token
from attnlens.figures.values import short_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_MOST_PANELS = 24


@styled
def bars(
    target: FigureBase,
    groups: Mapping[str, Sequence[tuple[str | bytes, float]]],
    *,
    title: str | None = None,
    label: str = "",
    most: int = 10,
    tokens: bool = True,
    columns: int = 3,
    note: str | None = None,
) -> list[Axes]:
    """Draw ranked bars, one panel for each group, all on one scale.

    Parameters
    ----------
    target : Figure or SubFigure
    groups : mapping of panel title to (name, value) pairs
        In the order given; the first `most` are drawn.
    title : str, optional
    label : str
        What the length means, with its unit.
    most : int
        Bars in a panel.
    tokens : bool
        Names are tokens: spaces and newlines are shown as marks.
    columns : int
        Panels side by side.
    note : str, optional
        How to read the figure.

    Returns
    -------
    list of matplotlib.axes.Axes
        Of more than 24 groups the first are drawn, and the note says so.

    Raises
    ------
    attnlens.errors.AnalysisError
        When there is no group.
    """
    if not groups:
        raise AnalysisError("bars was given no groups to draw.")
    shown = list(groups.items())[:_MOST_PANELS]
    notes = [note] if note else []
    if len(groups) > len(shown):
        notes.append(f"The first {len(shown)} of {len(groups)}.")
    n_columns = 2 if len(shown) == 4 and columns == 3 else min(columns, len(shown))
    n_rows = -(-len(shown) // n_columns)
    deep = max(max((len(pairs[:most]) for _, pairs in shown)), 1)
    fit(target, max(n_columns * 2.45 + 0.3, 4.6), n_rows * (deep * 0.175 + 0.42) + 0.85)
    panels = list(np.ravel(target.subplots(n_rows, n_columns, squeeze=False, sharex=True)))
    values = np.array([v for _, pairs in shown for _, v in pairs[:most]], dtype=np.float64)
    finite = values[np.isfinite(values)]
    low, high = (min(finite.min(), 0.0), max(finite.max(), 0.0)) if finite.size else (0.0, 1.0)
    room = (high - low or 1.0) * 0.24  # for the numbers at the bars' ends
    for ax, (name, pairs) in zip(panels, shown, strict=False):
        _panel(ax, name, pairs[:most], deep, values, tokens=tokens)
    for ax in panels[len(shown) :]:
        ax.set_visible(False)
    panels[0].set_xlim(low - (room if low < 0 else 0), high + (room if high > 0 else 0))
    if label:
        target.supxlabel(escape_math(label), fontsize=9.0)
    put_title(target, panels[0], title)
    if notes:
        target.text(
            0.012, 0.004, escape_math(" ".join(notes)), fontsize=8.0, color=MUTED, va="bottom"
        )
    return panels[: len(shown)]


def _panel(
    ax: Axes, name: str, pairs: Sequence[tuple[str | bytes, float]], deep: int, company: np.ndarray,
    *, tokens: bool,
) -> None:  # fmt: skip
    y = np.arange(len(pairs))
    lengths = np.array([v for _, v in pairs], dtype=np.float64)
    ax.barh(y, lengths, height=0.72, color=np.where(lengths < 0, WARM, ACCENT).tolist())
    labels = [show_token(n, 18) if tokens else escape_math(str(n)) for n, _ in pairs]
    ax.set_yticks(y, labels, fontsize=7.8)
    ax.set_ylim(deep - 0.4, -0.6)
    for i, value in enumerate(lengths):
        if np.isfinite(value):
            ax.annotate(
                short_number(value, company), (value, i), xytext=(3 if value >= 0 else -3, 0),
                textcoords="offset points", va="center", ha="left" if value >= 0 else "right",
                fontsize=7.0, color=MUTED,
            )  # fmt: skip
    ax.axvline(0, color=MUTED, linewidth=0.7)
    ax.set_title(escape_math(name), color=INK, fontweight="bold", fontsize=8.8)
    ax.tick_params(axis="y", length=0)
    ax.set_xticks([])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
