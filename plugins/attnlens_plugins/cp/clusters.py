"""Groups of heads that load alike, and when there are none."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_plugins.cp.tensors import Floats

Ints = npt.NDArray[np.int64]

#: Largest number of groups that is looked for.
MOST = 12


@dataclass(frozen=True)
class Groups:
    """The best partition of the heads.

    Attributes
    ----------
    label : ndarray of int [row]
        0 for the largest group; -1 for heads that load on nothing, or where there is no partition.
    silhouette : ndarray [row]
        Of each head in the best partition; 0 where it has no group, or is one of its own.
    numbers, quality : ndarray [choice]
        Numbers of groups that were tried and the mean silhouette of each.
    """

    label: Ints
    silhouette: Floats
    numbers: Ints
    quality: Floats

    @property
    def best(self) -> float:
        """Mean silhouette of the best partition; 0 where there is none."""
        return float(self.quality.max()) if len(self.quality) else 0.0

    @property
    def count(self) -> int:
        """Number of groups of the best partition."""
        return int(self.label.max()) + 1


def group(loadings: Floats, wanted: int | str = "auto") -> Groups:
    """Group heads by the direction of their loadings.

    Average linkage on the cosine distance between heads' loadings, each component weighted by its
    strength; of 2 to 12 groups the number with the largest mean silhouette.

    Parameters
    ----------
    loadings : ndarray [row, component]
        Loadings times weights.
    wanted : int or "auto"
        Number of groups.

    References
    ----------
    Rousseeuw, "Silhouettes: a graphical aid to the interpretation and validation of cluster
    analysis" (1987).
    """
    from sklearn.cluster import AgglomerativeClustering

    label = np.full(len(loadings), -1)
    silhouette = np.zeros(len(loadings))
    norm = np.linalg.norm(loadings, axis=1)
    alive = np.flatnonzero(norm > 1e-9 * max(float(norm.max(initial=0.0)), 1e-300))
    none = Groups(label, silhouette, np.zeros(0, np.int64), np.zeros(0))
    # One component gives every head one of two directions, whatever it does.
    if loadings.shape[1] < 2 or len(alive) < 4:
        return none
    unit = loadings[alive] / norm[alive, None]
    distance = np.clip(1.0 - unit @ unit.T, 0.0, 2.0)
    np.fill_diagonal(distance, 0.0)
    if float(distance.max()) < 1e-9:
        return none
    numbers = [int(wanted)] if wanted != "auto" else list(range(2, min(MOST, len(alive) - 1) + 1))
    numbers = [k for k in numbers if k < len(alive)]
    best: tuple[float, Any, Any] | None = None
    quality = []
    for k in numbers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = AgglomerativeClustering(
                n_clusters=k, metric="precomputed", linkage="average"
            ).fit_predict(distance)
        values = silhouettes(distance, found)
        quality.append(float(values.mean()))
        if best is None or quality[-1] > best[0] + 1e-12:
            best = quality[-1], found, values
    if best is None:
        return none
    label[alive] = by_size(best[1])
    silhouette[alive] = best[2]
    return Groups(label, silhouette, np.array(numbers), np.array(quality))


def silhouettes(distance: Floats, label: Ints) -> Floats:
    """Return each row's silhouette, ``(b - a) / max(a, b)``; 0 for a group of one."""
    kinds = np.unique(label)
    member = (label[:, None] == kinds[None]).astype(np.float64)
    size = member.sum(0)
    total = distance @ member
    own = member.astype(bool)
    within = total[own] / np.maximum(size[own.argmax(1)] - 1, 1)
    outside = np.where(own, np.inf, total / size).min(1)
    largest = np.maximum(within, outside)
    value = np.divide(outside - within, largest, out=np.zeros_like(within), where=largest > 0)
    return np.where(size[own.argmax(1)] > 1, value, 0.0)


def cohesion(cosines: Floats, label: Ints) -> Floats:
    """Return how much more a head's whole slice is like its group's than like the others'.

    Components may bring heads together that have little else in common: random loadings on few
    components fall into groups as well, with silhouettes up to 0.9. What heads write as a whole
    does not.

    Parameters
    ----------
    cosines : ndarray [row, row]
        Between the heads' slices of the tensor, uncompressed.
    label : ndarray of int [row]
        -1 for none.

    Returns
    -------
    ndarray [row]
        Mean cosine with the other members of its group, less that with all other heads; 0 for
        a head that is alone.
    """
    alive = label >= 0
    alike = (label[:, None] == label[None]) & alive[:, None] & alive[None]
    np.fill_diagonal(alike, False)
    others = alive[:, None] & alive[None] & ~alike
    np.fill_diagonal(others, False)
    found = np.zeros(len(label))
    known = alike.any(1)
    inside = np.where(alike, cosines, 0.0).sum(1)[known] / alike.sum(1)[known]
    outside = np.where(others, cosines, 0.0).sum(1)[known] / np.maximum(others.sum(1)[known], 1)
    found[known] = inside - outside
    return found


def by_size(label: Ints) -> Ints:
    """Give the largest group number 0 and so on; among equals, the one that comes first."""
    kinds, first, size = np.unique(label, return_index=True, return_counts=True)
    order = np.lexsort((first, -size))
    place = np.empty(len(kinds), dtype=np.int64)
    place[order] = np.arange(len(kinds))
    return np.asarray(place[np.searchsorted(kinds, label)])
