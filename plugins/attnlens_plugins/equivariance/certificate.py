"""All symmetries of one model on some prompts, as labelled arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from attnlens_plugins.equivariance import distances as heads
from attnlens_plugins.equivariance.gauge import Gauge, whole_model
from attnlens_plugins.equivariance.live import each_attention
from attnlens_plugins.equivariance.permutation import Permutation, shuffles
from attnlens_plugins.equivariance.rotation import Rotation
from attnlens_plugins.equivariance.shifts import Shifts

_GRID = ("layer", "head")


def permutations(model: Any, tokens: Any, count: int, seed: int) -> xr.Dataset:
    """Shuffle the tokens of every layer's input: see :class:`Permutation`.

    Parameters
    ----------
    model : Model
    tokens : int[prompt, pos]
    count : int
        Number of shuffles.
    seed : int

    Returns
    -------
    xarray.Dataset
        Over [layer, head].
    """
    found = Permutation(model.facts, shuffles(tokens, count, seed))
    each_attention(model, tokens, found.visit)
    return xr.Dataset(
        {
            "permutation_error": (_GRID, found.error),
            "permutation_tolerance": (_GRID, found.tolerance),
            "mask_broken": (_GRID, found.mask_broken),
            "positions_broken": (_GRID, found.positions_broken),
            "content_distance": (_GRID, found.content_distance),
            "position_distance": (_GRID, found.position_distance),
            "positionality": (_GRID, found.positionality),
        }
    )


def shifts(model: Any, tokens: Any, seed: int) -> xr.Dataset:
    """Add constants to rows of scores and vectors to keys: see :class:`Shifts`."""
    found = Shifts(model.facts, seed)
    each_attention(model, tokens, found.visit)
    return xr.Dataset(
        {
            "shift_error": (_GRID, found.error),
            "shift_tolerance": (_GRID, found.tolerance),
            "scale_change": (_GRID, found.scale_change),
            "key_bias_error": (_GRID, found.key_error),
            "key_bias_tolerance": (_GRID, found.key_tolerance),
            "key_bias_change": (_GRID, found.key_change),
            "key_bias_null_dims": ("layer", found.null_dims),
        }
    )


def gauges(model: Any, tokens: Any, weights: Mapping[str, Any], seed: int) -> Gauge:
    """Change every head's basis in every layer: see :class:`Gauge`."""
    gains = {n: np.asarray(weights[n]) for n in ("q_norm_w", "k_norm_w") if n in weights}
    found = Gauge(model, gains, seed)
    logits = each_attention(model, tokens, found.visit)
    found.logits = whole_model(found, tokens, logits)
    return found


def gauge_dataset(found: Gauge) -> xr.Dataset:
    """Label what :class:`Gauge` gathered."""
    result = xr.Dataset()
    for kind in ("qk", "vo"):
        result[f"gauge_{kind}_error"] = (_GRID, found.error[kind])
        result[f"gauge_{kind}_tolerance"] = (_GRID, found.tolerance[kind])
        result[f"gauge_{kind}_outside"] = (_GRID, found.outside[kind])
        result[f"gauge_{kind}_dims"] = ("layer", found.dims[kind])
        result[f"gauge_{kind}_group"] = ("layer", np.array(found.words[kind], dtype=str))
    result["heads_error"] = (_GRID, found.heads.error)
    result["heads_tolerance"] = (_GRID, found.heads.tolerance)
    names = sorted(found.moved)
    result["gauge_moved"] = ("quantity", np.array([found.moved[n] for n in names]))
    result = result.assign_coords(quantity=names)
    for name, value in found.logits.items():
        result[f"gauge_logits_{name}"] = value
    return result


def rotations(model: Any, tokens: Any, seed: int, *, pre_norm: bool) -> xr.Dataset:
    """Rotate the residual stream: see :class:`Rotation`."""
    found = Rotation(model, seed, pre_norm=pre_norm)
    found.run(tokens)
    return xr.Dataset(
        {
            "rotation_error": ("layer", found.error),
            "rotation_kept_error": ("layer", found.kept_error),
            "rotation_norm": ("layer", np.array(found.worst, dtype=str)),
            "rotation_tolerance": found.tolerance,
            "rotation_final_error": found.final_error,
            "rotation_logits": found.logits_change,
            "rotation_kept_logits": found.kept_change,
            "rotation_logits_allowed": found.allowed,
        }
    )


def head_map(
    weights: Mapping[str, Any], facts: Any, pairs: Any, length: int, *, below: float | None = None
) -> xr.Dataset:
    """Compare all heads: see :mod:`attnlens_plugins.equivariance.distances`.

    Parameters
    ----------
    weights : mapping
    facts : ModelFacts
    pairs : sequence, one for each layer, of sequence of (int, int)
    length : int
        Offsets below it are compared.
    below : float, optional
        The average distance below which heads are one group; without it they are not grouped.

    Returns
    -------
    xarray.Dataset
        ``distance_qk``, ``distance_qk_content``, ``distance_vo``, ``distance`` over [one, other],
        ``nearest_distance`` over [layer, head]; grouped: ``cluster`` over [layer, head] and
        ``order`` over [one].
    """
    rotary = any(len(p) > 0 for p in pairs)
    at = heads.offsets(length, rotary)
    found = heads.head_distances(weights, facts, pairs, at)
    shape = (facts.n_layers, facts.n_heads)
    result = xr.Dataset(attrs={"offsets": list(at)})
    for name, key in (("qk", "_qk"), ("qk_content", "_qk_content"), ("vo", "_vo"), ("both", "")):
        result[f"distance{key}"] = (("one", "other"), found[name].astype(np.float32))
    result["nearest_distance"] = (_GRID, heads.nearest(found["both"]).reshape(shape))
    if below is not None:
        groups, order = heads.cluster(found["both"], below)
        result["cluster"] = (_GRID, groups.reshape(shape))
        result["order"] = ("one", order)
    return result


def timed(model: Any, tokens: Any) -> dict[str, float]:
    """Return the seconds that each symmetry takes, by its name."""
    weights = model.weights()
    jobs: dict[str, Callable[[], Any]] = {
        "permutations (2 shuffles)": lambda: permutations(model, tokens, 2, 0),
        "softmax shifts": lambda: shifts(model, tokens, 0),
        "gauge": lambda: gauges(model, tokens, weights, 0),
        "rotation of the stream": lambda: rotations(model, tokens, 0, pre_norm="ln1_w" in weights),
    }
    found = {}
    for name, job in jobs.items():
        start = time.perf_counter()
        job()
        found[name] = time.perf_counter() - start
    return found
