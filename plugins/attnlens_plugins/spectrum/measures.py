"""The numbers: what a spectrum of singular values says, and what uniform attention would say."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr


def energy(sigma: Any, power: int) -> Any:
    """Return the cumulative share of ``sigma ** power`` over the last dimension.

    Parameters
    ----------
    sigma : ndarray [..., component]
        Singular values, descending.
    power : {1, 2}
        1 for the nuclear norm's share, 2 for the squared Frobenius norm's.
    """
    raised = sigma**power
    total = raised.sum(-1, keepdims=True)
    return np.cumsum(raised, -1) / np.where(total > 0, total, 1.0)


def effective_rank(sigma: Any) -> Any:
    """Return exp of the Shannon entropy of ``sigma / sum(sigma)``.

    References
    ----------
    Roy and Vetterli, "The effective rank: a measure of effective dimensionality" (2007).
    """
    total = sigma.sum(-1, keepdims=True)
    p = sigma / np.where(total > 0, total, 1.0)
    return np.exp(-np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1))


def stable_rank(sigma: Any) -> Any:
    """Return ``sum(sigma^2) / sigma_1^2``.

    References
    ----------
    Rudelson and Vershynin, "Sampling from large matrices" (2007).
    """
    first = sigma[..., 0] ** 2
    return (sigma**2).sum(-1) / np.where(first > 0, first, 1.0)


def rank_at(sigma: Any, share: float, power: int) -> Any:
    """Return how many components hold `share` of the energy."""
    return (energy(sigma, power) < share - 1e-9).sum(-1) + 1


def causal_uniform(n: int) -> dict[str, float]:
    """Return the measures of attention that spreads evenly over the visible keys.

    Row i has i equal weights, so its mean entropy is ``ln(n!) / n`` and its squared Frobenius
    norm the harmonic number ``H_n``.
    """
    matrix = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    sigma = np.linalg.svd(matrix, compute_uv=False)
    return {
        "entropy": float(np.log(np.arange(1, n + 1)).mean()),
        "entropy_share": 1.0,
        "effective_rank": float(effective_rank(sigma)),
        "stable_rank": float(stable_rank(sigma)),
        "sink": float((1 / np.arange(2, n + 1)).mean()) if n > 1 else 1.0,
    }


def summarize(store: Any, max_prompts: int) -> xr.Dataset:
    """Measure every head of a store on each prompt.

    Parameters
    ----------
    store : View
    max_prompts : int
        Of each unit of equal lengths, how many prompts' singular values are computed.

    Returns
    -------
    xarray.Dataset
        ``sigma[prompt, layer, head, component]`` and, over ``[prompt, layer, head]``:
        ``entropy``, ``entropy_share``, ``sink``, ``effective_rank``, ``stable_rank``.
    """
    units = []
    left = max_prompts
    for unit in store.units():
        if left <= 0:
            break
        layers = list(unit["pattern"]["layer"].values)
        heads = unit["pattern"]["head"].values
        take = min(left, unit["pattern"].sizes["prompt"])
        left -= take
        per_layer = [_measure(unit.attention(int(layer), slice(0, take))) for layer in layers]
        units.append(
            xr.concat(per_layer, dim="layer").assign_coords(
                layer=layers, head=heads, prompt=list(unit.prompt_ids)[:take]
            )
        )
    return xr.concat(units, dim="prompt", join="outer")


def _measure(one: Any) -> xr.Dataset:
    sigma = one.singular_values().double().cpu().numpy()
    rows = ("prompt", "head")
    return xr.Dataset(
        {
            "sigma": (("prompt", "head", "component"), sigma),
            "entropy": (rows, one.entropy().double().mean(-1).cpu().numpy()),
            "entropy_share": (rows, _mean_share(one)),
            "sink": (rows, one.sink().double().cpu().numpy()),
            "effective_rank": (rows, effective_rank(sigma)),
            "stable_rank": (rows, stable_rank(sigma)),
        },
        coords={"component": np.arange(1, sigma.shape[-1] + 1)},
    )


def _mean_share(attention: Any) -> Any:
    import torch

    # The first row of causal attention sees one key and has no share.
    return torch.nanmean(attention.entropy_share().double(), -1).cpu().numpy()
