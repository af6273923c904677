"""Each kind of figure shows the numbers that it was given, where they belong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from attnlens import figures
from attnlens.errors import AnalysisError
from attnlens.figures.naming import spread_out
from attnlens.figures.values import short_number


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def texts(ax: Any) -> dict[tuple[float, float], str]:
    return {t.get_position(): t.get_text() for t in ax.texts}


def test_a_head_grid_shows_each_value_in_its_cell() -> None:
    values = np.arange(12.0).reshape(3, 4) / 10
    ax = figures.head_grid(figures.new_figure(), values, title="Title", label="unit")
    assert np.array_equal(ax.images[0].get_array(), values)
    assert texts(ax)[(3, 1)] == "0.70"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Head", "Layer")
    assert ax.yaxis_inverted()  # layer 0 on top


def test_a_data_array_is_turned_and_its_numbers_are_kept() -> None:
    values = xr.DataArray(
        np.arange(6.0).reshape(3, 2), dims=("head", "layer"),
        coords={"head": [0, 4, 5], "layer": [3, 7]},
    )  # fmt: skip
    ax = figures.head_grid(figures.new_figure(), values, marks={"known": [(7, 5), (0, 0)]})
    assert np.array_equal(ax.images[0].get_array(), values.values.T)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["3", "7"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "4", "5"]
    (mark,) = ax.lines  # (0, 0) is not drawn, so not marked
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (2.5, 0.5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 12), (12, 12), (48, 64)])
def test_grids_of_any_size_make_one_image_of_sensible_size(
    shape: tuple[int, int],
) -> None:
    figure = figures.new_figure()
    values = np.random.default_rng(0).random(shape)
    figures.head_grid(figure, values, title="A title", null=(0.2, 0.3))
    width, height = figure.get_size_inches()
    assert 4 <= width <= 11
    assert 1.5 <= height <= 11
    figure.canvas.draw()
    cells = figure.axes[0].get_window_extent()
    aspect = (cells.width / shape[1]) / (cells.height / shape[0])
    if min(shape) > 1:
        assert 0.6 < aspect < 1.7
    labels = [t.get_window_extent() for t in figure.axes[0].get_xticklabels()]
    assert all(a.x1 <= b.x0 for a, b in pairwise(labels))


@pytest.mark.parametrize(
    "values",
    [
        np.full((2, 3), np.nan),
        np.zeros((2, 3)),
        np.full((2, 3), 7e-12),
        np.array([[np.inf, -np.inf], [1.0, np.nan]]),
        np.ones((2, 3), dtype=np.float16),
        np.ones((2, 3), dtype=bool),
        np.ma.masked_equal(np.eye(3), 0),
    ],
)
@pytest.mark.parametrize("draw", [figures.head_grid, figures.depth_plot])
def test_odd_values_are_drawn(values: Any, draw: Callable[..., Any]) -> None:
    figure = figures.new_figure()
    draw(figure, values, title="t", null=values)
    figure.canvas.draw()


def test_tensors_are_drawn_without_being_asked_for() -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(4.0, requires_grad=True).reshape(2, 2).bfloat16()
    ax = figures.head_grid(figures.new_figure(), values)
    assert np.array_equal(ax.images[0].get_array(), [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda f: figures.head_grid(f, np.zeros((2, 2, 2))), "3 dimensions"),
        (lambda f: figures.head_grid(f, np.zeros((0, 2))), r"\(0, 2\)"),
        (lambda f: figures.head_grid(f, xr.DataArray(np.zeros((2, 2)), dims=("a", "b"))), "a, b"),
        (lambda f: figures.head_grid(f, [["x"]]), "numbers"),
        (lambda f: figures.head_grid(f, [[1.0]], cmap="nothing"), "'nothing'"),
        (lambda f: figures.depth_plot(f, np.zeros((2, 2)), null=np.zeros((3, 4))), "2 layers"),
        (lambda f: figures.curves(f, np.zeros((2, 5)), x=[1, 2]), "2 values of x .* 5 points"),
        (lambda f: figures.curves(f, np.zeros((2, 5)), highlight={"a": 2}), "no curve 2"),
        (lambda f: figures.bars(f, {}), "no groups"),
        (lambda f: figures.loading_matrix(f, np.zeros((3, 2)), groups=[0]), "1 groups for 3"),
        (lambda f: figures.category_grid(f, [1, 2]), r"\(2,\)"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_error(draw: Any, message: str) -> None:
    with pytest.raises(AnalysisError, match=message):
        draw(figures.new_figure())


def test_twins_are_a_band_on_the_colour_bar_within_its_range() -> None:
    figure = figures.new_figure()
    ax = figures.head_grid(figure, [[0.0, 1.0]], null=np.array([1.2, 1.5]))
    assert ax.images[0].get_clim() == (0.0, 1.5)
    figures.head_grid(figures.new_figure(), [[0.0, 1.0]], null=(50.0, 90.0))
    bar = figure.axes[1]
    assert "twins" in [t.get_text() for t in bar.texts]


def test_depth_shows_medians_and_the_twins_range() -> None:
    values = np.array([[0.0, 1.0, 5.0], [2.0, 3.0, 4.0]])
    twins = np.stack([values - 10, values + 10])
    ax = figures.depth_plot(figures.new_figure(), values, null=twins, lines={"uniform": 2.0})
    dots = ax.collections[-1].get_offsets()
    assert np.array_equal(np.sort(dots[:, 1]), np.sort(values.ravel()))
    assert any(np.array_equal(line.get_ydata(), [1.0, 3.0]) for line in ax.lines)
    band = ax.collections[0].get_paths()[0].get_extents()
    assert (band.ymin, band.ymax) == (-10, 15)
    assert "uniform" in [t.get_text() for t in ax.texts]


def test_curves_take_their_points_from_the_coordinate() -> None:
    values = xr.DataArray(
        np.random.default_rng(0).random((2, 3, 4)), dims=("layer", "head", "k"),
        coords={"layer": [5, 6], "head": [0, 1, 2], "k": [1, 2, 4, 8]},
    )  # fmt: skip
    ax = figures.curves(figures.new_figure(), values, highlight={"6.1": (6, 1)}, xlog=True)
    assert [len(c.get_segments()) for c in ax.collections] == [6]
    bold = ax.lines[-1]
    assert np.array_equal(bold.get_xdata(), [1, 2, 4, 8])
    assert np.array_equal(bold.get_ydata(), values.values[1, 1])


def test_curves_that_end_together_are_named_in_the_legend() -> None:
    values = np.cumsum(np.ones((3, 4)), axis=1) / 4
    ax = figures.curves(figures.new_figure(), values, highlight={"a": 0, "b": 1, "c": 2})
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b", "c"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_names_never_overlap(heights: list[float]) -> None:
    moved = spread_out(sorted(heights), 0.05)
    assert len(moved) == len(heights)
    assert all(b - a >= 0.05 - 1e-9 for a, b in pairwise(moved))


def test_token_loadings_wrap_and_lose_nothing() -> None:
    values = np.random.default_rng(0).random((2, 95))
    axes = figures.token_loadings(
        figures.new_figure(), values, [f"Ġ{i}" for i in range(95)], per_row=40
    )
    drawn = np.concatenate([ax.images[0].get_array() for ax in axes], axis=1)
    assert np.array_equal(drawn, values)
    shown = [t.get_text() for ax in axes for t in ax.get_xticklabels()]
    assert shown == [f"·{i}" for i in range(95)]
    assert len({ax.images[0].get_clim() for ax in axes}) == 1


def test_long_texts_are_cut_and_say_so() -> None:
    axes = figures.token_loadings(figures.new_figure(), np.ones((1, 1024)), ["a"] * 1024)
    assert sum(ax.images[0].get_array().shape[1] for ax in axes) == 200
    assert "first 200 of 1024 tokens" in axes[0].get_title(loc="left")


def test_like_heads_lie_side_by_side_and_none_is_lost() -> None:
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 3, (6, 8))
    values = np.eye(3)[kind] + 0.05 * rng.random((6, 8, 3))
    axes = figures.loading_matrix(figures.new_figure(), values)
    drawn = np.concatenate([ax.images[0].get_array() for ax in axes])
    names = [t.get_text() for ax in axes for t in ax.get_yticklabels()]
    assert sorted(names) == sorted(f"{i}.{j}" for i in range(6) for j in range(8))
    for name, row in zip(names, drawn, strict=True):
        layer, head = map(int, name.split("."))
        assert np.array_equal(row, values[layer, head])
    order = drawn.argmax(axis=1)
    assert (np.diff(order) != 0).sum() == 2


def test_groups_lie_together_and_the_ungrouped_last() -> None:
    groups = [1, -1, 0, 1, 0]
    values = np.random.default_rng(0).random((5, 2))
    (ax,) = figures.loading_matrix(figures.new_figure(), values, groups=groups)
    rows = [int(t.get_text()) for t in ax.get_yticklabels()]
    assert [groups[i] for i in rows] == [0, 0, 1, 1, -1]


def test_a_thousand_heads_are_reduced_to_the_largest() -> None:
    values = np.random.default_rng(0).random((32, 32, 2))
    values[3, 5] = 9
    axes = figures.loading_matrix(figures.new_figure(), values)
    names = [t.get_text() for ax in axes for t in ax.get_yticklabels()]
    assert len(names) == 240
    assert "3.5" in names
    assert "240 of 1024" in axes[0].get_title(loc="left")


def test_categories_have_their_colour_and_a_legend_with_counts() -> None:
    categories = np.array([[0, 1, -1], [1, 1, np.nan]], dtype=object)
    ax = figures.category_grid(figures.new_figure(), categories, names={1: "induction"})
    paint = ax.images[0].get_array()
    assert np.allclose(paint[0, 1], paint[1, 0])
    assert np.allclose(paint[0, 0], to_rgb(figures.PALETTE[0]))
    assert not np.allclose(paint[0, 0], paint[0, 1])
    entries = [t.get_text() for t in ax.get_legend().get_texts()]
    assert entries == ["0  (1)", "induction  (3)", "none  (2)"]


def test_bars_are_ranked_as_given_on_one_scale() -> None:
    groups = {"A": [("Ġx", 3.0), ("y", 1.0)], "B": [("z", -2.0)]}
    axes = figures.bars(figures.new_figure(), groups, most=2)
    assert [p.get_width() for p in axes[0].patches] == [3.0, 1.0]
    assert [t.get_text() for t in axes[0].get_yticklabels()] == ["·x", "y"]
    assert axes[0].get_xlim() == axes[1].get_xlim()


def test_six_hundred_panels_are_cut() -> None:
    figure = figures.new_figure()
    groups = {str(i): [("a", 1.0)] for i in range(600)}
    assert len(figures.bars(figure, groups)) == 24
    assert figure.get_size_inches().max() <= 40


def test_several_drawings_share_a_figure() -> None:
    figure = figures.new_figure(9, 4)
    left, right = figure.subplots(1, 2)
    figures.head_grid(left, np.eye(3), title="left")
    figures.depth_plot(right, np.eye(3), title="right", note="quiet")
    assert tuple(figure.get_size_inches()) == (9, 4)
    assert left.get_title(loc="left") == "left"


def test_the_palette_can_be_told_apart_in_every_vision() -> None:
    """Distances in OKLab, after full deficiency by Machado, Oliveira and Fernandes (2009)."""
    deutan = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                       [-0.011820, 0.042940, 0.968881]])  # fmt: skip
    protan = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                       [-0.003882, -0.048116, 1.051998]])  # fmt: skip
    lms = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    lab = np.array(
        [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    )
    colours = np.array([to_rgb(c) for c in figures.PALETTE[:8]])
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    for seen in (np.eye(3), deutan, protan):
        place = np.cbrt(np.clip(linear @ seen.T, 0, 1) @ lms.T) @ lab.T
        apart = np.linalg.norm(place[:, None] - place[None], axis=-1)
        assert apart[~np.eye(8, dtype=bool)].min() > 0.09


@pytest.mark.parametrize("cmap", [figures.SEQUENTIAL])
def test_the_sequential_scale_darkens_evenly(cmap: Any) -> None:
    linear = np.asarray(cmap(np.linspace(0, 1, 64)))[:, :3] ** 2.2
    lightness = np.cbrt(linear @ [0.2126, 0.7152, 0.0722])
    steps = -np.diff(lightness)
    assert steps.min() > 0
    assert steps.max() < 4 * steps.min()


@pytest.mark.parametrize(
    ("value", "company", "text"),
    [
        (0.5, None, "0.50"), (3.0, np.array([3.0, 4.0]), "3"), (0.0012, None, "1e-3"),
        (-0.5, None, "−0.50"), (123.4, np.array([123.4, 0.5]), "123"), (float("nan"), None, "–"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float, company: Any, text: str) -> None:
    assert short_number(value, company) == text


@pytest.mark.parametrize("n_components", [2, 40])
def test_head_labels_stand_clear_of_the_group_strip(n_components: int) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure()
    values = np.random.default_rng(0).random((6, n_components))
    (ax,) = figures.loading_matrix(figure, values, groups=[0, 0, 0, 1, 1, -1])
    figure.canvas.draw()
    strips = [p.get_window_extent() for p in ax.patches if isinstance(p, Rectangle)]
    labels = [t.get_window_extent() for t in ax.get_yticklabels()]
    assert max(box.x1 for box in labels) <= min(box.x0 for box in strips)
    assert max(box.x1 for box in strips) <= ax.get_window_extent().x0
