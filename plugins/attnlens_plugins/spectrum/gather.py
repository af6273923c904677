"""From a store to labelled measures, prompt by prompt and layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from attnlens_plugins.spectrum.measures import collapse, grid, of_attention, of_weights, score_rank

_DIMS = {
    "energy_sigma": ("prompt", "head", "k"),
    "energy_sigma2": ("prompt", "head", "k"),
    "sigma": ("prompt", "head", "component"),
}


def activations(store: Any, most: int) -> xr.Dataset:
    """Measure every head of a store on at most `most` prompts of two tokens or more.

    Parameters
    ----------
    store : View
        With ``pattern``; ``q_rot``, ``k_rot`` and ``resid_pre`` where there are any.
    most : int

    Returns
    -------
    xarray.Dataset
        What :func:`of_attention` gives, with a ``layer`` dimension; where it can be had,
        ``score_rank`` over [prompt, layer, head], and ``mean_residual`` and ``rank_one_residual``
        over [prompt, layer].
    """
    units = []
    left = most
    for unit in store.units():
        if left <= 0:
            break
        if unit.length < 2:
            continue
        take = min(left, len(unit.prompt_ids))
        left -= take
        layers = [int(x) for x in unit["pattern"]["layer"].values]
        one = xr.concat([_layer(unit, layer, take, store) for layer in layers], dim="layer")
        units.append(one.assign_coords(layer=layers, prompt=list(unit.prompt_ids)[:take]))
    return xr.concat(units, dim="prompt", join="outer")


def _layer(unit: Any, layer: int, take: int, store: Any) -> xr.Dataset:
    attention = unit.attention(layer, slice(0, take))
    ks = grid(attention.n_positions)
    measured = of_attention(attention, ks, store.seed)
    result = xr.Dataset(
        {name: (_DIMS.get(name, ("prompt", "head")), value) for name, value in measured.items()},
        coords={
            "head": unit["pattern"]["head"].values,
            "k": ks,
            "component": np.arange(1, measured["sigma"].shape[-1] + 1),
        },
    )
    chosen, rows = {"layer": layer}, {"prompt": slice(0, take)}
    if "q_rot" in store and "k_rot" in store:
        q, k = (unit[n].sel(chosen).isel(rows) for n in ("q_rot", "k_rot"))
        ranks = score_rank(q.values, _of_heads(k, q, store.facts))
        result["score_rank"] = (("prompt", "head"), ranks)
    if "resid_pre" in store:
        residual = collapse(unit["resid_pre"].sel(chosen).isel(rows).values)
        for name, value in zip(("mean_residual", "rank_one_residual"), residual, strict=True):
            result[name] = (("prompt",), value)
    return result


def _of_heads(k: xr.DataArray, q: xr.DataArray, facts: Any) -> Any:
    """Repeat grouped keys so that each query head stands beside the ones that it reads."""
    group = facts.n_heads // facts.n_kv_heads if facts else q.sizes["head"] // k.sizes["kv_head"]
    return k.sel(kv_head=[int(h) // group for h in q["head"].values]).values


def weights(store: Any) -> xr.Dataset:
    """Measure the weights of every head: what :func:`of_weights` gives, over [layer, head]."""
    held = store.weights
    measured = of_weights(held)
    layers = held["layer"].values if "layer" in held.coords else None
    result = xr.Dataset({name: (("layer", "head"), value) for name, value in measured.items()})
    return result.assign_coords(
        layer=np.arange(result.sizes["layer"]) if layers is None else layers,
        head=np.arange(result.sizes["head"]),
    )
