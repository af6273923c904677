"""What directions of the residual stream say in the vocabulary, and which tokens load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from attnlens_plugins.cp.tensors import Floats


def unembedding(store: Any) -> Any:
    """Return W_U with the final norm's gain, each direction's mean over the vocabulary removed.

    A constant added to all logits changes no prediction. None where the model has no unembedding
    or the vocabulary is not known.
    """
    weights = _weights(store)
    if "W_U" not in weights or store.vocabulary is None:
        return None
    matrix = np.asarray(weights["W_U"].values, dtype=np.float32)
    if "ln_final_w" in weights:
        matrix = matrix * np.asarray(weights["ln_final_w"].values)[:, None]
    return matrix - matrix.mean(1, keepdims=True)


def embedding(store: Any) -> Any:
    """Return W_E transposed, the mean over the vocabulary removed; None where there is none."""
    weights = _weights(store)
    if "W_E" not in weights or store.vocabulary is None:
        return None
    matrix = np.asarray(weights["W_E"].values, dtype=np.float32).T
    return matrix - matrix.mean(1, keepdims=True)


def _weights(store: Any) -> Any:
    return store.weights if store.has_weights else {}


def name_directions(
    directions: Floats, matrix: Any, vocabulary: Sequence[str], most: int
) -> xr.Dataset:
    """Name unit directions by the tokens that they raise and lower most.

    Parameters
    ----------
    directions : ndarray [d_model, component]
    matrix : ndarray [d_model, d_vocab]
    vocabulary : sequence of str
    most : int
        Tokens at either end.

    Returns
    -------
    xarray.Dataset
        ``token[component, end, place]`` and its ``logit``, ends ``"top"`` and ``"bottom"``.
    """
    logits = matrix.T @ directions.astype(matrix.dtype)
    known = min(len(vocabulary), len(logits))
    logits = logits[:known]
    most = min(most, known)
    order = np.argsort(logits, axis=0, kind="stable")
    ends = np.stack([order[::-1][:most], order[:most]])  # [end, place, component]
    places = np.moveaxis(ends, -1, 0)
    names = np.array([[[vocabulary[i] for i in row] for row in ends] for ends in places])
    values = np.take_along_axis(logits.T[:, None, :].repeat(2, 1), places, axis=-1)
    dims = ("component", "end", "place")
    return xr.Dataset(
        {"token": (dims, names), "logit": (dims, values.astype(np.float64))},
        coords={"end": ["top", "bottom"]},
    )


def top_tokens(loadings: Floats, text: Sequence[str], most: int) -> list[list[tuple[str, float]]]:
    """List, for each component, the tokens with the largest mean absolute loading.

    Parameters
    ----------
    loadings : ndarray [token, component]
    text : sequence of str
    most : int
        Tokens that occur once or twice in a long text count only where few recur.
    """
    kinds, which, count = np.unique(
        np.asarray(text, dtype=str), return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(kinds), loadings.shape[1]))
    np.add.at(sums, which, loadings)
    means = sums / count[:, None]
    often = count >= min(3, int(np.sort(count)[::-1][:most][-1]))
    scores = np.where(often[:, None], np.abs(means), -1.0)
    return [
        [
            (str(kinds[i]), float(means[i, r]))
            for i in np.argsort(-scores[:, r], kind="stable")[:most]
        ]
        for r in range(loadings.shape[1])
    ]
