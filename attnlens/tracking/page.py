"""The folder of a comparison: its numbers, its figures and its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure

from attnlens.analysis import Finding, plain
from attnlens.figures import curves, new_figure, save_figure
from attnlens.folders import RUN_FILE, write_json
from attnlens.report import write_report
from attnlens.results import save_result
from attnlens.runner import versions
from attnlens.runs import Run

#: Figures of one analysis; of more quantities, those that change most are drawn.
MOST_FIGURES = 24


def write_page(
    folder: Path,
    lined: xr.Dataset,
    runs: Sequence[Run],
    *,
    name: str,
    title: str,
    tables: dict[str, tuple[str, pd.DataFrame]],
    findings: Sequence[Finding],
    marks: dict[str, list[tuple[str, str]]],
    notes: Sequence[str],
    command: Sequence[str],
    started: float,
) -> Path:
    """Write a comparison of runs in the form of a run, so that it has the same report.

    Parameters
    ----------
    folder : pathlib.Path
    lined : xarray.Dataset
        From :func:`attnlens.tracking.line_up`.
    runs : sequence of Run
    name, title : str
        Of the comparison: ``track`` or ``compare``.
    tables : dict from name to (title, DataFrame)
    findings : sequence of Finding
    marks : dict from quantity to pairs of neighbouring runs
        Where a phase change is marked.
    notes, command : sequence of str
    started : float
        ``time.perf_counter()`` at the start.

    Returns
    -------
    pathlib.Path
        The report.
    """
    place = folder / name
    save_result(lined, place)
    entry: dict[str, Any] = {
        "name": name,
        "title": title,
        "distribution": "attnlens",
        "version": versions()["attnlens"],
        "options": {},
        "status": "ok",
        "error": None,
        "seconds": 0.0,
        "notes": list(notes),
        "figures": _figures(place, lined, marks),
        "tables": [],
        "highlights": [],
    }
    for key, (heading, frame) in tables.items():
        path = place / "tables" / f"{key}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(path, index=False)
        entry["tables"].append(
            {"name": key, "title": heading, "csv": path.relative_to(folder).as_posix()}
        )
    last = runs[-1].record
    order = ("analysis", "claim", "holds", "text", "evidence", "null")
    record = {
        "schema": "attnlens-run/1",
        "attnlens": versions()["attnlens"],
        "command": list(command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 3),
        "model": {
            **last["model"],
            "name": f"{name}: {lined['run'].values[0]} to {lined['run'].values[-1]}",
        },
        "corpus": last["corpus"],
        "plan": {},
        "store": "",
        "seed": last["seed"],
        "versions": versions(),
        "notes": [f"Runs: {', '.join(str(r) for r in lined['run'].values)}"],
        "analyses": [entry],
        "findings": [{key: plain(f.model_dump()[key]) for key in order} for f in findings],
    }
    write_json(folder / RUN_FILE, plain(record))
    return write_report(folder)


def _figures(
    place: Path, lined: xr.Dataset, marks: dict[str, list[tuple[str, str]]]
) -> list[dict[str, str]]:
    (place / "figures").mkdir(parents=True, exist_ok=True)
    chosen = sorted(lined.data_vars, key=lambda n: -_movement(lined[n]))[:MOST_FIGURES]
    shown = []
    x, ticks = _axis(lined)
    labels = [str(r) for r in lined["run"].values]
    for quantity in chosen:
        values = lined[quantity]
        drawn = new_figure(9.0, 3.8)
        for part, lines, heading in _panels(drawn, values):
            ax = curves(
                part,
                lines,
                x=x,
                title=heading,
                xlabel="Training step" if ticks is None else "",
            )
            if ticks is not None:
                ax.set_xticks(x, ticks, rotation=30, ha="right")
            for first, last in dict.fromkeys(marks.get(str(quantity), [])):
                ax.axvspan(
                    x[labels.index(first)], x[labels.index(last)], color="#c8553d", alpha=0.15
                )
        file = str(quantity).replace(".", "-")
        png, svg = save_figure(drawn, place / "figures", file)
        shown.append(
            {
                "name": file,
                "title": str(quantity),
                "alt": f"{quantity} over {len(labels)} runs, from {values.min().item():.3g} to "
                f"{values.max().item():.3g}.",
                "png": png.relative_to(place.parent).as_posix(),
                "svg": svg.relative_to(place.parent).as_posix(),
            }
        )
    return shown


def _panels(drawn: Figure, values: xr.DataArray) -> list[tuple[Any, np.ndarray, str]]:
    """Return where to draw which lines [layer, head, run] or [line, run], under which heading."""
    name = str(values.name)
    if not {"layer", "head"} <= set(values.dims):
        lines = values.transpose(..., "run").values.reshape(-1, values.sizes["run"])
        return [(drawn, lines, name)]
    halves: Any = drawn.subfigures(1, 2)
    left, right = halves
    heads = values.transpose("layer", "head", "run")
    return [
        (left, heads.values, f"{name}: heads"),
        (right, heads.median("head").values[:, None], f"{name}: medians of layers"),
    ]


def _axis(lined: xr.Dataset) -> tuple[np.ndarray, list[str] | None]:
    """Return where runs stand on the x axis: at their steps, or evenly and named."""
    steps = lined["step"].values
    if np.isfinite(steps).all() and (np.diff(steps) > 0).all():
        return steps, None
    return np.arange(len(steps), dtype=float), [str(r) for r in lined["run"].values]


def _movement(values: xr.DataArray) -> float:
    """Return how much a quantity moves over the runs, as a share of its size."""
    size = float(np.abs(values).max()) or 1.0
    return float((values.max("run") - values.min("run")).max()) / size
