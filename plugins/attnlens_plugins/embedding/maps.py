"""PCA, t-SNE and UMAP of a few points: checked before, seeded, and the same twice."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import attnlens
from attnlens_plugins.cp.tensors import Floats
from attnlens_plugins.embedding.options import LEAST

#: Points up to which t-SNE is computed exactly; its tree kills the interpreter on constant data.
_EXACT = 2000
#: Points under which UMAP starts at random: a spectral start needs more.
_SPECTRAL = 16


def check(values: Floats, what: str) -> None:
    """Refuse points of which no map can be made.

    Raises
    ------
    Skip
        With the reason: too few, not finite, or all (nearly) the same.
    """
    if len(values) < LEAST:
        raise attnlens.Skip(f"there are {len(values)} {what}; a map needs at least {LEAST}")
    if not np.isfinite(values).all():
        raise attnlens.Skip(f"the vectors of the {what} are not finite")
    spread = np.abs(values - values.mean(0)).max()
    if not spread > 1e-9 * max(float(np.abs(values).max()), 1e-300):
        raise attnlens.Skip(f"all {len(values)} {what} are the same: there is nothing to map")
    distinct = len(np.unique(np.round((values - values.mean(0)) / spread, 7), axis=0))
    if distinct < LEAST:
        raise attnlens.Skip(
            f"only {distinct} of {len(values)} {what} differ; a map needs at least {LEAST}"
        )


def pca(values: Floats) -> tuple[Floats, Floats]:
    """Return the first two principal coordinates and their shares of the variance.

    Signs: the entry of largest magnitude of each coordinate is positive.
    """
    centred = values - values.mean(0)
    left, sigma, _ = np.linalg.svd(centred, full_matrices=False)
    found = np.zeros((len(values), 2))
    share = np.zeros(2)
    count = min(2, len(sigma))
    found[:, :count] = left[:, :count] * sigma[:count]
    share[:count] = sigma[:count] ** 2 / (sigma**2).sum()
    peak = found[np.abs(found).argmax(0), np.arange(2)]
    return found * np.where(peak < 0, -1.0, 1.0), share


def fitted_perplexity(wanted: float, n: int) -> float:
    """Return the perplexity that n points allow, ``(n - 1) / 3`` at most."""
    return float(min(wanted, (n - 1) / 3))


def fitted_neighbors(wanted: int, n: int) -> int:
    """Return the number of neighbours that n points allow."""
    return int(max(min(wanted, n - 1), 2))


def tsne(values: Floats, *, perplexity: float, seed: int) -> Floats:
    """Map points by t-SNE, started from their principal coordinates.

    Parameters
    ----------
    values : ndarray [point, feature]
        Points that passed :func:`check`.
    perplexity : float
        At most ``(n - 1) / 3``.
    seed : int

    References
    ----------
    van der Maaten and Hinton, "Visualizing data using t-SNE" (2008); Kobak and Berens, "The art of
    using t-SNE for single-cell transcriptomics" (2019), on the start and the learning rate.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    start, _ = pca(values)
    # Points that coincide at the start would never part.
    start = start / start[:, 0].std() * 1e-4
    start += 1e-6 * np.random.default_rng(seed).standard_normal(start.shape)
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        found = TSNE(
            perplexity=perplexity,
            init=start,
            random_state=seed,
            method="exact" if len(values) <= _EXACT else "barnes_hut",
            n_jobs=1,
        ).fit_transform(values.astype(np.float64))
    return np.asarray(found, dtype=np.float64)


def umap(values: Floats, *, neighbors: int, seed: int) -> tuple[Floats, list[str]]:
    """Map points by UMAP; the import alone takes seconds.

    Parameters
    ----------
    values : ndarray [point, feature]
        Points that passed :func:`check`.
    neighbors : int
        Less than the number of points.
    seed : int

    Returns
    -------
    ndarray [point, axis], list of str
        What had to be done otherwise, for people. Points that could not be placed are NaN.

    References
    ----------
    McInnes, Healy and Melville, "UMAP: Uniform Manifold Approximation and Projection" (2018).
    """
    UMAP = _import_umap()
    notes = []
    starts = ["random"] if len(values) < _SPECTRAL else ["spectral", "random"]
    found = np.full((len(values), 2), np.nan)
    for start in starts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = np.asarray(
                    UMAP(
                        n_neighbors=neighbors, random_state=seed, n_jobs=1, init=start
                    ).fit_transform(values.astype(np.float32)),
                    dtype=np.float64,
                )
            except (ValueError, TypeError, np.linalg.LinAlgError) as error:
                notes.append(f"UMAP failed from a {start} start: {error}")
                continue
        if np.isfinite(found).all():
            break
        notes.append(f"UMAP from a {start} start could not place every point.")
    lost = int((~np.isfinite(found)).any(1).sum())
    if lost:
        notes.append(f"UMAP left {lost} of {len(values)} points without a place.")
    return found, notes


def _import_umap() -> Any:
    """Import UMAP where numba can keep its cache: an install may be read-only, and so may HOME.

    Raises
    ------
    Skip
        If UMAP is not installed or cannot be imported.
    """
    try:
        from importlib.util import find_spec

        import numba

        settings: Any = numba.config
        found = find_spec("umap")
        if found is None or found.origin is None:
            raise ImportError("umap-learn is not installed")
        beside = Path(found.origin).parent / "__pycache__"
        place = beside if beside.is_dir() else beside.parent
        if not settings.CACHE_DIR and not os.access(place, os.W_OK):
            settings.CACHE_DIR = tempfile.mkdtemp(prefix="attnlens-numba-")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from umap import UMAP
    except Exception as error:
        raise attnlens.Skip(
            f"UMAP cannot be used here: {type(error).__name__}: {error}; method=tsne needs none"
        ) from error
    return UMAP
