"""Several runs side by side: checkpoints of one training, or any runs of one architecture."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from attnlens.analysis import Finding
from attnlens.runs import Run
from attnlens.tracking.changes import find_changes
from attnlens.tracking.constancy import constancy
from attnlens.tracking.page import write_page
from attnlens.tracking.series import by_step, identical_weights, line_up, quantities, step_of

__all__ = [
    "by_step",
    "compare_runs",
    "constancy",
    "find_changes",
    "identical_weights",
    "line_up",
    "quantities",
    "step_of",
    "track_runs",
]


def track_runs(
    runs: Mapping[str, Run], folder: Path, *, command: Sequence[str] = ()
) -> tuple[pd.DataFrame, Path]:
    """Draw every quantity over training, with its phase changes marked and dated.

    Parameters
    ----------
    runs : mapping from label to Run
        One for each checkpoint; ordered by the last number in each label, where all have one.
    folder : pathlib.Path
        Where the comparison goes.
    command : sequence of str

    Returns
    -------
    changes : pandas.DataFrame
        See :func:`find_changes`.
    report : pathlib.Path
    """
    started = time.perf_counter()
    ordered = {label: runs[label] for label in by_step(list(runs))}
    lined = line_up(ordered)
    changes = find_changes(lined)
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
        findings=[*_change_findings(changes), *_weights_finding(lined, "track")],
        marks=marks,
        notes=[],
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
    stay = table[table["stays"]]["quantity"].tolist()
    move = table[~table["stays"]]["quantity"].tolist()
    finding = Finding(
        claim="quantities-stay",
        holds=bool(stay),
        analysis="compare",
        text=f"{len(stay)} of {len(table)} quantities stay between the runs"
        + (f" ({', '.join(stay[:8])})" if stay else "")
        + (f"; {', '.join(move[-4:][::-1])} move most." if move else "."),
        evidence={"stay": stay, "move": move},
    )
    report = write_page(
        folder,
        lined,
        list(runs.values()),
        name="compare",
        title="What stays and what moves between the runs",
        tables={"constancy": ("Quantities, the steadiest first", table.round(4))},
        findings=[finding, *_weights_finding(lined, "compare")],
        marks={},
        notes=[],
        command=command,
        started=started,
    )
    return table, report


def _change_findings(changes: pd.DataFrame) -> list[Finding]:
    if changes.empty:
        text = "No head changes phase: no quantity leaves one level for another at once."
        return [Finding(claim="phase-change", holds=False, text=text, analysis="track")]
    found = []
    for (quantity, first, last), group in changes.groupby(["quantity", "from", "to"], sort=False):
        names = [_head(row) for row in group.to_dict("records")]
        top = group.iloc[0]
        found.append(
            Finding(
                claim="phase-change",
                holds=True,
                analysis="track",
                text=f"{quantity} changes at once between {first} and {last}: {names[0]} from "
                f"{top['before']:.3g} to {top['after']:.3g}"
                + (f", with {', '.join(names[1:9])}" if len(names) > 1 else "")
                + (f" and {len(names) - 9} more" if len(names) > 9 else "")
                + ".",
                evidence={"heads": names, "before": top["before"], "after": top["after"]},
            )
        )
    return found


def _head(row: Mapping[Any, Any]) -> str:
    layer, head = row["layer"], row["head"]
    if layer is None or layer != layer:
        return "the model"
    return f"layer {layer:g}" if head is None or head != head else f"head {layer:g}.{head:g}"


def _weights_finding(lined: xr.Dataset, analysis: str) -> list[Finding]:
    groups = identical_weights(lined)
    if not groups:
        return []
    same = "; ".join(" and ".join(group) for group in groups)
    return [
        Finding(
            claim="identical-weights",
            holds=True,
            analysis=analysis,
            text=f"These runs read identical weights, so their agreement says nothing: {same}.",
            evidence={"groups": [list(g) for g in groups]},
        )
    ]
