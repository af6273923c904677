"""What drawing functions accept, brought into one form."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnlens.errors import AnalysisError

Array = npt.NDArray[np.float64]
Cell = tuple[int, int]
Marks = Mapping[str, Iterable[Cell]] | Mapping[Cell, str] | Iterable[Cell]


class Grid(NamedTuple):
    """Values over layers and heads, with the numbers that those carry in the model."""

    values: Array  # [layer, head, ...]
    layers: list[int]
    heads: list[int]

    def locate(self, cell: Cell) -> tuple[int, int] | None:
        """Return the row and column of a head given as (layer, head); None when not drawn."""
        layer, head = int(cell[0]), int(cell[1])
        if layer not in self.layers or head not in self.heads:
            return None
        return self.layers.index(layer), self.heads.index(head)


def as_array(values: Any, what: str) -> Array:
    """Return anything array-like as float64, off its device, masked cells as NaN."""
    if hasattr(values, "detach"):  # a torch tensor, without importing torch
        values = values.detach().cpu().double()
    try:
        if np.ma.isMaskedArray(values):
            return np.ma.filled(values.astype(np.float64), np.nan)
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise AnalysisError(f"{what} must be an array of numbers.") from None


def as_grid(values: Any, what: str, dims: Sequence[str] = ("layer", "head")) -> Grid:
    """Return values over `dims`; a DataArray's dimensions are ordered, its coordinates used."""
    numbers: dict[str, list[int]] = {}
    if hasattr(values, "dims"):
        if set(values.dims) != set(dims):
            raise AnalysisError(
                f"{what} draws values over ({', '.join(dims)}); "
                f"these are over ({', '.join(map(str, values.dims))}).",
                hint="Select or average the other dimensions first.",
            )
        values = values.transpose(*dims)
        for dim in ("layer", "head"):
            if dim in values.coords:
                numbers[dim] = [int(n) for n in values.coords[dim].values]
        values = values.values
    array = as_array(values, what)
    if array.ndim != len(dims):
        raise AnalysisError(
            f"{what} draws values over ({', '.join(dims)}); these have {array.ndim} dimensions."
        )
    if 0 in array.shape:
        raise AnalysisError(f"{what} was given no values: the shape is {array.shape}.")
    return Grid(
        array,
        numbers.get("layer", list(range(array.shape[0]))),
        numbers.get("head", list(range(array.shape[1]))),
    )


def as_matrix(values: Any, what: str) -> Array:
    """Return values as a non-empty matrix."""
    array = as_array(values, what)
    if array.ndim != 2 or 0 in array.shape:
        raise AnalysisError(f"{what} draws a matrix with rows and columns, not {array.shape}.")
    return array


def finite_range(*arrays: Array) -> tuple[float, float] | None:
    """Return the least and greatest finite value; None when there is none."""
    finite = np.concatenate([a[np.isfinite(a)].ravel() for a in arrays] or [np.empty(0)])
    return (float(finite.min()), float(finite.max())) if finite.size else None


def null_range(null: Any) -> tuple[float, float] | None:
    """Return the range of what twins gave: an array over anything, or a (low, high) pair."""
    return None if null is None else finite_range(as_array(null, "The twins' values"))


def colour_limits(
    values: Array,
    null: tuple[float, float] | None,
    vmin: float | None,
    vmax: float | None,
    centre: float | None,
) -> tuple[float, float]:
    """Choose the ends of a colour scale; never equal, symmetric about `centre`."""
    low, high = finite_range(values) or (0.0, 1.0)
    if null is not None:  # room for the twins on the bar, without crushing the values
        span = (high - low) or max(abs(high), 1e-12)
        low, high = max(min(low, null[0]), low - span), min(max(high, null[1]), high + span)
    low = low if vmin is None else float(vmin)
    high = high if vmax is None else float(vmax)
    if centre is not None:
        reach = max(abs(high - centre), abs(low - centre)) or 1.0
        return centre - reach, centre + reach
    if not low < high:
        reach = abs(low) * 0.05 or 0.5
        return low - reach, low + reach
    return low, high


def as_marks(marks: Marks | None) -> dict[str, list[Cell]]:
    """Return marks as label -> heads, whatever form they came in."""
    if marks is None:
        return {}
    if not isinstance(marks, Mapping):
        return {"": [(int(a), int(b)) for a, b in marks]}
    groups: dict[str, list[Cell]] = {}
    for key, value in marks.items():
        if isinstance(key, tuple):
            groups.setdefault(str(value), []).append((int(key[0]), int(key[1])))
        elif not isinstance(value, str):
            groups.setdefault(str(key), []).extend((int(a), int(b)) for a, b in value)
    return groups


def short_number(value: float, values: Array | None = None) -> str:
    """Write a number in few characters, with the decimals that its company needs."""
    if not math.isfinite(value):
        return "–"
    company = np.array([value]) if values is None else values[np.isfinite(values)]
    reach = float(np.abs(company).max()) if company.size else 0.0
    if reach == 0:
        return "0"
    if bool(np.all(company == np.round(company))) and reach < 1e5:
        return f"{value:.0f}"
    if reach < 0.01 or reach >= 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.{2 if reach < 10 else 1 if reach < 100 else 0}f}".replace("-", "−")


def ticks(n: int, most: int) -> list[int]:
    """Return at most about `most` whole numbers out of n, evenly stepped from 0."""
    step = next(
        s for s in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 200, 500, n) if n <= s * most
    )
    return list(range(0, n, step))


def names_of(values: Any, dim: str, n: int) -> list[str]:
    """Return the labels along a dimension: its coordinate's where there is one."""
    if hasattr(values, "coords") and dim in values.coords:
        return [_label(v) for v in values.coords[dim].values]
    return [str(i) for i in range(n)]


def _label(value: Hashable) -> str:
    if isinstance(value, tuple):
        return ".".join(str(v) for v in value)
    return str(value)
