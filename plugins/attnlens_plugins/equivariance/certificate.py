"""All symmetries of one model on some prompts, as labelled arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

import attnlens
from attnlens_plugins.equivariance import distances as heads
from attnlens_plugins.equivariance import words
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
            "permutation_output_error": ("layer", found.output_error),
            "permutation_output_tolerance": ("layer", found.output_tolerance),
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
        result[f"gauge_{kind}_known"] = ("layer", found.known[kind])
        result[f"gauge_{kind}_dims"] = ("layer", found.dims[kind])
        result[f"gauge_{kind}_group"] = ("layer", np.array(found.words[kind], dtype=str))
    result["heads_error"] = (_GRID, found.heads.error)
    result["heads_tolerance"] = (_GRID, found.heads.tolerance)
    for name, one in (("gauge_vo", found), ("heads", found.heads)):
        result[f"{name}_output_error"] = ("layer", one.output_error)
        result[f"{name}_output_tolerance"] = ("layer", one.output_tolerance)
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
            "rotation_norm_error": ("layer", found.norm_error),
            "rotation_carried": ("layer", found.carried),
            "rotation_tolerance": ("layer", found.tolerance),
            "rotation_logits": found.logits_change,
            "rotation_kept_logits": found.kept_change,
            "rotation_logits_allowed": found.allowed,
        }
    )


def head_map(weights: Mapping[str, Any], facts: Any, gauge: Gauge, length: int) -> xr.Dataset:
    """Compare all heads: see :mod:`attnlens_plugins.equivariance.distances`.

    Parameters
    ----------
    weights : mapping
    facts : ModelFacts
    gauge : Gauge
        What it measured of positions and sinks.
    length : int
        Offsets below it are compared.

    Returns
    -------
    xarray.Dataset
        ``distance_qk``, ``distance_qk_content``, ``distance_vo``, ``distance`` over [one, other],
        ``nearest_distance`` over [layer, head].

    Raises
    ------
    ModelError
        If what positions or sinks add to the scores could not be told.
    """
    rotary = [turn for turn in gauge.rotary if turn is not None]
    extra: dict[str, Any] = {"scales": np.asarray(facts.scales)}
    for name, wanted in (("slopes", facts.positions == "alibi"), ("sinks", facts.sinks)):
        values = getattr(gauge, name)
        if wanted and any(v is None for v in values):
            raise attnlens.errors.ModelError(f"the {name} of its heads could not be read")
        if wanted:
            extra[name] = np.stack(values)
    if len(rotary) < facts.n_layers:
        unknown = words.layers([i for i, turn in enumerate(gauge.rotary) if turn is None])
        raise attnlens.errors.ModelError(f"the rotary embedding in {unknown} could not be told")
    if facts.positions == "relative":
        raise attnlens.errors.ModelError("its relative positions add to the scores of each head")
    moving = "slopes" in extra or any(turn.pairs for turn in rotary)
    at = heads.offsets(length, moving)
    found = heads.head_distances(weights, facts, rotary, at, extra)
    shape = (facts.n_layers, facts.n_heads)
    result = xr.Dataset(attrs={"offsets": list(at)})
    for name, key in (("qk", "_qk"), ("qk_content", "_qk_content"), ("vo", "_vo"), ("both", "")):
        result[f"distance{key}"] = (("one", "other"), found[name].astype(np.float32))
    result["nearest_distance"] = (_GRID, heads.nearest(found["both"]).reshape(shape))
    return result


def grouped(found: xr.Dataset, below: float) -> xr.Dataset:
    """Add ``cluster`` over [layer, head] and ``order`` over [one] to what :func:`head_map` gave.

    Parameters
    ----------
    found : xarray.Dataset
    below : float
        The average distance below which heads are one group.
    """
    groups, order = heads.cluster(found["distance"].values.astype(np.float64), below)
    found["cluster"] = (_GRID, groups.reshape(found["nearest_distance"].shape))
    found["order"] = ("one", order)
    return found


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
