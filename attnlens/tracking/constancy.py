"""What stays and what moves between runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

#: A quantity stays where it varies by less than this between runs, and its heads keep their order.
STAYS_VARIATION = 0.1
STAYS_CORRELATION = 0.9


def constancy(lined: xr.Dataset) -> pd.DataFrame:
    """Measure how far each quantity is the same in all runs.

    Parameters
    ----------
    lined : xarray.Dataset
        From :func:`attnlens.tracking.line_up`.

    Returns
    -------
    pandas.DataFrame
        For each quantity: ``variation``, the median over heads of the coefficient of variation
        over runs (standard deviation over the mean's size, relative to the quantity's own size
        where a mean is near zero); ``rank_correlation``, the mean over pairs of runs of
        Spearman's correlation over heads (NaN with fewer than three heads, or where a run gives
        all heads one value, which tells of no order); ``stays``. The steadiest first.
    """
    rows = []
    for name, values in lined.data_vars.items():
        table = values.transpose("run", ...).values.reshape(values.sizes["run"], -1)
        table = table[:, np.isfinite(table).all(axis=0)]
        if not table.size:
            continue
        variation, correlation = _variation(table), _rank_correlation(table)
        keeps_order = table.shape[1] < 3 or correlation >= STAYS_CORRELATION
        rows.append(
            {
                "quantity": str(name),
                "variation": variation,
                "rank_correlation": correlation,
                "stays": bool(variation <= STAYS_VARIATION and keeps_order),
            }
        )
    frame = pd.DataFrame(rows, columns=["quantity", "variation", "rank_correlation", "stays"])
    return frame.sort_values("variation", kind="stable", ignore_index=True)


def _variation(table: np.ndarray) -> float:
    spread = table.std(axis=0, ddof=1)
    size = np.maximum(np.abs(table.mean(axis=0)), 1e-3 * np.abs(table).max())
    return float(np.median(np.where(spread > 0, spread / np.where(size > 0, size, 1.0), 0.0)))


def _rank_correlation(table: np.ndarray) -> float:
    if table.shape[1] < 3 or (np.ptp(table, axis=1) == 0).any():
        return float("nan")
    pairs = [
        stats.spearmanr(table[i], table[j]).statistic for i in range(len(table)) for j in range(i)
    ]
    return float(np.mean(pairs))
