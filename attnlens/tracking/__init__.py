"""Several runs side by side: checkpoints of one training, or any runs of one architecture."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from attnlens.runs import Run
from attnlens.tracking.changes import find_changes
from attnlens.tracking.constancy import constancy
from attnlens.tracking.page import write_page
from attnlens.tracking.series import (
    by_step,
    different_prompts,
    identical_weights,
    line_up,
    quantities,
    step_of,
)
from attnlens.tracking.telling import change_findings, constancy_finding, warnings_of

__all__ = [
    "by_step",
    "compare_runs",
    "constancy",
    "different_prompts",
    "find_changes",
    "identical_weights",
    "line_up",
    "quantities",
    "step_of",
    "track_runs",
]


def track_runs(
    runs: Mapping[str, Run],
    folder: Path,
    *,
    command: Sequence[str] = (),
    started: float | None = None,
) -> tuple[pd.DataFrame, Path]:
    """Draw every quantity over training, with its phase changes marked and dated.

    Parameters
    ----------
    runs : mapping from label to Run
        One for each checkpoint; ordered by the last number in each label, where all have one.
    folder : pathlib.Path
        Where the comparison goes.
    command : sequence of str
    started : float, optional
        ``time.perf_counter()`` when the work began, where the runs belong to it.

    Returns
    -------
    changes : pandas.DataFrame
        See :func:`find_changes`.
    report : pathlib.Path
    """
    started = time.perf_counter() if started is None else started
    ordered = {label: runs[label] for label in by_step(list(runs))}
    lined = line_up(ordered)
    changes = find_changes(lined)
    notes = []
    if len(ordered) > 1 and lined["step"].isnull().any():
        notes.append("The order is that in which the runs were named: not all names end in a step.")
    findings = [*warnings_of(lined, "track"), *change_findings(changes, len(ordered))]
    marks = {
        str(quantity): list(zip(group["from"], group["to"], strict=True))
        for quantity, group in changes.groupby("quantity")
    }
    report = write_page(
        folder,
        lined,
        list(ordered.values()),
        name="track",
        title="Every quantity over training",
        tables={"changes": ("Phase changes, the largest first", changes.round(4))},
        findings=findings,
        marks=marks,
        notes=notes,
        command=command,
        started=started,
    )
    return changes, report


def compare_runs(
    runs: Mapping[str, Run], folder: Path, *, command: Sequence[str] = ()
) -> tuple[pd.DataFrame, Path]:
    """Tell which quantities stay and which move between runs.

    Parameters
    ----------
    runs : mapping from label to Run
    folder : pathlib.Path
    command : sequence of str

    Returns
    -------
    constancy : pandas.DataFrame
        See :func:`constancy`.
    report : pathlib.Path
    """
    started = time.perf_counter()
    lined = line_up(runs)
    table = constancy(lined)
    findings = [*warnings_of(lined, "compare"), constancy_finding(table, lined)]
    report = write_page(
        folder,
        lined,
        list(runs.values()),
        name="compare",
        title="What stays and what moves between the runs",
        tables={"constancy": ("Quantities, the steadiest first", table.round(4))},
        findings=findings,
        marks={},
        notes=[],
        command=command,
        started=started,
    )
    return table, report
