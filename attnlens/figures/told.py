"""What a figure shows, in words: for those who cannot see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnlens.figures.values import as_grid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 6


def extremes(values: Any, form: str = "{:.3g}") -> str:
    """Name the heads with the highest and the lowest value, for alternative texts.

    Parameters
    ----------
    values : array-like [layer, head]
        As :func:`attnlens.figures.head_grid` takes them.
    form : str
        How a value is written.

    Returns
    -------
    str
        For example ``"highest in head 0.3 (127), lowest in head 1.4 (29.9)"``; of values that are
        all alike, their value.

    Raises
    ------
    attnlens.errors.AnalysisError
        When the values are not over layers and heads, or there are none.
    """
    grid = as_grid(values, "extremes")
    finite = np.isfinite(grid.values)
    if not finite.any():
        return "no values"
    high = np.where(finite, grid.values, -np.inf)
    low = np.where(finite, grid.values, np.inf)
    most, least = form.format(high.max()), form.format(low.min())
    if most == least:
        return f"{most} in every head"
    names = []
    for place in (high.argmax(), low.argmin()):
        layer, head = np.unravel_index(place, grid.values.shape)
        names.append(f"{grid.layers[layer]}.{grid.heads[head]}")
    return f"highest in head {names[0]} ({most}), lowest in head {names[1]} ({least})"


def tell(figure: Figure, title: str) -> str:
    """Describe a figure by its axes, where its author did not: labels, and the range of the data.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    title : str

    Returns
    -------
    str
    """
    panels = [
        said
        for ax in figure.get_axes()
        if ax.get_visible() and ax.get_label() != "<colorbar>" and (said := _panel(ax))
    ]
    more = len(panels) - _MOST_PANELS
    shown = [*panels[:_MOST_PANELS], *([f"and {more} more panels"] if more > 0 else [])]
    return f"{title.rstrip('.')}. {'; '.join(shown)}." if shown else title


def _panel(ax: Axes) -> str:
    name = ax.get_title("left") or ax.get_title()
    labels = [label for label in (ax.get_ylabel(), ax.get_xlabel()) if label]
    data = [
        _range("values", [image.get_array() for image in ax.images]),
        _range("lines", [line.get_ydata() for line in ax.lines]),
        _range("points", [np.asarray(c.get_offsets())[..., 1] for c in ax.collections]),
    ]
    parts = [" by ".join(labels), *(part for part in data if part)]
    text = ", ".join(part for part in parts if part)
    return f"{name}: {text}" if name and text else text or name


def _range(what: str, arrays: Iterable[Any]) -> str:
    """Say from where to where numbers go, masked ones left out."""
    parts = [np.ma.compressed(np.ma.masked_invalid(np.asanyarray(a, dtype=float))) for a in arrays]
    numbers = np.concatenate(parts) if parts else np.empty(0)
    return f"{what} from {numbers.min():.3g} to {numbers.max():.3g}" if numbers.size else ""
