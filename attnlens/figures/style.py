"""The look of all figures, and how they are made and saved without any global state."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import matplotlib.style
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure, FigureBase

from attnlens.errors import AnalysisError
from attnlens.figures.tokens import drawable, escape_math, installed_fonts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.colors import Colormap

P = ParamSpec("P")
T = TypeVar("T")
Target = FigureBase | Axes

INK, MUTED, FAINT, PAPER = "#1c2733", "#5b6875", "#d5dbe0", "#ffffff"
ACCENT, WARM = "#1d6f93", "#c2571a"

# Okabe and Ito's colours, three of them moved so that every pair stays apart under full protanopia
# and deuteranopia too; the next eight are their kin, for those who need more.
PALETTE = (
    "#0072b2", "#e69f00", "#009e73", "#d58fb8", "#d55e00", "#8fd0f2", "#e8d84a", "#333333",
    "#6a9fc4", "#f3cf85", "#7fceb9", "#8a3f6b", "#7f3800", "#1b4965", "#8d8420", "#a6a6a6",
)  # fmt: skip

SEQUENTIAL = LinearSegmentedColormap.from_list(
    "attnlens",
    ["#f5f7f6", "#d3e5e3", "#97c6c8", "#529fae", "#2a728f", "#1c4b68", "#10293f"],
).with_extremes(bad="#e9e6e1")
DIVERGING = LinearSegmentedColormap.from_list(
    "attnlens_diverging",
    ["#7d3207", "#c2631f", "#e8b48a", "#f7f5f2", "#9bc4dd", "#3f84b3", "#154a76"],
).with_extremes(bad="#e9e6e1")

DPI = 160
MAX_INCHES = 40.0
MAX_PIXELS = 16_000
# What a browser tries before matplotlib's own font: all of these are no wider than DejaVu Sans,
# by which the layout was made, so that nothing overflows.
_SVG_FONTS = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

STYLE: dict[str, Any] = {
    "figure.facecolor": PAPER,
    "figure.dpi": 110,
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "savefig.facecolor": PAPER,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": True,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.0,
    "axes.linewidth": 0.7,
    "axes.titlesize": 9.0,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titlepad": 6.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "axes.prop_cycle": cycler(color=PALETTE[:8]),
    "grid.color": "#eceff1",
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "image.interpolation": "nearest",
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "attnlens",
}
"""Settings that differ from matplotlib's defaults; :func:`style` applies them for a while."""


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw in the common style inside a ``with``; the user's own rcParams return afterwards.

    Yields
    ------
    None
    """
    fonts = {"font.sans-serif": list(installed_fonts())}
    with matplotlib.style.context(["default", {**STYLE, **fonts}]):
        yield


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Run a drawing function in the common style."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with style():
            return function(*args, **kwargs)

    return wrapper


class _Renderer(RendererAgg):
    """Writes the code point of every character that no installed font has, instead of a box."""

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float,
        ismath: Any = False, mtext: Any = None,
    ) -> None:  # fmt: skip
        super().draw_text(  # type: ignore[no-untyped-call]
            gc, x, y, drawable(s), prop, angle, ismath, mtext
        )

    def get_text_width_height_descent(
        self, s: str, prop: Any, ismath: Any
    ) -> tuple[float, float, float]:
        size = super().get_text_width_height_descent(  # type: ignore[no-untyped-call]
            drawable(s), prop, ismath
        )
        return tuple(size)


class _Canvas(FigureCanvasAgg):
    """An Agg canvas that needs no display and no backend setting."""

    def get_renderer(self) -> RendererAgg:
        width, height = self.get_width_height(physical=True)
        key = (width, height, self.figure.dpi)
        if getattr(self, "_attnlens_key", None) != key:
            self.renderer: RendererAgg = _Renderer(  # type: ignore[no-untyped-call]
                width, height, self.figure.dpi
            )
            self._attnlens_key = key
        return self.renderer


class HeadFigure(Figure):
    """A matplotlib figure that shows itself, once, as the last line of a notebook's cell."""

    def _repr_png_(self) -> bytes:
        return _png(self, 2 * 72)


@styled
def new_figure(width: float = 7.2, height: float = 4.2) -> Figure:
    """Make an empty figure that belongs to nobody: no pyplot, no window, nothing left open.

    Parameters
    ----------
    width, height : float
        In inches; each is held between 1 and 40.

    Returns
    -------
    matplotlib.figure.Figure
        With constrained layout and an Agg canvas, whatever ``MPLBACKEND`` and ``DISPLAY`` say.
    """
    figure = HeadFigure(figsize=(_inches(width), _inches(height)), layout="constrained")
    _Canvas(figure)
    return figure


@styled
def is_blank(figure: Figure) -> bool:
    """Return whether nothing was drawn on a figure: no data and no words, at most empty axes.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    """
    parts: list[FigureBase] = [figure]
    for part in parts:
        parts += part.subfigs
    beside = any(
        p.texts or p.lines or p.patches or p.images or p.legends or p.artists for p in parts
    )
    inside = any(ax.has_data() or ax.texts or ax.tables or ax.artists for ax in figure.axes)
    return not (beside or inside)


def save_figure(figure: Figure, folder: Path | str, name: str) -> tuple[Path, Path]:
    """Write a figure as ``NAME.png`` and ``NAME.svg``.

    The SVG is the same byte for byte when the figure is: it holds no date and no random names. Its
    text stays text, so that tokens in any script are readable, selectable and searchable. A figure
    of any size can be saved: the PNG's resolution falls when it would exceed 16,000 pixels a side.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    folder : pathlib.Path or str
        Made when it is not there.
    name : str
        The files' stem.

    Returns
    -------
    png, svg : pathlib.Path
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    longest = max(*figure.get_size_inches(), 1.0)
    png.write_bytes(_png(figure, min(DPI, MAX_PIXELS / longest)))
    with _laid_out(figure):
        svg.write_bytes(_svg(figure))
    return png, svg


@contextlib.contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Keep the layout that was just found: measuring every text again would double the time."""
    engine = figure.get_layout_engine()
    figure.set_layout_engine("none")
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


def _png(figure: Figure, dpi: float) -> bytes:
    buffer = io.BytesIO()
    canvas = figure.canvas if isinstance(figure.canvas, _Canvas) else None
    with style(), _one_warning():
        if canvas is None:  # somebody else's figure: lent a canvas, and given back as it was
            previous = figure.canvas
            canvas = _Canvas(figure)
            try:
                canvas.print_figure(buffer, format="png", dpi=dpi)
            finally:
                figure.set_canvas(previous)
        else:
            canvas.print_figure(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    name = figure.get_gid()
    figure.set_gid(None)  # would be an id in the SVG; it may be a sentence
    try:
        with style(), _one_warning():
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "attnlens"})
    finally:
        figure.set_gid(name)
    text = buffer.getvalue().decode("utf-8", errors="replace")
    # The same list on every machine, whatever fonts it has.
    text = re.sub(r"font-family: [^;\"]*'DejaVu Sans'[^;\"]*", f"font-family: {_SVG_FONTS}", text)
    return text.encode("utf-8")


@contextlib.contextmanager
def _one_warning() -> Iterator[None]:
    """Silence matplotlib's warning for each glyph: `drawable` has said it once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
        warnings.filterwarnings("ignore", message=r"constrained_layout not applied")
        yield


def _inches(value: float) -> float:
    return min(max(float(value), 1.0), MAX_INCHES) if math.isfinite(value) else MAX_INCHES


def colormap(cmap: str | Colormap | None, *, diverging: bool = False) -> Colormap:
    """Choose a colour map by name; without one, by whether the values have a middle."""
    if cmap is None:
        return DIVERGING if diverging else SEQUENTIAL
    if not isinstance(cmap, str):
        return cmap
    own = {"sequential": SEQUENTIAL, "diverging": DIVERGING}
    if cmap in own:
        return own[cmap]
    try:
        return matplotlib.colormaps[cmap]
    except KeyError:
        raise AnalysisError(
            f"There is no colour map {cmap!r}.",
            hint="Use 'sequential', 'diverging', or a name that matplotlib knows.",
        ) from None


def is_dark(colour: tuple[float, ...]) -> bool:
    """Tell whether white text reads better than dark on a colour (WCAG relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.26


def owns(target: Target) -> bool:
    """Tell whether a figure is still empty, so that its size may be set."""
    return isinstance(target, Figure) and not target.axes and not target.subfigs


def fit(target: Target, width: float, height: float) -> None:
    """Give an empty figure the size that its content asks for."""
    if owns(target) and isinstance(target, Figure):
        target.set_size_inches(_inches(width), _inches(height))
        if target.get_layout_engine() is None:
            target.set_layout_engine("constrained")


def axes_of(target: Target) -> Axes:
    """Return the Axes to draw on: itself, or a new one in a figure."""
    return target if isinstance(target, Axes) else target.subplots()


def put_title(target: Target, ax: Axes, title: str | None, note: str | None = None) -> None:
    """Write a figure's title, and under it a quiet line that says how to read it."""
    if isinstance(target, Axes):
        if title:
            ax.set_title(_wrapped(title, _width(ax)), color=INK, fontweight="bold")
        return
    if title:
        width = target.get_figure(root=True).get_size_inches()[0]
        target.suptitle(_wrapped(title, width), x=0.012, ha="left")
    if note:
        ax.set_title(_wrapped(note, _width(ax) + 0.5, 16.5), fontsize=8.0, color=MUTED)


def _width(ax: Axes) -> float:
    figure = ax.get_figure(root=True)
    return float(figure.get_size_inches()[0]) if figure is not None else 7.0


def _wrapped(text: str, inches: float, per_inch: float = 11.5) -> str:
    lines = textwrap.wrap(" ".join(text.split()), max(int(inches * per_inch), 12))
    return escape_math("\n".join(lines))
