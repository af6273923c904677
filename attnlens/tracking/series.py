"""Quantities of several runs, lined up: one array per quantity, over runs, layers and heads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from attnlens.errors import UsageError
from attnlens.runs import Run

#: Dimensions that a quantity may have to be followed over runs.
_FOLLOWED = {"layer", "head"}

#: How the names of spreads and error bars end.
_SPREADS = ("_std", "_error")


def quantities(run: Run) -> dict[str, xr.DataArray]:
    """Return what a run measured of heads, layers or the model as a whole.

    Parameters
    ----------
    run : Run

    Returns
    -------
    dict from str to xarray.DataArray
        ``"analysis.variable"`` to numbers over ``layer`` and ``head``, over one of them, or over
        nothing. Spreads (``*_std``) and error bars (``*_error``), whole numbers of heads (which are
        labels, such as a cluster's) and whatever has further dimensions are left out.
    """
    found = {}
    for name in run:
        for variable, values in run[name].data_vars.items():
            label = values.dtype.kind in "iu" and "head" in values.dims
            numeric = values.dtype.kind in "iuf" and not label
            if numeric and set(values.dims) <= _FOLLOWED and not str(variable).endswith(_SPREADS):
                found[f"{name}.{variable}"] = values.astype(np.float64)
    return found


def line_up(runs: Mapping[str, Run]) -> xr.Dataset:
    """Put the quantities that all runs share side by side.

    Parameters
    ----------
    runs : mapping from label to Run

    Returns
    -------
    xarray.Dataset
        Each quantity over ``run`` and its own dimensions; coordinates ``step[run]`` (the last
        number in each label, NaN where there is none), ``weights_hash[run]`` and
        ``prompts_hash[run]``.

    Raises
    ------
    UsageError
        If there are fewer than two runs, or they share no quantity.
    """
    if len(runs) < 2:
        raise UsageError("Only one run was given.", hint="Name at least two to line them up.")
    measured = {label: quantities(run) for label, run in runs.items()}
    first, *others = measured.values()
    shared = [name for name in first if all(name in other for other in others)]
    if not shared:
        raise UsageError(
            f"The runs {', '.join(runs)} share no quantity.",
            hint="Run the same analyses on each.",
        )
    lined = {}
    for name in shared:
        try:
            lined[name] = xr.concat(
                [m[name].drop_vars([c for c in m[name].coords if c not in _FOLLOWED])
                 for m in measured.values()],
                dim="run", join="exact", coords="minimal", compat="override",
            )  # fmt: skip
        except ValueError:
            continue  # Other layers or heads: nothing stands side by side.
    if not lined:
        raise UsageError(
            "The runs differ in their layers or heads, so their heads cannot be lined up.",
            hint="Compare runs of one architecture.",
        )
    labels = list(runs)
    records = [run.record for run in runs.values()]
    return xr.Dataset(lined).assign_coords(
        run=labels,
        step=("run", [step_of(x) for x in labels]),
        weights_hash=("run", [str(r["model"].get("weights_hash") or "") for r in records]),
        prompts_hash=("run", [str((r["corpus"] or {}).get("hash") or "") for r in records]),
    )


def step_of(label: str) -> float:
    """Return the last number in a label such as ``step1000`` or ``pythia@step4``; NaN if none."""
    numbers = re.findall(r"\d+", label)
    return float(numbers[-1]) if numbers else float("nan")


def identical_weights(lined: xr.Dataset) -> list[tuple[str, ...]]:
    """Return the groups of runs whose models have the same weights."""
    return [group for group in _groups(lined, "weights_hash") if len(group) > 1]


def different_prompts(lined: xr.Dataset) -> list[tuple[str, ...]]:
    """Return the groups of runs that read the same prompts, if there is more than one group."""
    groups = _groups(lined, "prompts_hash")
    return groups if len(groups) > 1 else []


def _groups(lined: xr.Dataset, hashes: str) -> list[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for label, value in zip(lined["run"].values, lined[hashes].values, strict=True):
        if value:
            groups.setdefault(str(value), []).append(str(label))
    return [tuple(group) for group in groups.values()]


def by_step(labels: Sequence[str]) -> list[str]:
    """Order labels by their step; as they are if one has none or two are equal."""
    steps = [step_of(label) for label in labels]
    if any(np.isnan(steps)) or len(set(steps)) < len(steps):
        return list(labels)
    return [label for _, label in sorted(zip(steps, labels, strict=True))]
