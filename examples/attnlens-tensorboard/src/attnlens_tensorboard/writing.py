"""From a result to TensorBoard's events."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

#: Where events go; below it a folder for each model.
FOLDER_VARIABLE = "ATTNLENS_TENSORBOARD"
DEFAULT_FOLDER = "attnlens-runs/tensorboard"

#: Set to 0, no figures are drawn.
FIGURES_VARIABLE = "ATTNLENS_TENSORBOARD_FIGURES"

#: Variables over more than these dimensions are left to the figures.
_HEADS = {"layer", "head"}
_TWINS = _HEADS | {"twin"}


def write_result(name: str, result: xr.Dataset) -> None:
    """Write one result: scalars, histograms over heads, and every figure.

    Parameters
    ----------
    name : str
        The analysis.
    result : xarray.Dataset
        With its provenance, as a run gives it.

    Notes
    -----
    The step is the last number in the model's revision or name (``step1000``), 0 without one: runs
    on the checkpoints of one training become curves over training.
    """
    origin = json.loads(result.attrs.get("attnlens", "{}"))
    step = step_of(origin)
    with _open(origin) as writer:
        for tag, value in scalars(result):
            writer.add_scalar(f"{name}/{tag}", value, step)
        for tag, values in histograms(result):
            writer.add_histogram(f"{name}/{tag}", values, step)
        if os.environ.get(FIGURES_VARIABLE) != "0":
            for tag, pixels in _figures(name, result, origin):
                writer.add_image(f"{name}/{tag}", pixels, step, dataformats="HWC")


def write_failure(name: str, error: Exception) -> None:
    """Write why an analysis failed; it left no result, so the model's name is not known."""
    with _open({}) as writer:
        writer.add_text(f"{name}/error", f"{type(error).__name__}: {error}", 0)


def step_of(origin: dict[str, Any]) -> int:
    """Return the training step that a model's revision or name ends in, or 0."""
    for text in (origin.get("revision"), origin.get("model")):
        numbers = re.findall(r"step[-_]?(\d+)", str(text or ""))
        if numbers:
            return int(numbers[-1])
    return 0


def scalars(result: xr.Dataset) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of every number: means over the model, and over each layer's heads.

    Twins give one mean each, under the name that the result has for them.
    """
    for variable, values in _numbers(result):
        dims = {str(d) for d in values.dims}
        if dims <= _TWINS and np.isfinite(values).any():
            yield variable, float(values.mean())
        if dims == _HEADS:
            for layer in values["layer"].values:
                mean = float(values.sel(layer=layer).mean())
                if np.isfinite(mean):
                    yield f"{variable}/layer{layer:02d}", mean


def histograms(result: xr.Dataset) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (tag, values over all heads) of every quantity that each head has."""
    for variable, values in _numbers(result):
        if {str(d) for d in values.dims} == _HEADS:
            finite = values.values[np.isfinite(values.values)]
            if finite.size:
                yield variable, finite


def _numbers(result: xr.Dataset) -> Iterator[tuple[str, xr.DataArray]]:
    for variable, values in result.data_vars.items():
        if values.dtype.kind in "fiu":
            yield str(variable), values


def _figures(
    name: str, result: xr.Dataset, origin: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (tag, pixels [height, width, 3]) of every figure that the analysis draws."""
    from attnlens import Skip
    from attnlens.plugins import discover, load_analysis

    offered = [p for p in discover() if p.name == name]
    if len(offered) != 1:  # given as a class, or by two distributions: not known which
        return
    analysis = load_analysis(offered[0])(**origin.get("options", {}))
    for drawing in analysis.drawings("figure"):
        try:
            figure = analysis.draw(drawing.name, result)
        except Skip:
            continue
        # Without pyplot, which writer.add_figure would load: it keeps state of its own.
        figure.canvas.draw()
        yield drawing.name, np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


@contextmanager
def _open(origin: dict[str, Any]) -> Iterator[Any]:
    folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    model = str(origin.get("model") or "unknown")
    name = re.sub(r"[-_]?step[-_]?\d+$", "", Path(model.partition("@")[0]).name) or "model"
    writer = make_writer(folder / re.sub(r"[^\w.-]+", "-", name))
    try:
        yield writer
    finally:
        writer.close()


def make_writer(folder: Path) -> Any:
    """Make a SummaryWriter of whichever package is installed.

    Raises
    ------
    ImportError
        If there is neither tensorboard nor tensorboardX. A run notes it and goes on.
    """
    if importlib.util.find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    elif importlib.util.find_spec("tensorboardX"):
        from tensorboardX import SummaryWriter
    else:
        raise ImportError(
            "attnlens-tensorboard needs a writer: pip install tensorboard, or tensorboardX"
        )
    return SummaryWriter(str(folder))
