"""What heads are known to do, and how well other heads could stand in for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.cp.tensors import Compressed, Floats

#: The corpus on which repeats are looked for.
REPEATED = "repeated-random"

#: Statistics that the scores are read from.
REQUIRED = ("pattern.by_offset", "pattern.received", f"pattern.by_offset@{REPEATED}")

#: Scores of head types, with what they are.
TYPES = {
    "previous_token": "Mean attention to the token before",
    "sink": "Mean attention to the first token",
    "duplicate_token": "Mean attention to the same token, one period back (random tokens)",
    "induction": "Mean attention to the token after its last occurrence (random tokens)",
}

#: Share of the energy for which the heads' independent directions are counted.
ENERGY = 0.95


def type_scores(store: Any, *, causal: bool) -> xr.Dataset:
    """Score every head for the types that are known.

    Each score is the mean weight at one distance: 1 for the token before, the period P of repeated
    random tokens for the same token's last occurrence, P - 1 for the token that followed it
    (Olsson et al., "In-context learning and induction heads", 2022).

    Parameters
    ----------
    store : View or Store
    causal : bool
        Whether a query sees no later key; the first row then has no choice and does not count.

    Returns
    -------
    xarray.Dataset
        The scores of :data:`TYPES` over [layer, head], those that can be had.
    """
    found: dict[str, xr.DataArray] = {}
    offsets = _read(store, "pattern.by_offset")
    if offsets is not None and 1 in offsets["offset"]:
        found["previous_token"] = offsets.sel(offset=1, drop=True)
    received = _read(store, "pattern.received")
    if received is not None:
        lengths = np.asarray(store.lengths.values)
        queries, firsts = int(lengths.sum()), len(lengths)
        sink = received.isel(key_pos=0, drop=True)
        if causal and queries > firsts:
            sink = (sink * queries - firsts) / (queries - firsts)
        found["sink"] = sink
    repeated = _repeated(store)
    if repeated is not None:
        offsets, period = repeated
        for name, distance in (("duplicate_token", period), ("induction", period - 1)):
            if distance > 0 and distance in offsets["offset"]:
                found[name] = offsets.sel(offset=distance, drop=True)
    return xr.Dataset({k: v.transpose("layer", "head") for k, v in found.items()}).drop_vars(
        ["offset", "key_pos"], errors="ignore"
    )


def _read(store: Any, name: str) -> xr.DataArray | None:
    try:
        found: xr.DataArray = store[name]
    except attnlens.errors.NeedError:
        return None
    return found.astype(np.float64)


def _repeated(store: Any) -> tuple[xr.DataArray, int] | None:
    try:
        other = store.corpus(REPEATED)
    except attnlens.errors.NeedError:
        return None
    period = other.manifest.prompts.period
    offsets = _read(other, "pattern.by_offset")
    return None if period is None or offsets is None else (offsets, int(period))


def rebuild_error(tensor: Compressed) -> Floats:
    """Return how badly each head is rebuilt from all others, as a share of its norm.

    The best linear combination of the other heads' outputs leaves, of a head of unit norm, the
    squared residual ``1 / inv(G)[h, h]``, G being the heads' matrix of cosines.

    Returns
    -------
    ndarray [row]
        0 for a copy of another head, 1 for a head orthogonal to all others; NaN for a head that
        writes nothing.
    """
    error = np.full(len(tensor.norm), np.nan)
    alive = _alive(tensor)
    if not len(alive):
        return error
    cosines = head_cosines(tensor)[np.ix_(alive, alive)]
    # A ridge far under any real residual keeps exact copies invertible.
    inverse = np.linalg.inv(cosines + 1e-10 * np.eye(len(alive)))
    error[alive] = np.sqrt(np.clip(1.0 / np.diag(inverse), 0.0, 1.0))
    return error


def head_spectrum(tensor: Compressed) -> Floats:
    """Return the energy share of each independent direction among the heads, descending.

    The heads are scaled to unit norm first, so that a large head counts as one.
    """
    alive = _alive(tensor)
    shares = np.zeros(len(tensor.norm))
    if len(alive):
        values = np.linalg.eigvalsh(head_cosines(tensor)[np.ix_(alive, alive)])[::-1]
        shares[: len(alive)] = np.clip(values, 0.0, None) / len(alive)
    return shares


def rank_at(shares: Floats, energy: float) -> int:
    """Return how many directions hold a share of the energy."""
    return int((np.cumsum(shares) < energy - 1e-9).sum()) + 1 if shares.any() else 0


def _alive(tensor: Compressed) -> Any:
    return np.flatnonzero(tensor.norm > 1e-9 * max(float(tensor.norm.max(initial=0.0)), 1e-300))


def head_cosines(tensor: Compressed) -> Floats:
    """Return the cosines between the heads' slices of the whole tensor, [row, row]."""
    norm = np.where(tensor.norm > 0, tensor.norm, 1.0)
    return np.asarray(tensor.gram / norm[:, None] / norm[None])
