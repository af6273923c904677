"""Phase changes: when a quantity leaves one level for another, all at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

#: How many times the usual change of the quantity, over all heads and checkpoints.
MINIMUM_SIZE = 5.0

#: Share of the head's own range over the runs that passes at once.
MINIMUM_SHARE = 0.5

#: Share of the variance that one step explains, the passage itself left out. Both levels must be
#: seen in two runs.
MINIMUM_FIT = 0.95

#: A passage takes at most this share of the intervals between runs, and one in any case.
WIDEST = 1 / 12

#: With fewer runs nothing can be told from chance.
FEWEST_RUNS = 5

COLUMNS = (
    "quantity", "layer", "head", "from", "to", "before", "after", "usual", "size", "share", "fit",
)  # fmt: skip


@dataclass(frozen=True)
class Passage:
    """The shortest stretch over which a series goes from one level to another.

    Attributes
    ----------
    first, last : int
        The runs before and after it.
    share : float
        Its change over the range of the whole series.
    fit : float
        See :data:`MINIMUM_FIT`.
    """

    first: int
    last: int
    share: float
    fit: float


def passage(series: np.ndarray, widest: int) -> Passage:
    """Find the shortest stretch that carries `MINIMUM_SHARE` of a series' range.

    Parameters
    ----------
    series : ndarray [time]
    widest : int
        Most intervals that it may take; where none carries as much, the one that carries most.

    Returns
    -------
    Passage
    """
    span = float(np.ptp(series))
    if span <= 1e-9 * float(np.abs(series).max()):
        return Passage(0, 1, 0.0, 0.0)
    found = (0, 1, 0.0)
    for width in range(1, widest + 1):
        changes = np.abs(series[width:] - series[:-width]) / span
        at = int(np.argmax(changes))
        if changes[at] > found[2] + 1e-12:
            found = (at, at + width, float(changes[at]))
        if changes[at] >= MINIMUM_SHARE:
            break
    first, last, share = found
    return Passage(first, last, share, _fit(series, first, last))


def _fit(series: np.ndarray, first: int, last: int) -> float:
    """Return the share of the variance between what is before and what is after a passage."""
    groups = series[: first + 1], series[last:]
    if min(map(len, groups)) < 2:
        return 0.0  # A level that was seen once may be a spike.
    both = np.concatenate(groups)
    total = float(((both - both.mean()) ** 2).sum())
    within = sum(float(((g - g.mean()) ** 2).sum()) for g in groups)
    return 1.0 - within / total if total > 0 else 0.0


def usual_changes(values: np.ndarray, widest: int) -> np.ndarray:
    """Return how much a quantity usually changes over 1 ... `widest` intervals.

    Parameters
    ----------
    values : ndarray [time, ...]
        Over all heads: they share what is usual, so that few runs suffice.

    Returns
    -------
    ndarray [widest]
        The root mean square over heads, in the median interval: a change that many heads make at
        once is not usual for that.
    """
    heads = values.reshape(len(values), -1)
    heads = heads[:, np.isfinite(heads).all(axis=0)]
    return np.array(
        [
            np.median(np.sqrt(((heads[width:] - heads[:-width]) ** 2).mean(axis=1)))
            for width in range(1, widest + 1)
        ]
    )


def find_changes(lined: xr.Dataset) -> pd.DataFrame:
    """Find the heads whose quantities change phase over the runs, and date each change.

    A change must be large beside the quantity's usual change from run to run (over all heads:
    what a quantity does by chance, it does everywhere), carry half of the head's own range at
    once, and part two levels. Drift, ramps and noise do none of this; see the constants of this
    module.

    Parameters
    ----------
    lined : xarray.Dataset
        From :func:`attnlens.tracking.line_up`, in the order of training.

    Returns
    -------
    pandas.DataFrame
        A row for each change, the largest beside the usual first: quantity, layer and head; the
        two runs between which it passes (``from``, ``to``) and the values there (``before``,
        ``after``); the ``usual`` change of the quantity over as many intervals, and its ``size``
        beside that; ``share`` of the head's range; ``fit``. Empty with fewer than five runs.
    """
    rows = []
    labels = [str(x) for x in lined["run"].values]
    widest = max(1, int((len(labels) - 1) * WIDEST))
    for name, values in lined.data_vars.items():
        others = [d for d in values.dims if d != "run"]
        stacked = values.transpose("run", *others)
        finite = np.isfinite(stacked.values).all(axis=0)
        if len(labels) < FEWEST_RUNS or not finite.any():
            continue
        usual = usual_changes(stacked.values, widest)
        for place in np.ndindex(*stacked.shape[1:]):
            series = stacked.values[(slice(None), *place)]
            if not finite[place]:
                continue
            found = passage(series, widest)
            before, after = float(series[found.first]), float(series[found.last])
            typical = float(usual[found.last - found.first - 1])
            size = abs(after - before) / max(typical, 1e-300)
            if size < MINIMUM_SIZE or found.share < MINIMUM_SHARE or found.fit < MINIMUM_FIT:
                continue
            where = {d: int(values[d].values[i]) for d, i in zip(others, place, strict=True)}
            rows.append(
                {
                    "quantity": str(name),
                    "layer": where.get("layer"),
                    "head": where.get("head"),
                    "from": labels[found.first],
                    "to": labels[found.last],
                    "before": before,
                    "after": after,
                    "usual": typical,
                    "size": size,
                    "share": found.share,
                    "fit": found.fit,
                }
            )
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values("size", ascending=False, kind="stable", ignore_index=True)
