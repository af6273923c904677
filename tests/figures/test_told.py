"""What is seen in a figure, in words."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import attnlens
from attnlens.drawing import draw_all
from attnlens.errors import AnalysisError
from attnlens.figures import extremes


def test_the_extreme_heads_are_named_by_their_coordinates() -> None:
    values = xr.DataArray(
        [[0.5, 0.25], [np.nan, 0.125], [0.75, 0.3]],
        dims=("layer", "head"),
        coords={"layer": [2, 3, 5], "head": [0, 4]},
    )
    told = "highest in head 5.0 (75%), lowest in head 3.4 (12%)"
    assert extremes(values, "{:.0%}") == extremes(values.T, "{:.0%}") == told
    assert extremes(values.values) == "highest in head 2.0 (0.75), lowest in head 1.1 (0.125)"


def test_values_without_extremes_are_told_as_such() -> None:
    assert extremes(np.full((2, 2), 0.5)) == "0.5 in every head"
    assert extremes(np.full((2, 2), np.nan)) == "no values"
    with pytest.raises(AnalysisError):
        extremes(np.zeros(3))


class Silent(attnlens.Analysis):
    """Draws, and says nothing of it."""

    name = "silent"
    requires = ()

    def compute(self, store: object) -> xr.Dataset:
        return xr.Dataset()

    @attnlens.figure("Scores of every head")
    def grid(self, result: xr.Dataset, figure: object) -> None:
        attnlens.figures.head_grid(figure, np.array([[0.125, 0.5], [1.0, 2.0]]), label="Score")

    @attnlens.figure("Loss with depth")
    def line(self, result: xr.Dataset, figure: object) -> None:
        ax = figure.subplots()
        ax.plot([0, 1, 2], [3.0, np.nan, 1.5])
        ax.set_xlabel("Layer")
        ax.set_ylabel("Loss")

    @attnlens.figure("Told")
    def told(self, result: xr.Dataset, figure: object) -> str:
        figure.subplots().plot([0, 1])
        return "Head 0.1 is the highest."


def test_a_figure_whose_author_says_nothing_is_told_by_its_axes(tmp_path) -> None:
    shown = draw_all(Silent(), xr.Dataset(), tmp_path / "silent")
    assert not shown["errors"]
    assert {f["name"]: f["alt"] for f in shown["figures"]} == {
        "grid": "Scores of every head. Layer by Head, values from 0.125 to 2.",
        "line": "Loss with depth. Loss by Layer, lines from 1.5 to 3.",
        "told": "Head 0.1 is the highest.",
    }
