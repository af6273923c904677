"""The tensor of one model, whole, and the energy of its three unfoldings."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from attnlens_plugins.cp import building
from attnlens_plugins.cp.options import CPOptions
from attnlens_plugins.cp.sample import Sample, blocks, choose
from attnlens_plugins.cp.tensors import BLOCK, Floats, grid
from attnlens_plugins.tucker.options import TuckerOptions

#: Numbers of the largest tensor that is held: half a gigabyte of float32.
_MOST = 1 << 27


class Whole:
    """A tensor over heads and two further modes.

    Attributes
    ----------
    dims : tuple of str
    values : ndarray [row, n_1, n_2]
    layer, head : ndarray of int [row]
    """

    def __init__(self, dims: tuple[str, ...], values: Any, layer: Any, head: Any) -> None:
        self.dims = dims
        self.values = values
        self.layer = layer
        self.head = head

    def spectrum(self, mode: int) -> Floats:
        """Return the energy share of each direction of a mode, descending.

        The squared singular values of the unfolding over their sum: energy is sigma squared.
        """
        n = self.values.shape[mode]
        flat = np.moveaxis(self.values, mode, 0).reshape(n, -1)
        small = flat if n <= flat.shape[1] else flat.T
        found = np.linalg.eigvalsh(np.asarray(small @ small.T, dtype=np.float64))[::-1]
        found = np.clip(found, 0.0, None)
        total = found.sum()
        return np.asarray(found / total if total > 0 else found)


def as_cp(options: TuckerOptions) -> CPOptions:
    """Return the same choice of tensor in cp's words."""
    shared = ("tensor", "max_tokens", "max_positions", "exclude_bos", "scale", "center")
    chosen = {name: getattr(options, name) for name in (*shared, "vocabulary")}
    return CPOptions.model_validate(chosen)


def sample_of(store: Any, options: TuckerOptions, seed: int) -> Sample | None:
    """Choose the tokens: as many as are asked for and as fit."""
    if options.tensor not in ("result", "z"):
        return building.sample_of(store, as_cp(options), seed)
    data = next(iter(store.units()))[options.tensor]
    width = data.sizes["layer"] * data.sizes["head"] * data.sizes[data.dims[-1]]
    most = fitting(options.max_tokens, width)
    if most < options.max_tokens:
        warnings.warn(
            f"at most {most:,} tokens were taken, not {options.max_tokens:,}: the tensor is held "
            f"whole, in {4 * _MOST >> 20} MiB at most (cp is not bound so)",
            stacklevel=2,
        )
    return choose(
        store,
        options.tensor,
        most=most,
        seed=seed,
        exclude_first=options.exclude_bos,
    )


def fitting(tokens: int, width: int) -> int:
    """Return how many tokens of `width` numbers each are taken, of so many that are wanted."""
    return max(min(tokens, _MOST // width), 8)


def build(store: Any, options: TuckerOptions, sample: Sample | None, seed: int) -> Whole:
    """Build the tensor of a model or of a twin."""
    if options.tensor not in ("result", "z"):
        found = building.build(store, as_cp(options), sample, max_rank=1, seed=seed, keep=True)
        return Whole(found.dims, found.core, found.layer, found.head)
    assert sample is not None
    data = next(iter(store.units()))[options.tensor]
    numbers = grid(data["layer"].values, data["head"].values)
    values = np.concatenate(list(blocks(store, options.tensor, sample, BLOCK)), axis=1)
    if options.center:
        values = values - values.mean(axis=1, keepdims=True)
    if options.scale != "none":
        norm = np.sqrt(np.einsum("htd,htd->h", values, values, dtype=np.float64))
        alive = norm > 1e-9 * max(float(norm.max()), 1e-300)
        factor = np.where(alive, 1.0 / np.where(alive, norm, 1.0), 0.0)
        values = values * factor.astype(values.dtype)[:, None, None]
    last = "d_head" if options.tensor == "z" else "d_model"
    return Whole(("head", "token", last), values, *numbers)
