"""Figures are made and saved without pyplot, displays, dates or the user's settings."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from attnlens import figures

SCRIPT = """
import sys
from pathlib import Path
from attnlens import figures
for i in range(3):
    figure = figures.new_figure()
    figures.head_grid(figure, [[0.1, 0.2]], title="t", null=(0, 1))
    if i == 0:
        figures.save_figure(figure, Path(sys.argv[1]), "grid")
assert "matplotlib.pyplot" not in sys.modules
assert "torch" not in sys.modules
"""


def size_of(png: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height


def test_a_broken_display_and_a_window_backend_do_not_matter(tmp_path: Path) -> None:
    broken = {"MPLBACKEND": "TkAgg", "DISPLAY": "localhost:64.0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "ü 東")],
        env={**os.environ, **broken}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert (tmp_path / "ü 東" / "grid.png").stat().st_size > 1000


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    def draw(folder: str) -> list[bytes]:
        figure = figures.new_figure()
        figures.depth_plot(figure, np.eye(4), title="Same", null=np.zeros((2, 4, 4)))
        return [p.read_bytes() for p in figures.save_figure(figure, tmp_path / folder, "f")]

    first, second = draw("a"), draw("b")
    assert first == second
    assert not re.search(rb"20\d\d-\d\d-\d\d", first[1])


def test_the_users_settings_neither_change_nor_matter(tmp_path: Path) -> None:
    def draw(folder: str) -> bytes:
        figure = figures.new_figure()
        figures.head_grid(figure, [[0.1, 0.9]], title="t", label="x")
        return figures.save_figure(figure, tmp_path / folder, "f")[1].read_bytes()

    plain = draw("plain")
    theirs = {"font.size": 31.0, "axes.facecolor": "red", "svg.fonttype": "path",
              "xtick.labelsize": 40.0, "image.cmap": "jet"}  # fmt: skip
    with matplotlib.rc_context(theirs):
        before = dict(matplotlib.rcParams)
        assert draw("theirs") == plain
        assert dict(matplotlib.rcParams) == before


def test_text_stays_text_in_svg(tmp_path: Path) -> None:
    figure = figures.new_figure()
    figures.bars(figure, {"<b>&": [("$5", 1.0), ("<script>", 2.0)]}, title="a $ b < c")
    svg = figures.save_figure(figure, tmp_path, "f")[1].read_text(encoding="utf-8")
    root = ElementTree.fromstring(svg)
    texts = {"".join(e.itertext()).strip() for e in root.iter() if e.tag.endswith("}text")}
    assert {"$5", "<script>", "<b>&", "a $ b < c"} <= texts
    assert "<script" not in svg


def test_a_figure_of_any_size_can_be_saved(tmp_path: Path) -> None:
    figure = Figure(figsize=(4, 600))
    for i in range(0, 600, 60):
        figure.text(0.5, i / 600, str(i))
    png, _ = figures.save_figure(figure, tmp_path, "tall")
    assert max(size_of(png)) <= 16_000
    assert tuple(figures.new_figure(5, 900).get_size_inches()) == (5, 40)


def test_somebody_elses_figure_comes_back_as_it_was(tmp_path: Path) -> None:
    figure = Figure(figsize=(3, 2))
    figure.set_gid('a "sentence" & more')
    canvas = figure.canvas
    _, svg = figures.save_figure(figure, tmp_path, "f")
    assert figure.canvas is canvas
    assert figure.get_gid() == 'a "sentence" & more'
    assert b"sentence" not in svg.read_bytes()


def test_a_figure_shows_itself_in_a_notebook() -> None:
    figure = figures.new_figure(3, 2)
    figures.head_grid(figure, [[1.0]])
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [float("nan"), -3.0, 0.0, 1e9])
def test_sizes_are_held_within_reason(width: float) -> None:
    assert 1 <= figures.new_figure(width).get_size_inches()[0] <= 40
