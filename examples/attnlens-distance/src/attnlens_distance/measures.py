"""What is measured of each head, from two statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

import attnlens


def measure(store: Any, near: int) -> xr.Dataset:
    """Measure every head of one store.

    Parameters
    ----------
    store : attnlens.view.View
        With ``pattern.by_offset`` and ``pattern.received``.
    near : int
        Up to how many tokens away a key counts as near.

    Returns
    -------
    xarray.Dataset
        ``share[layer, head, offset]``, the share of a head's attention that lies at each distance
        ``query - key``; over ``[layer, head]`` the mean ``distance`` in tokens, whatever the
        direction; the shares ``self``, ``near`` and ``first``; ``previous``, the mean weight on
        the token before; and where a head can see later tokens, ``asymmetry``: the share on later
        tokens minus the share on earlier ones.

    Raises
    ------
    attnlens.Skip
        If every prompt has one token alone.

    Notes
    -----
    The statistic holds the mean weight m_d at distance d, over the c_d rows that have a key there.
    With prompts of n_p tokens, c_d = sum_p max(n_p - |d|, 0), so that c_d m_d is the whole weight
    at distance d: the mean over all rows follows exactly, and no pattern need be kept.
    """
    lengths = store.lengths
    if int(lengths.max()) < 2:
        raise attnlens.Skip("every prompt has one token: nothing lies at a distance")
    mean = store["pattern.by_offset"].fillna(0.0)
    away = np.abs(mean["offset"])
    rows = (lengths - away).clip(min=0).sum("prompt")
    mass = mean * rows
    # Divided by what was found, not by the number of rows: heads with a sink outside the text
    # (gpt-oss) have rows that sum to less than one. A head without any weight has no distance.
    total = mass.sum("offset")
    share = (mass / total.where(total > 0)).fillna(0.0)
    result = xr.Dataset(
        {
            "share": share,
            "distance": (share * away).sum("offset"),
            "self": share.sel(offset=0, drop=True),
            "previous": mean.sel(offset=1, drop=True),
            "near": share.where(away <= near, 0.0).sum("offset"),
            "first": store["pattern.received"].isel(key_pos=0, drop=True).fillna(0.0),
        }
    )
    if int(mean["offset"].min()) < 0:
        result["asymmetry"] = (share * -np.sign(mean["offset"])).sum("offset")
    return result


def spread_evenly(lengths: Any, *, two_sided: bool) -> float:
    """Return the mean distance of attention that spreads evenly over all visible keys.

    Row i of a causal prompt (i from 0) is on average i / 2 away, a prompt of n tokens therefore
    (n - 1) / 4; where all keys are seen it is (n^2 - 1) / (3 n), the mean of ``|i - j|``.

    Parameters
    ----------
    lengths : array of int
        Tokens of each prompt, which weigh the mean.
    two_sided : bool
        Whether later keys are seen, too.
    """
    n = np.asarray(lengths, dtype=np.float64)
    each = (n**2 - 1) / (3 * n) if two_sided else (n - 1) / 4
    return float(np.average(each, weights=n))
