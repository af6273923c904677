"""Names of lines, written where the lines end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from attnlens.figures.style import MUTED
from attnlens.figures.tokens import escape_math

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes

    from attnlens.figures.values import Array

DASHES = (0, (4, 2.5))


def name_ends(ax: Axes, ends: Iterable[tuple[float, str, str]]) -> list[Line2D]:
    """Write names at the right, at the height of what they name.

    Where ends lie too close together for that, nothing is written and entries for a legend are
    returned instead.
    """
    ends = list(ends)
    ax.get_ylim()  # settles the scale, which matplotlib leaves until it is asked for
    figure = ax.get_figure(root=True)
    inches = (figure.get_size_inches()[1] if figure is not None else 4.0) * 0.68
    gap = 0.135 / inches
    to_axes = ax.transData + ax.transAxes.inverted()
    known = [(float(to_axes.transform((ax.get_xlim()[1], y))[1]), n, c) for y, n, c in ends
             if np.isfinite(y)]  # fmt: skip
    known.sort()
    heights = spread_out([y for y, _, _ in known], gap)
    if any(abs(h - y) > 0.75 * gap for h, (y, _, _) in zip(heights, known, strict=True)):
        return [_key(name, colour) for _, name, colour in ends]
    for height, (_, name, colour) in zip(heights, known, strict=True):
        ax.text(
            1.012, height, escape_math(name), transform=ax.transAxes, fontsize=7.8, color=colour,
            va="center", ha="left", clip_on=False,
        )  # fmt: skip
    return []


def _key(name: str, colour: str) -> Line2D:
    if colour == MUTED:
        line = Line2D([], [], color=colour, linewidth=1.2, linestyle=DASHES)
    else:
        line = Line2D([], [], color=colour, linewidth=2.0)
    line.set_label(escape_math(name))
    return line


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Move sorted heights apart to at least `gap`, each group about its own mean."""
    groups = [[min(max(h, 0.0), 1.0)] for h in heights]
    merged: list[list[float]] = []
    for group in groups:
        merged.append(group)
        while len(merged) > 1:
            below, above = merged[-2], merged[-1]
            top = sum(below) / len(below) + gap * (len(below) - 1) / 2
            bottom = sum(above) / len(above) - gap * (len(above) - 1) / 2
            if bottom - top >= gap:
                break
            merged[-2:] = [below + above]
    return [
        sum(group) / len(group) + gap * (i - (len(group) - 1) / 2)
        for group in merged
        for i in range(len(group))
    ]


def last_finite(y: Array) -> float:
    """Return the last finite value of a line; NaN when it has none."""
    finite = y[np.isfinite(y)]
    return float(finite[-1]) if finite.size else float("nan")
