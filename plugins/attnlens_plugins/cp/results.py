"""The labelled dataset of ``cp``, put together from fits, groups and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from attnlens_plugins.cp.clusters import Groups, cohesion
from attnlens_plugins.cp.fitting import Fit
from attnlens_plugins.cp.heads import (
    ENERGY,
    head_cosines,
    head_spectrum,
    rank_at,
    rebuild_error,
)
from attnlens_plugins.cp.options import CPOptions
from attnlens_plugins.cp.sample import Sample
from attnlens_plugins.cp.tensors import Compressed
from attnlens_plugins.cp.words import embedding, name_directions, unembedding

#: Modes that are directions of the residual stream, and whether they are read or written.
_DIRECTIONS = {
    "d_model": "written",
    "d_model_2": "written",
    "d_model_in": "read",
    "query_d_model": "read",
    "key_d_model": "read",
}

#: Modes that are read from the residual stream, and so are named by the embedding.
READ_MODES = ("d_model_in", "query_d_model", "key_d_model")


def on_grid(tensor: Compressed, values: Any, *dims: str) -> xr.DataArray:
    """Label values over the rows of a tensor by layer and head."""
    layers, heads = np.unique(tensor.layer), np.unique(tensor.head)
    values = np.asarray(values)
    return xr.DataArray(
        values.reshape(len(layers), len(heads), *values.shape[1:]),
        dims=("layer", "head", *dims),
        coords={"layer": layers, "head": heads},
    )


def per_head(tensor: Compressed, fits: Sequence[Fit]) -> xr.Dataset:
    """Label what each fit says of its heads; the fits' heads make up the tensor's."""
    loadings = np.concatenate([f.factors[0] for f in fits])
    return xr.Dataset(
        {
            "loadings": on_grid(tensor, loadings, "component"),
            "explained": on_grid(tensor, np.concatenate([f.explained for f in fits])),
            "norm": on_grid(tensor, tensor.norm),
        }
    )


def strengths(tensor: Compressed, fits: Sequence[Fit]) -> Any:
    """Return loadings times weights, as the heads are grouped by, [row, component].

    No columns where each layer has components of its own: those of different layers have nothing
    in common, and would group the heads by layer whatever they do.
    """
    if len(fits) > 1:
        return np.zeros((len(tensor.layer), 0))
    return fits[0].factors[0] * fits[0].weights


def components(
    store: Any, options: CPOptions, tensor: Compressed, sample: Sample | None, fit: Fit
) -> xr.Dataset:
    """Label the components of one fit: weights, and the factors of the other modes."""
    total = float(tensor.energy.sum())
    data: dict[str, Any] = {
        "weights": ("component", fit.weights),
        "share": ("component", fit.weights**2 / total if total > 0 else 0 * fit.weights),
        "restart_errors": ("restart", fit.restart_errors),
    }
    found = xr.Dataset(data)
    for name, factor in zip(tensor.dims[1:], fit.factors[1:], strict=True):
        if name == "token":
            assert sample is not None
            found = found.merge(_tokens(options, sample, factor))
        elif name in ("query_pos", "key_pos"):
            first = 1 if options.exclude_bos and len(factor) > 1 else 0
            found[f"factor_{name}"] = xr.DataArray(
                factor, dims=(name, "component"), coords={name: np.arange(len(factor)) + first}
            )
        else:
            found[f"factor_{name}"] = ((name, "component"), factor)
            found = found.merge(_words(store, options, name, factor))
    return found


def _tokens(options: CPOptions, sample: Sample, factor: Any) -> xr.Dataset:
    if options.tokens == "pooled":
        return xr.Dataset(
            {"prompt_loadings": (("prompt", "component"), factor)},
            coords={"prompt": sample.prompts},
        )
    positions = np.unique(sample.position)
    place = np.searchsorted(positions, sample.position)
    sums = np.zeros((len(positions), factor.shape[1]))
    np.add.at(sums, place, factor)
    counts = np.bincount(place, minlength=len(positions))
    return xr.Dataset(
        {
            "token_loadings": (("token", "component"), factor),
            "position_loadings": (("pos", "component"), sums / counts[:, None]),
        },
        coords={
            "token_prompt": ("token", sample.prompt),
            "token_pos": ("token", sample.position),
            "token_text": ("token", np.array(sample.text, dtype=str)),
            "pos": positions,
        },
    )


def _words(store: Any, options: CPOptions, name: str, factor: Any) -> xr.Dataset:
    named = name_mode(store, options, name, factor)
    if named is None:
        return xr.Dataset()
    return named.rename(token=f"words_{name}", logit=f"logits_{name}")


def name_mode(store: Any, options: CPOptions, name: str, factor: Any) -> xr.Dataset | None:
    """Name the directions of a mode by the vocabulary; None where that cannot be."""
    kind = _DIRECTIONS.get(name)
    if kind is None:
        return None
    matrix = unembedding(store) if kind == "written" else embedding(store)
    if matrix is None or matrix.shape[0] != factor.shape[0]:
        return None
    return name_directions(factor, matrix, store.vocabulary, options.vocabulary)


def redundancy(tensor: Compressed) -> xr.Dataset:
    """Label how well heads rebuild each other, and how many independent directions they have."""
    shares = head_spectrum(tensor)
    return xr.Dataset(
        {
            "rebuild_error": on_grid(tensor, rebuild_error(tensor)),
            "head_spectrum": ("direction", shares),
            "head_rank": rank_at(shares, ENERGY),
        }
    )


def scan(ranks: list[int], scans: Sequence[dict[int, Fit]], table: Any) -> xr.Dataset:
    """Label the curves over ranks; where layers were fitted each alone, their mean."""

    def mean(name: str) -> Any:
        return np.mean([[float(getattr(s[r], name)) for r in ranks] for s in scans], axis=0)

    data: dict[str, Any] = {
        f"scan_{name}": ("rank", mean(name))
        for name in ("error", "core_consistency", "min_cosine", "converged")
    }
    if table is not None:
        data["scan_stability"] = (("split", "rank"), table)
    return xr.Dataset(data, coords={"rank": ranks})


def grouping(tensor: Compressed, groups: Groups) -> xr.Dataset:
    """Label the best partition of the heads."""
    return xr.Dataset(
        {
            "group": on_grid(tensor, groups.label),
            "silhouette": on_grid(tensor, groups.silhouette),
            "cohesion": on_grid(tensor, cohesion(head_cosines(tensor), groups.label)),
            "group_quality": ("n_groups", groups.quality),
        },
        coords={"n_groups": groups.numbers},
    )
