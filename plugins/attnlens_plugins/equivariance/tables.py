"""Tables of ``equivariance``."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

import attnlens
from attnlens_plugins.equivariance.checks import checks as certificate

#: Below this relative change a quantity counts as unmoved by a change of basis.
_UNMOVED = 1e-2

_QUANTITIES = {
    "pattern": "attention weights, and their entropies, spectra and decompositions",
    "result": "z W_O: what each head writes to the residual stream",
    "q": "queries, their moments and directions",
    "k": "keys, their moments and directions",
    "v": "values, their moments and directions",
    "z": "head outputs before W_O: not to be compared across heads",
}


def checks(result: xr.Dataset) -> pd.DataFrame:
    """List every check of every layer."""
    rows = []
    for check in certificate(result):
        for layer, verdict in enumerate(check.verdicts):
            if verdict != "none":
                heads = [h for h in check.heads if h.startswith(f"{layer}.")]
                rows.append(
                    {
                        "symmetry": check.symmetry,
                        "what was changed": check.what.removeprefix("… "),
                        "layer": layer,
                        "verdict": verdict,
                        "change": float(f"{check.value[layer]:.3g}"),
                        "rounding allows": float(f"{check.tolerance[layer]:.2g}"),
                        "failing heads": ", ".join(heads),
                    }
                )
    return pd.DataFrame(rows)


def gauge_groups(result: xr.Dataset) -> pd.DataFrame:
    """List each layer's gauge groups."""
    if "gauge_qk_dims" not in result:
        raise attnlens.Skip("gauge symmetry was not checked")
    return pd.DataFrame(
        {
            "layer": result["layer"].values,
            "queries and keys": result["gauge_qk_group"].values,
            "dimensions": result["gauge_qk_dims"].values,
            "values and outputs": result["gauge_vo_group"].values,
            "dimensions ": result["gauge_vo_dims"].values,
        }
    )


def invariants(result: xr.Dataset) -> pd.DataFrame:
    """List which quantities a change of basis moved, and by how much."""
    if "gauge_moved" not in result:
        raise attnlens.Skip("gauge symmetry was not checked")
    moved = result["gauge_moved"].to_series()
    names = [name for name in _QUANTITIES if name in moved.index]
    return pd.DataFrame(
        {
            "quantity": names,
            "what it is": [_QUANTITIES[name] for name in names],
            "relative change": [float(f"{moved[name]:.2g}") for name in names],
            "invariant": ["yes" if moved[name] < _UNMOVED else "no" for name in names],
        }
    )


def alike(result: xr.Dataset, most: int = 20) -> pd.DataFrame:
    """List the pairs of heads that are nearest to each other."""
    if "distance" not in result or result.sizes["one"] < 2:
        raise attnlens.Skip("heads were not compared")
    values = result["distance"].values
    first, second = np.triu_indices(len(values), 1)
    apart = np.where(np.isnan(values[first, second]), np.inf, values[first, second])
    order = [i for i in np.argsort(apart, kind="stable")[:most] if np.isfinite(apart[i])]
    labels = result["one"].values
    rows = [(first[i], second[i]) for i in order]
    frame = pd.DataFrame(
        {
            "head": [labels[i] for i, _ in rows],
            "other head": [labels[j] for _, j in rows],
            "distance": [values[i, j] for i, j in rows],
            "of queries and keys": [result["distance_qk"].values[i, j] for i, j in rows],
            "at offset 0": [result["distance_qk_content"].values[i, j] for i, j in rows],
            "of values and outputs": [result["distance_vo"].values[i, j] for i, j in rows],
        }
    )
    return frame.round(4)
