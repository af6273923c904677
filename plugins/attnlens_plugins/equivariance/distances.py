"""How far apart heads are, whatever their bases: distances, equal heads and clusters.

Two heads are the same if their forms ``W_Q R_delta W_K^T`` (at every offset delta, where a rotary
embedding R acts) and their maps ``W_V W_O`` are. Both are d_model x d_model matrices of rank
d_head; what is needed of them are inner products, and these are gathered from strips of a few rows
of all heads' matrices at once, so that no such matrix is ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlens_plugins.equivariance.rotary import Rotary

Array = NDArray[np.float64]
#: Name -> float64[layer, head]: what a head adds to its scores that no weight holds.
Extra = Mapping[str, Any]

#: Numbers in a strip of all heads' matrices: 32 MB in float64. Strips of few rows are slow.
_STRIP = 2**22
#: Most offsets at which forms are compared under a rotary embedding.
_OFFSETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Multiplications beyond which heads are compared within their layers alone.
_MOST_WORK = 4e12
#: Heads farther apart than this are not equal, however coarse the dtype is.
EQUAL = 1e-3


#: The spacing of a dtype's numbers at 1.
_SPACING = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def equal_below(facts: Any) -> float:
    """Return the distance below which heads are equal up to the rounding of their weights.

    Products of d_model terms, each rounded, with a slack for the condition of the bases.
    """
    eps = _SPACING.get(facts.dtype, 2.0**-23)
    return float(np.clip(64 * eps * facts.d_model**0.5, 1e-6, EQUAL))


@dataclass(frozen=True)
class Heads:
    """All heads of a model as products of two thin matrices.

    Attributes
    ----------
    left : float64[head, row, d_head]
    right : float64[head, d_head, column]
        Head h is the matrix ``left[h] right[h]``.
    """

    left: Array
    right: Array

    def strips(self, numbers: int = _STRIP) -> Iterator[Array]:
        """Yield all heads' matrices a few rows at a time, [head, row, column].

        Every strip lies in the same memory: it is gone when the next one is asked for.
        """
        heads, rows, _ = self.left.shape
        columns = self.right.shape[2]
        step = min(max(1, numbers // (heads * columns)), rows)
        buffer = np.empty(heads * step * columns)
        for start in range(0, rows, step):
            part = self.left[:, start : start + step]
            strip = buffer[: heads * part.shape[1] * columns].reshape(heads, -1, columns)
            yield np.matmul(part, self.right, out=strip)


def gram(heads: Heads, numbers: int = _STRIP) -> Array:
    """Return the Frobenius inner products of all pairs of heads, [head, head].

    Parameters
    ----------
    heads : Heads
    numbers : int
        Numbers held at once, above the heads' own.
    """
    count = len(heads.left)
    found = np.zeros((count, count))
    for strip in heads.strips(numbers):
        flat = strip.reshape(count, -1)
        found += flat @ flat.T
    return found


def relative_distances(products: Array) -> Array:
    """Turn inner products into distances, [head, head].

    ``|A - B| / sqrt(|A|^2 + |B|^2)``: 0 for equal matrices, 1 for orthogonal ones, sqrt(2) for
    opposite ones. Unlike an angle it tells apart heads that differ by a factor.
    """
    square = np.diag(products)
    total = square[:, None] + square[None, :]
    apart = np.clip(total - 2 * products, 0, None)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.where(total > 0, np.sqrt(apart / total), 0.0)
    np.fill_diagonal(found, 0.0)
    return found


def folded(weights: Mapping[str, Any], part: str, layer_norm: bool) -> Array:
    """Return one of W_Q, W_K, W_V as it acts on the normalised residual stream.

    The norm's gain scales its rows, its bias and the projection's own make one further row, and a
    LayerNorm, whose output has mean zero before the gain, makes the mean of the rows void.

    Parameters
    ----------
    weights : mapping
        The model's weights by name.
    part : {"Q", "K", "V"}
    layer_norm : bool
        Whether the norm subtracts the mean.

    Returns
    -------
    float64[layer, head or kv_head, d_model + 1, d_head]
    """
    w = np.asarray(weights[f"W_{part}"], dtype=np.float64)
    constant = np.zeros((*w.shape[:2], 1, w.shape[3]))
    if f"b_{part}" in weights:
        constant[:, :, 0] = np.asarray(weights[f"b_{part}"], dtype=np.float64)
    if "ln1_b" in weights:
        bias = np.asarray(weights["ln1_b"], dtype=np.float64)
        constant[:, :, 0] += np.einsum("ld,lhde->lhe", bias, w)
    if "ln1_w" in weights:
        w = w * np.asarray(weights["ln1_w"], dtype=np.float64)[:, None, :, None]
        if layer_norm:
            w = w - w.mean(2, keepdims=True)
    return np.concatenate([w, constant], axis=2)


def query_key_heads(
    weights: Mapping[str, Any],
    facts: Any,
    rotary: Sequence[Rotary],
    offset: int,
    extra: Extra | None = None,
) -> Heads:
    """Return the forms ``W_Q R_offset W_K^T`` of all heads, norms and biases folded in.

    What adds the same to a whole row of scores does nothing: the key's constant row is dropped on
    dimensions that nothing turns, unless a soft cap bends the scores. The layer's factor of the
    scores belongs to the form; so does what ALiBi takes away at the offset, and a sink is the
    score of one further key. QK-norm divides by lengths that depend on the token: its gains are
    folded, and the size of the weights before it, which it takes away, is set to one.

    Parameters
    ----------
    weights : mapping
        Of the layers that are compared.
    facts : ModelFacts
    rotary : sequence of Rotary, one for each of these layers
    offset : int
        Query position minus key position.
    extra : mapping, optional
        ``scales`` [layer], ``slopes`` and ``sinks`` [layer, head] of these layers, where there are
        any. Without ``scales`` all layers have the same.
    """
    left, right = _queries_and_keys(weights, facts)
    if "q_norm_w" in weights and "k_norm_w" in weights:
        left = left * _per_head(weights["q_norm_w"])
        right = right * _per_head(weights["k_norm_w"])
    extra = extra or {}
    if "scales" in extra:
        left = left * np.asarray(extra["scales"])[:, None, None, None]
    for layer, turn in enumerate(rotary):
        if facts.soft_cap is None and not facts.qk_norm:
            moved = {i for pair in turn.pairs for i in pair}
            right[layer, :, -1, [i for i in range(facts.d_head) if i not in moved]] = 0.0
        right[layer] = turn.keys_back(right[layer], offset)
    right = np.swapaxes(np.repeat(right, facts.n_heads // facts.n_kv_heads, axis=1), 2, 3)
    for name, value in (("slopes", -offset), ("sinks", 1.0)):
        if name in extra:
            left, right = _with_constant(left, right, value * np.asarray(extra[name]))
    return Heads(_flat(left), _flat(right))


def normaliser_heads(weights: Mapping[str, Any], facts: Any) -> tuple[Heads, Heads]:
    """Return ``W_Q W_Q^T`` and ``W_K W_K^T``: the lengths that QK-norm divides by."""
    left, right = _queries_and_keys(weights, facts)
    right = np.repeat(right, facts.n_heads // facts.n_kv_heads, axis=1)
    q, k = (Heads(_flat(side), _flat(np.swapaxes(side, 2, 3))) for side in (left, right))
    return q, k


def _queries_and_keys(weights: Mapping[str, Any], facts: Any) -> tuple[Array, Array]:
    layer_norm = facts.norm == "layer"
    q, k = folded(weights, "Q", layer_norm), folded(weights, "K", layer_norm)
    if not facts.qk_norm:
        return q, k
    # A norm over all heads takes away the size of all together.
    over = (2, 3) if np.ndim(weights.get("q_norm_w", 0)) == 2 else (1, 2, 3)
    q, k = (w / np.sqrt((w**2).mean(over, keepdims=True)).clip(1e-30) for w in (q, k))
    return q, k


def _with_constant(left: Array, right: Array, values: Array) -> tuple[Array, Array]:
    """Add to each head's form a column that only the constant row has, [layer, head] values."""
    row = np.zeros((*left.shape[:3], 1))
    row[:, :, -1] = 1.0
    column = np.zeros((*right.shape[:3], 1))
    new = np.zeros((*right.shape[:2], 1, right.shape[3] + 1))
    new[:, :, 0, -1] = values
    wide = np.concatenate([np.concatenate([right, column], 3), new], 2)
    return np.concatenate([left, row], 3), wide


def value_output_heads(weights: Mapping[str, Any], facts: Any) -> Heads:
    """Return the maps ``W_V W_O`` of all heads, norms and biases folded in."""
    left = folded(weights, "V", facts.norm == "layer")
    left = np.repeat(left, facts.n_heads // facts.n_kv_heads, axis=1)
    return Heads(_flat(left), _flat(np.asarray(weights["W_O"], dtype=np.float64)))


def _per_head(gain: Any) -> Array:
    """Shape a gain [layer, d_head] or [layer, head, d_head] for [layer, head, row, d_head]."""
    values: Array = np.asarray(gain, dtype=np.float64)
    return np.expand_dims(values, (1, 2) if values.ndim == 2 else 2)


def _flat(values: Array) -> Array:
    return np.ascontiguousarray(values.reshape(-1, *values.shape[2:]))


def offsets(length: int, moving: bool) -> tuple[int, ...]:
    """Choose the offsets at which forms are compared: powers of two below the length."""
    return tuple(o for o in _OFFSETS if o < max(length, 1)) if moving else (0,)


def head_distances(
    weights: Mapping[str, Any],
    facts: Any,
    rotary: Sequence[Rotary],
    at: Sequence[int],
    extra: Extra | None = None,
) -> dict[str, Array]:
    """Return the distances of all pairs of heads.

    Parameters
    ----------
    weights : mapping
        The model's weights, in float32 or better.
    facts : ModelFacts
    rotary : sequence of Rotary, one for each layer
    at : sequence of int
        Offsets.
    extra : mapping, optional
        See :func:`query_key_heads`.

    Returns
    -------
    dict
        ``qk``: over all offsets together; ``qk_content``: at offset 0 alone, which is what
        comparing W_Q W_K^T gives; ``vo``; ``both``: the root mean square of ``qk`` and ``vo``.
        Each [head, head], layers one after the other. In a model so large that comparing all
        heads would take minutes, heads of different layers are not compared and have NaN.
    """
    layers, heads = facts.n_layers, facts.n_heads
    extra = extra or {}
    if work(facts, len(at)) <= _MOST_WORK:
        return _compared(weights, facts, rotary, at, extra)
    found: dict[str, Array] = {}
    for layer in range(layers):
        one = slice(layer, layer + 1)
        own = {name: np.asarray(weights[name][one]) for name in _USED & {*weights}}
        apart = {name: values[one] for name, values in extra.items()}
        part = _compared(own, facts, rotary[one], at, apart)
        place = slice(layer * heads, (layer + 1) * heads)
        for name, values in part.items():
            whole = found.setdefault(name, np.full((layers * heads,) * 2, np.nan))
            whole[place, place] = values
    return found


#: The weights that distances are made of.
_USED = {
    *(f"{kind}_{part}" for kind in "Wb" for part in "QKV"),
    *("W_O", "ln1_w", "ln1_b", "q_norm_w", "k_norm_w"),
}


def work(facts: Any, forms: int) -> float:
    """Count the multiplications that comparing all heads with all takes."""
    heads = facts.n_layers * facts.n_heads
    return float((forms + 1) * heads * (facts.d_head + heads) * facts.d_model**2)


def _compared(
    weights: Mapping[str, Any],
    facts: Any,
    rotary: Sequence[Rotary],
    at: Sequence[int],
    extra: Extra,
) -> dict[str, Array]:
    total: Array | None = None
    content: Array | None = None
    for offset in at:
        products = gram(query_key_heads(weights, facts, rotary, offset, extra))
        content = products if content is None else content
        total = products if total is None else total + products
    if total is not None and facts.qk_norm:
        for lengths in normaliser_heads(weights, facts):
            total = total + gram(lengths)
    if total is None or content is None:
        raise ValueError("no offset to compare heads at")
    qk = relative_distances(total)
    vo = relative_distances(gram(value_output_heads(weights, facts)))
    return {
        "qk": qk,
        "qk_content": relative_distances(content),
        "vo": vo,
        "both": np.sqrt((qk**2 + vo**2) / 2),
    }


def nearest(distances: Array) -> Array:
    """Return each head's distance to its nearest other, [head]; NaN for a single head."""
    if len(distances) < 2:  # nothing to be near to
        return np.full(len(distances), np.nan)
    apart = np.where(np.eye(len(distances), dtype=bool), np.inf, distances)
    return np.asarray(np.nanmin(apart, axis=1))


def cluster(distances: Array, below: float) -> tuple[Any, Any]:
    """Group heads whose average distance is less than a threshold.

    Parameters
    ----------
    distances : float64[head, head]
    below : float

    Returns
    -------
    int64[head]
        The group's number, from 0 by the first head in it; -1 for a head that is alone.
    int64[head]
        Heads in the order of the tree's leaves, for a map.

    References
    ----------
    Average linkage (UPGMA): Sokal and Michener (1958).
    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage, optimal_leaf_ordering
    from scipy.spatial.distance import squareform

    count = len(distances)
    if count < 2:
        return np.full(count, -1), np.arange(count)
    # Heads that were not compared stand as far apart as strangers do.
    known_apart = np.where(np.isnan(distances), 1.0, distances)
    condensed = squareform((known_apart + known_apart.T) / 2, checks=False)
    tree = linkage(condensed, method="average")
    if count <= 256:
        tree = optimal_leaf_ordering(tree, condensed)
    raw = fcluster(tree, t=below, criterion="distance")
    numbers = np.full(count, -1)
    known: dict[int, int] = {}
    for i, label in enumerate(raw):
        if (raw == label).sum() > 1:
            numbers[i] = known.setdefault(int(label), len(known))
    return numbers, np.asarray(leaves_list(tree))
