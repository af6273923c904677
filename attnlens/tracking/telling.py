"""What several runs show, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import xarray as xr

from attnlens.analysis import Finding
from attnlens.tracking.changes import FEWEST_RUNS
from attnlens.tracking.series import different_prompts, identical_weights

#: Quantities told of the head that changes most, and heads named beside it.
_TOLD, _NAMED = 3, 8


def change_findings(changes: pd.DataFrame, n_runs: int) -> list[Finding]:
    """Tell what changes at once: one finding for each stretch of training.

    Parameters
    ----------
    changes : pandas.DataFrame
        From :func:`attnlens.tracking.find_changes`.
    n_runs : int
    """
    if n_runs < FEWEST_RUNS:
        text = (
            f"Whether anything changes at once cannot be told from chance with {n_runs} runs: at "
            f"least {FEWEST_RUNS} are needed."
        )
        return [Finding(claim="phase-change", holds=False, text=text, analysis="track")]
    if changes.empty:
        text = (
            "Nothing changes at once: no quantity of any head passes from one level to another "
            "beyond its usual change from run to run."
        )
        return [Finding(claim="phase-change", holds=False, text=text, analysis="track")]
    return [_passage(group) for _, group in changes.groupby(["from", "to"], sort=False)]


def _passage(group: pd.DataFrame) -> Finding:
    rows = group.sort_values("size", ascending=False).to_dict("records")
    heads: dict[str, list[dict[Any, Any]]] = {}
    for row in rows:
        heads.setdefault(_where(row), []).append(row)
    (first, told), *others = heads.items()
    text = (
        f"Between {rows[0]['from']} and {rows[0]['to']} {first} changes at once: "
        + ", ".join(f"{r['quantity']} from {r['before']:.3g} to {r['after']:.3g}"
                    for r in told[:_TOLD])
        + (f" and {len(told) - _TOLD} more" if len(told) > _TOLD else "")
    )  # fmt: skip
    if others:
        names = [f"{name} ({found[0]['quantity']})" for name, found in others]
        text += f"; so do {', '.join(names[:_NAMED])}"
        text += f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return Finding(
        claim="phase-change",
        holds=True,
        analysis="track",
        text=text + ".",
        evidence={
            "heads": {name: [r["quantity"] for r in found] for name, found in heads.items()},
            "times the usual change": {r["quantity"]: round(r["size"], 1) for r in told},
        },
        null={"usual change": {r["quantity"]: r["usual"] for r in told}},
    )


def _where(row: Mapping[Any, Any]) -> str:
    layer, head = row["layer"], row["head"]
    if layer is None or layer != layer:
        return "the model"
    return f"layer {layer:g}" if head is None or head != head else f"head {layer:g}.{head:g}"


def constancy_finding(table: pd.DataFrame, lined: xr.Dataset) -> Finding:
    """Tell which quantities stay.

    Parameters
    ----------
    table : pandas.DataFrame
        From :func:`attnlens.tracking.constancy`.
    lined : xarray.Dataset
    """
    stay = table[table["stays"]]["quantity"].tolist()
    move = table[~table["stays"]]["quantity"].tolist()
    one_model = any(len(group) == lined.sizes["run"] for group in identical_weights(lined))
    text = f"{len(stay)} of {len(table)} quantities stay between the runs"
    text += f" ({', '.join(stay[:8])})" if stay else ""
    text += f"; {', '.join(move[-4:][::-1])} move most." if move else "."
    return Finding(
        claim="quantities-stay",
        holds=bool(stay) and not one_model,
        analysis="compare",
        text=text + (" All are runs of one model." if one_model else ""),
        evidence={"stay": stay, "move": move},
    )


def warnings_of(lined: xr.Dataset, analysis: str) -> list[Finding]:
    """Tell what makes a comparison worth less: identical weights, different prompts.

    Parameters
    ----------
    lined : xarray.Dataset
        From :func:`attnlens.tracking.line_up`.
    analysis : {"track", "compare"}
    """
    told = (
        (
            "identical-weights", identical_weights(lined), " and ",
            "These runs read identical weights, so their agreement says nothing",
        ),
        (
            "different-prompts", different_prompts(lined), ", ",
            "These runs read different prompts, on which all but what is of the weights depends",
        ),
    )  # fmt: skip
    return [
        Finding(
            claim=claim,
            holds=True,
            analysis=analysis,
            text=f"{text}: {'; '.join(joint.join(group) for group in groups)}.",
            evidence={"groups": [list(group) for group in groups]},
        )
        for claim, groups, joint, text in told
        if groups
    ]
