"""What a number would be by chance: the judgement of a model against its twins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

#: The chance, over all heads tested at once, that a model with random weights yields a claim.
ALPHA = 1e-3


def twin_range(
    twins: Sequence[xr.DataArray],
    *,
    floor: float,
    over: str | Sequence[str] = "head",
    alpha: float = ALPHA,
) -> xr.Dataset:
    """Return between which bounds chance keeps a value.

    The values of all twins are pooled over `over`, so that each layer has bounds of its own. The
    bounds are those of a prediction interval for one further draw, widened to the range that was
    seen and corrected for the number of values tested at once (Bonferroni):

    ``mean +- t(1 - alpha / (2 m), n - 1) * max(s, floor) * sqrt(1 + 1 / n)``

    with ``n`` pooled values, their standard deviation ``s``, and ``m`` values in one twin. With
    few twins of few heads the Student quantile is large, and so the bounds are wide.

    Parameters
    ----------
    twins : sequence of xarray.DataArray
        The same quantity of each twin, for example over ``[layer, head]``.
    floor : float
        A spread below which a difference means nothing, in the unit of the quantity.
    over : str or sequence of str
        Dimensions to pool.
    alpha : float
        Chance of a value outside the bounds somewhere, if all came from a twin.

    Returns
    -------
    xarray.Dataset
        ``low``, ``high``, ``mean`` and ``spread`` over the remaining dimensions.

    Raises
    ------
    ValueError
        If there are no twins.

    References
    ----------
    Prediction interval of a normal sample: Hahn and Meeker, *Statistical Intervals* (1991), 4.7.
    """
    if not twins:
        raise ValueError("there are no twins to judge by")
    from scipy import stats

    pooled = xr.concat(list(twins), dim="twin", coords="minimal", compat="override")
    dims = ["twin", *([over] if isinstance(over, str) else over)]
    dims = [d for d in dims if d in pooled.dims]
    count = pooled.count(dims)
    mean = pooled.mean(dims)
    # One value has no spread: its interval is unbounded rather than empty.
    deviation = pooled.std(dims, ddof=1)
    spread = xr.where(count > 1, np.maximum(deviation, floor), np.inf)
    tested = max(int(twins[0].size), 1)
    quantile = stats.t.ppf(1 - alpha / (2 * tested), np.maximum(count - 1, 1))
    reach = quantile * spread * np.sqrt(1 + 1 / count)
    return xr.Dataset(
        {
            "low": np.minimum(pooled.min(dims), mean - reach),
            "high": np.maximum(pooled.max(dims), mean + reach),
            "mean": mean,
            "spread": deviation,
        }
    )


def above(values: xr.DataArray, bounds: xr.Dataset) -> xr.DataArray:
    """Tell which values lie higher than chance would have them; booleans of the same shape."""
    return values > bounds["high"]


def below(values: xr.DataArray, bounds: xr.Dataset) -> xr.DataArray:
    """Tell which values lie lower than chance would have them; booleans of the same shape."""
    return values < bounds["low"]
