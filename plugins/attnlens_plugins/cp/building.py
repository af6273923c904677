"""From a store to the compressed tensor that the options ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import attnlens
from attnlens_plugins.cp.options import CPOptions
from attnlens_plugins.cp.sample import Sample, blocks, choose
from attnlens_plugins.cp.tensors import BLOCK, Compressed, Floats, grid, head_outputs, whole

#: What must be captured for each tensor.
REQUIRED: dict[str, tuple[str, ...]] = {
    "result": ("result",),
    "z": ("z",),
    "second_moment": ("z", "weights"),
    "pattern": ("pattern",),
    "qk": ("weights",),
    "ov": ("weights",),
}

#: Less weight than this beside the first key is rounding, not attention.
_LEFT = 1e-3


def sample_of(store: Any, options: CPOptions, seed: int) -> Sample | None:
    """Choose the tokens to decompose; None for tensors that have none."""
    if options.tensor in ("qk", "ov", "pattern"):
        return None
    name = "result" if options.tensor == "result" else "z"
    return choose(
        store, name, most=options.max_tokens, seed=seed, exclude_first=options.exclude_bos
    )


def build(
    store: Any,
    options: CPOptions,
    sample: Sample | None,
    *,
    max_rank: int,
    seed: int,
    keep: bool | None = None,
) -> Compressed:
    """Build the tensor of a model or of a twin.

    Parameters
    ----------
    store : View or Store
    options : CPOptions
    sample : Sample or None
        Of :func:`sample_of`; the same for the model and its twins.
    max_rank : int
        Largest rank that will be fitted.
    seed : int
    keep : bool, optional
        Leave tensors other than ``result`` and ``z`` uncompressed; by default where non-negative
        factors are asked for, which are found in the tensor's own space.
    """
    keep = options.constrained if keep is None else keep
    if options.tensor in ("result", "z"):
        assert sample is not None
        return head_outputs(
            store,
            options.tensor,
            sample,
            pooled=options.tokens == "pooled",
            scaled=options.scaled,
            center=options.center,
            max_rank=max_rank,
            seed=seed,
        )
    if options.tensor == "pattern":
        return _patterns(store, options, max_rank=max_rank, seed=seed, keep=keep)
    if options.tensor == "second_moment":
        assert sample is not None
        return _second_moments(store, options, sample, max_rank=max_rank, seed=seed, keep=keep)
    return _circuits(store, options, max_rank=max_rank, keep=keep)


def _patterns(
    store: Any, options: CPOptions, *, max_rank: int, seed: int, keep: bool
) -> Compressed:
    """Mean attention over prompts, and over the halves of each split."""
    lengths = np.asarray(store.lengths.values)
    length = min(int(lengths.max()), options.max_positions)
    first = 1 if options.exclude_bos and length > 2 else 0
    n = length - first
    in_half = _halves_of(store, options, seed)
    data = next(iter(store.units()))["pattern"]
    layers, heads = data["layer"].values, data["head"].values
    rows = len(layers) * len(heads)
    sums = np.zeros((1 + 2 * len(in_half), rows, n, n), dtype=np.float32)
    counts = np.zeros((len(sums), n, 1))
    for prompts, values in _pattern_blocks(store, length):
        part = values[..., first:, first:]
        if first:
            mass = part.sum(-1, keepdims=True)
            part = np.where(mass > _LEFT, part / np.maximum(mass, _LEFT), 0.0)
        size = part.shape[-1]
        for k, chosen in enumerate([None, *(h for pair in in_half for h in pair)]):
            taken = np.ones(len(prompts), bool) if chosen is None else np.isin(prompts, chosen)
            total = part[taken].sum(0).reshape(rows, size, size)
            sums[k, :, :size, :size] += total
            counts[k, :size] += taken.sum()
    means = sums / np.maximum(counts, 1)[:, None]

    def halves(i: int) -> tuple[Floats, Floats]:
        return means[1 + 2 * i].astype(np.float64), means[2 + 2 * i].astype(np.float64)

    return whole(
        means[0],
        ("head", "query_pos", "key_pos"),
        grid(layers, heads),
        max_rank=max_rank,
        scaled=options.scaled,
        keep=keep,
        halves=halves if in_half else None,
    )


def _pattern_blocks(store: Any, length: int) -> Iterator[tuple[Any, Any]]:
    for unit in store.units():
        data = unit["pattern"]
        size = data.sizes
        if size["query_pos"] != size["key_pos"]:
            raise attnlens.errors.DecompositionError(
                "Only some query positions were captured; cp needs whole patterns.",
                hint="Capture without --positions.",
            )
        cut = min(length, size["key_pos"])
        step = max(BLOCK // max(size["layer"] * size["head"] * size["key_pos"] ** 2, 1), 1)
        for start in range(0, size["prompt"], step):
            part = data.isel(
                prompt=slice(start, start + step), query_pos=slice(0, cut), key_pos=slice(0, cut)
            )
            yield (
                np.asarray(unit.prompt_ids[start : start + step]),
                part.transpose("prompt", "layer", "head", "query_pos", "key_pos").values,
            )


def _halves_of(store: Any, options: CPOptions, seed: int) -> list[tuple[Any, Any]]:
    """Draw the halves of the prompts for each split; none where there are too few."""
    prompts = np.asarray(store.lengths["prompt"].values)
    if len(prompts) < 4:
        return []
    found = []
    for i in range(options.n_splits):
        order = np.random.default_rng([seed, 2, i]).permutation(prompts)
        found.append((order[: len(order) // 2], order[len(order) // 2 :]))
    return found


def _second_moments(
    store: Any, options: CPOptions, sample: Sample, *, max_rank: int, seed: int, keep: bool
) -> Compressed:
    """Second moment of ``result``, summed where it is small: W_O^T (z^T z) W_O."""
    data = next(iter(store.units()))["z"]
    layers, heads = data["layer"].values, data["head"].values
    w_o = np.asarray(store.weights["W_O"].values)[np.ix_(layers, heads)]
    w_o = w_o.reshape(-1, *w_o.shape[2:])
    prompts = sample.prompts
    in_half = _halves_of(store, options, seed) if len(prompts) >= 4 else []
    moments = np.zeros((1 + 2 * len(in_half), len(w_o), w_o.shape[1], w_o.shape[1]))
    counts = np.zeros(len(moments))
    at = 0
    for block in blocks(store, "z", sample, BLOCK):
        which = sample.prompt[at : at + block.shape[1]]
        at += block.shape[1]
        for k, chosen in enumerate([None, *(h for pair in in_half for h in pair)]):
            part = block if chosen is None else block[:, np.isin(which, chosen)]
            moments[k] += np.matmul(np.swapaxes(part, 1, 2), part, dtype=np.float64)
            counts[k] += part.shape[1]

    def moment(k: int) -> Floats:
        small = moments[k] / max(counts[k], 1)
        return np.asarray(np.swapaxes(w_o, 1, 2) @ small.astype(w_o.dtype) @ w_o)

    return whole(
        moment(0),
        ("head", "d_model", "d_model_2"),
        grid(layers, heads),
        max_rank=max_rank,
        scaled=options.scaled,
        keep=keep,
        halves=(lambda i: (moment(1 + 2 * i), moment(2 + 2 * i))) if in_half else None,
    )


def _circuits(store: Any, options: CPOptions, *, max_rank: int, keep: bool) -> Compressed:
    """W_Q W_K^T or W_V W_O of every head, with the gain of the norm before attention."""
    weights = store.weights
    left, right = ("W_Q", "W_K") if options.tensor == "qk" else ("W_V", "W_O")
    absent = [w for w in (left, right) if w not in weights]
    if absent:
        raise attnlens.errors.NeedError(
            f"The model has no {' and no '.join(absent)}.", hint="Choose another tensor."
        )
    a, b = np.asarray(weights[left].values), np.asarray(weights[right].values)
    n_heads = max(a.shape[1], b.shape[1])
    a, b = _for_each_head(a, n_heads), _for_each_head(b, n_heads)
    if "ln1_w" in weights:
        gain = np.asarray(weights["ln1_w"].values)[:, None, :, None]
        a = a * gain
        b = b * gain if options.tensor == "qk" else b
    product = a @ (np.swapaxes(b, -1, -2) if options.tensor == "qk" else b)
    dims = ("query_d_model", "key_d_model") if options.tensor == "qk" else ("d_model_in", "d_model")
    return whole(
        product.reshape(-1, *product.shape[2:]),
        ("head", *dims),
        grid(range(a.shape[0]), range(n_heads)),
        max_rank=max_rank,
        scaled=options.scaled,
        keep=keep,
        halves=None,
        compared=(1, 2),
        split="head",
    )


def _for_each_head(matrix: Any, n_heads: int) -> Any:
    """Give each query head its key-value head: h reads h // group."""
    return np.repeat(matrix, n_heads // matrix.shape[1], axis=1)


def warnings_for(options: CPOptions) -> list[str]:
    """List what a reader should know about the choice of tensor."""
    notes = []
    if options.tensor == "z":
        notes.append(
            "z was decomposed across heads although the basis of each head's d_head space is "
            "arbitrary: (W_V N, N^-1 W_O) is the same model with other components. Read nothing "
            "into shared directions; tensor=result has none of this."
        )
    if options.layers == "joint":
        notes.append(
            "Head numbers are a mode of their own here, although head 3 of one layer has nothing "
            "to do with head 3 of the next."
        )
    return notes
