"""Tensors whose components are known."""

from __future__ import annotations

import numpy as np


def compose(factors, weights=None):
    """Sum of outer products of the columns of `factors`."""
    letters = "ijklm"[: len(factors)]
    weights = np.ones(factors[0].shape[1]) if weights is None else weights
    return np.einsum(f"r,{','.join(c + 'r' for c in letters)}->{letters}", weights, *factors)


def planted(shape, rank, noise=0.0, seed=0, nonnegative=False):
    """A tensor with normal (or sparse exponential) factors and white noise; and the factors."""
    rng = np.random.default_rng(seed)
    if nonnegative:
        factors = [rng.exponential(size=(n, rank)) * (rng.random((n, rank)) < 0.5) for n in shape]
    else:
        factors = [rng.standard_normal((n, rank)) for n in shape]
    tensor = compose(factors)
    if noise:
        white = rng.standard_normal(shape)
        if nonnegative:
            white = np.abs(white)
        tensor = tensor + noise * np.linalg.norm(tensor) / np.linalg.norm(white) * white
    return tensor, factors


def relative_error(tensor, model):
    return np.linalg.norm(tensor - model) / np.linalg.norm(tensor)
