"""Figures: one calm style, literal tokens, and nothing that stays open.

Every function draws on a :class:`matplotlib.figure.Figure` (or sub-figure, or Axes) that it is
given, returns the Axes, and touches neither pyplot nor the user's settings. A figure that is still
empty is given the size that its content asks for.
"""

from __future__ import annotations

from attnlens.figures.bars import bars
from attnlens.figures.grids import category_grid, head_grid
from attnlens.figures.lines import curves, depth_plot
from attnlens.figures.loadings import loading_matrix, token_loadings
from attnlens.figures.style import (
    DIVERGING,
    PALETTE,
    SEQUENTIAL,
    STYLE,
    is_blank,
    new_figure,
    save_figure,
    style,
)
from attnlens.figures.tokens import show_token, token_axis, visible_token
from attnlens.figures.told import extremes

__all__ = [
    "DIVERGING",
    "PALETTE",
    "SEQUENTIAL",
    "STYLE",
    "bars",
    "category_grid",
    "curves",
    "depth_plot",
    "extremes",
    "head_grid",
    "is_blank",
    "loading_matrix",
    "new_figure",
    "save_figure",
    "show_token",
    "style",
    "token_axis",
    "token_loadings",
    "visible_token",
]
