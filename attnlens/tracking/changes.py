"""Phase changes: when a quantity leaves one level for another, all at once."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

#: Share of the variance that a single step must explain. A straight ramp reaches 3/4.
MINIMUM_FIT = 0.85

#: Smallest change of interest, as a share of the quantity's whole range over runs and heads.
MINIMUM_CHANGE = 0.25

COLUMNS = ("quantity", "layer", "head", "before", "after", "change", "from", "to", "fit")


def best_step(values: np.ndarray) -> tuple[int, float]:
    """Fit one step to a series by least squares.

    Parameters
    ----------
    values : ndarray [time]

    Returns
    -------
    index : int
        The first time after the step, 1 to ``len(values) - 1``.
    fit : float
        Share of the variance that the step explains, 0 for a constant series. For a straight
        ramp of n points it is ``3/4 n^2 / (n^2 - 1)``, about 3/4.

    Notes
    -----
    The sum of squares between two groups of sizes k and n - k is
    ``(S_k - k m)^2 n / (k (n - k))`` with the partial sum S_k and the mean m of all.
    """
    n = len(values)
    total = float(((values - values.mean()) ** 2).sum())
    if n < 2 or total <= 1e-12 * max(1.0, float(np.abs(values).max()) ** 2):
        return 1, 0.0
    k = np.arange(1, n)
    partial = np.cumsum(values)[:-1] - k * values.mean()
    between = partial**2 * n / (k * (n - k))
    index = int(np.argmax(between))
    return index + 1, min(float(between[index]) / total, 1.0)


def find_changes(lined: xr.Dataset) -> pd.DataFrame:
    """Find the heads whose quantities change phase over the runs, and date each change.

    Parameters
    ----------
    lined : xarray.Dataset
        From :func:`attnlens.tracking.line_up`, in the order of training.

    Returns
    -------
    pandas.DataFrame
        A row for each change, the largest (as a share of the quantity's range) first: the
        quantity, layer and head, the levels before and after, and the two neighbouring runs
        between which the quantity passes half way.
    """
    rows = []
    labels = [str(x) for x in lined["run"].values]
    for name, values in lined.data_vars.items():
        span = float(values.max() - values.min())
        if not np.isfinite(span) or span <= 0:
            continue
        others = [d for d in values.dims if d != "run"]
        stacked = values.transpose("run", *others)
        for place in np.ndindex(*stacked.shape[1:]):
            series = stacked.values[(slice(None), *place)]
            if len(series) < 3 or not np.isfinite(series).all():
                continue
            index, fit = best_step(series)
            before, after = float(series[:index].mean()), float(series[index:].mean())
            if fit < MINIMUM_FIT or abs(after - before) < MINIMUM_CHANGE * span:
                continue
            crossed = crossing(series, (before + after) / 2, rising=after > before)
            where = {d: int(values[d].values[i]) for d, i in zip(others, place, strict=True)}
            rows.append(
                {
                    "quantity": str(name),
                    "layer": where.get("layer"),
                    "head": where.get("head"),
                    "before": before,
                    "after": after,
                    "change": abs(after - before) / span,
                    "from": labels[crossed - 1],
                    "to": labels[crossed],
                    "fit": fit,
                }
            )
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values("change", ascending=False, kind="stable", ignore_index=True)


def crossing(series: np.ndarray, level: float, *, rising: bool) -> int:
    """Return the last time at which the series passes the level in the step's direction."""
    above = series > level if rising else series < level
    passes = np.flatnonzero(above[1:] & ~above[:-1]) + 1
    return int(passes[-1]) if passes.size else len(series) - 1
