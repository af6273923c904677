"""The points: what each head, or each component, is drawn by."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

import attnlens
from attnlens_plugins.cp.heads import REPEATED, type_scores
from attnlens_plugins.cp.sample import blocks, choose
from attnlens_plugins.cp.tensors import BLOCK, Floats, grid

#: What must be captured for the attention of heads.
OF_HEADS = ("pattern.by_offset", "pattern.received", f"pattern.by_offset@{REPEATED}")


@dataclass(frozen=True)
class Points:
    """Vectors with the head or component that each is of.

    Attributes
    ----------
    values : ndarray [point, feature]
    layer, head : ndarray of int [point]
        For features: the layer and head that load most on the component.
    name : list of str
    """

    values: Floats
    layer: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    name: list[str]


def of_heads(store: Any) -> Points:
    """Describe heads by their attention.

    Square roots of attention masses (so that distances are Hellinger distances): over bins of the
    distance query - key that double in width, on the run's corpus and on repeated random tokens,
    and the scores of known types.

    Parameters
    ----------
    store : View or Store
    """
    offsets = store["pattern.by_offset"].transpose("layer", "head", "offset")
    columns = [_binned(offsets)]
    try:
        other = store.corpus(REPEATED)["pattern.by_offset"]
        columns.append(_binned(other.transpose("layer", "head", "offset")))
    except attnlens.errors.NeedError:
        pass
    causal = store.facts is None or bool(store.facts.causal)
    for score in type_scores(store, causal=causal).data_vars.values():
        columns.append(np.asarray(score.values, dtype=np.float64).reshape(-1, 1))
    layer, head = grid(offsets["layer"].values, offsets["head"].values)
    values = np.sqrt(np.clip(np.nan_to_num(np.concatenate(columns, axis=1)), 0.0, None))
    return Points(values, layer, head, _names(layer, head))


def _binned(offsets: xr.DataArray) -> Floats:
    values = np.asarray(offsets.values, dtype=np.float64)
    distance = offsets["offset"].values
    edges = [0, 1, 2, 3]
    while edges[-1] <= np.abs(distance).max():
        edges.append(2 * edges[-1] - 1)
    parts = [
        np.nan_to_num(values[..., (distance >= low) & (distance < high)]).sum(-1)
        for low, high in pairwise(edges)
    ]
    if (distance < 0).any():
        parts.append(np.nan_to_num(values[..., distance < 0]).sum(-1))
    return np.stack(parts, axis=-1).reshape(-1, len(parts))


def of_outputs(store: Any, *, most: int, seed: int) -> Points:
    """Place heads so that squared distances are ``2 - 2 cos`` of all that they write.

    Parameters
    ----------
    store : View or Store
    most : int
        Tokens at most.
    seed : int
    """
    sample = choose(store, "result", most=most, seed=seed, exclude_first=True)
    gram: Any = 0.0
    for block in blocks(store, "result", sample, BLOCK):
        rows = block.reshape(block.shape[0], -1)
        gram = gram + np.asarray(rows @ rows.T, dtype=np.float64)
    norm = np.sqrt(np.clip(np.diag(gram), 0.0, None))
    norm = np.where(norm > 0, norm, 1.0)
    values, vectors = np.linalg.eigh(gram / norm[:, None] / norm[None])
    data = next(iter(store.units()))["result"]
    layer, head = grid(data["layer"].values, data["head"].values)
    return Points(vectors * np.sqrt(np.clip(values, 0.0, None)), layer, head, _names(layer, head))


def of_loadings(cp: xr.Dataset) -> Points:
    """Describe heads by the direction of their loadings on cp's components."""
    loadings = cp["loadings"].transpose("layer", "head", "component")
    weights = cp["weights"]
    if "part" in weights.dims:
        weights = weights.rename(part="layer")
    strong = (loadings * weights).transpose("layer", "head", "component").values
    values = strong.reshape(-1, strong.shape[-1])
    norm = np.linalg.norm(values, axis=1, keepdims=True)
    layer, head = grid(loadings["layer"].values, loadings["head"].values)
    return Points(values / np.where(norm > 0, norm, 1.0), layer, head, _names(layer, head))


def of_features(cp: xr.Dataset) -> Points:
    """Describe cp's components by their feature factors.

    Raises
    ------
    Skip
        If cp decomposed a tensor without a feature mode.
    """
    modes = [m for m in cp.attrs["modes"][1:] if f"factor_{m}" in cp and "pos" not in m]
    if not modes:
        raise attnlens.Skip(f"cp decomposed {cp.attrs['tensor']}, which has no feature factors")
    mode = modes[-1]
    factor = cp[f"factor_{mode}"]
    loadings = cp["loadings"].transpose("layer", "head", "component")
    layers, heads = loadings["layer"].values, loadings["head"].values
    values, layer, head, name = [], [], [], []
    parts = cp["part"].values if "part" in factor.dims else [None]
    for i, part in enumerate(parts):
        one = factor if part is None else factor.isel(part=i)
        own = loadings if part is None else loadings.sel(layer=[part])
        for c, component in enumerate(cp["component"].values):
            strongest = int(np.abs(own.values[..., c]).argmax())
            values.append(one.transpose(mode, "component").values[:, c])
            rows = layers if part is None else np.array([part])
            layer.append(rows[strongest // len(heads)])
            head.append(heads[strongest % len(heads)])
            name.append(f"{component}" if part is None else f"{part}:{component}")
    # A direction and its opposite are one factor.
    stacked = np.array(values)
    first = stacked[np.arange(len(stacked)), np.abs(stacked).argmax(1)]
    return Points(
        stacked * np.where(first < 0, -1.0, 1.0)[:, None], np.array(layer), np.array(head), name
    )


def _names(layer: Any, head: Any) -> list[str]:
    return [f"{a}.{b}" for a, b in zip(layer, head, strict=True)]
