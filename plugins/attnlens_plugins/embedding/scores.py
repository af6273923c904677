"""How far a map may be believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_plugins.cp.tensors import Floats

#: Neighbours that are looked at.
NEIGHBORS = 5


def neighbors(n: int) -> int:
    """Return how many neighbours are looked at among n points."""
    return max(min(NEIGHBORS, (n - 1) // 2), 1)


def trustworthiness(values: Floats, places: Floats) -> float:
    """Return how few of a map's neighbours are strangers in the data, in [0, 1]; 1 is best.

    References
    ----------
    Venna and Kaski, "Neighborhood preservation in nonlinear projection methods" (2001).
    """
    from sklearn.manifold import trustworthiness as measure

    known = np.isfinite(places).all(1)
    if known.sum() < 4:
        return float("nan")
    k = neighbors(int(known.sum()))
    return float(measure(values[known], places[known], n_neighbors=k))


def purity(places: Floats, labels: npt.NDArray[Any]) -> float:
    """Return the mean share of a point's nearest neighbours that have its label.

    NaN where there are fewer than two labels or points.
    """
    known = np.isfinite(places).all(1)
    places, labels = places[known], labels[known]
    if len(places) < 3 or len(np.unique(labels)) < 2:
        return float("nan")
    distance = ((places[:, None] - places[None]) ** 2).sum(-1)
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1, kind="stable")[:, : neighbors(len(places))]
    return float((labels[nearest] == labels[:, None]).mean())


def chance_purity(labels: npt.NDArray[Any]) -> float:
    """Return the purity of labels dealt out at random."""
    _, counts = np.unique(labels, return_counts=True)
    n = counts.sum()
    return float((counts * (counts - 1)).sum() / max(n * (n - 1), 1))
