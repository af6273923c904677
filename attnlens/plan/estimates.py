"""How many bytes a capture takes, on the disk and in memory, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from attnlens.activations import ACTIVATIONS

if TYPE_CHECKING:
    from attnlens.models import ModelFacts
    from attnlens.plan.storeplan import StorePlan

#: How an activation can be stored (neither numpy nor zarr has bfloat16).
STORED_DTYPES: Final = ("float16", "float32", "float64")
#: A batch is chosen so that one forward pass needs about this much above the weights.
FORWARD_BYTES: Final = {"cpu": 2**30, "cuda": 2**32}
#: Largest batch that is chosen without being asked for.
LARGEST_BATCH: Final = 32
#: How many tensors, each one layer of one batch, wait for the writer at most.
WAITING: Final = 3

_ITEM: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
#: Copies of [head, query_pos, key_pos] alive at once in eager attention: scores, masked scores,
#: softmax in float32, and its cast.
_SQUARES: Final = 4
#: Rows of a matrix alive at once in lean attention.
_BLOCK: Final = 128
#: Copies of [head, pos, d_head] alive at once there and in statistics of attention.
_VECTORS: Final = 6
#: Copies of [pos, d_model] alive at once, the MLP's four-fold width included.
_ROWS: Final = 16


def layer_bytes(name: str, dtype: str, shape: Mapping[str, int], *, rows: int, length: int) -> int:
    """Return the raw bytes of one activation in one layer of one prompt.

    Parameters
    ----------
    name : str
        The activation.
    dtype : str
    shape : mapping from str to int
        Sizes of ``head``, ``kv_head``, ``d_head`` and ``d_model``.
    rows : int
        Chosen positions.
    length : int
        Tokens of the prompt.
    """
    sizes = {**shape, "pos": rows, "query_pos": rows, "key_pos": length}
    return _ITEM[dtype] * math.prod(sizes[dim] for dim in ACTIVATIONS[name].dims[2:])


def forward_bytes(facts: ModelFacts, length: int, *, lean: bool = False) -> int:
    """Estimate what one prompt holds at the peak of a forward pass.

    Parameters
    ----------
    facts : ModelFacts
    length : int
    lean : bool, optional
        Without attention matrices: with blocks of their rows, and copies of queries and keys.
    """
    item = _ITEM.get(facts.dtype, 4)
    if lean:
        square = facts.n_heads * length * (_BLOCK + _VECTORS * facts.d_head) * 8
    else:
        square = _SQUARES * facts.n_heads * length * length * 4
    return square + _ROWS * length * facts.d_model * item


def default_batch_size(facts: ModelFacts, length: int, *, lean: bool = False) -> int:
    """Choose a power of two, from the facts alone: never from what happens to be free.

    A capture that is resumed, perhaps on a busier day, must come to the same batches.
    """
    budget = FORWARD_BYTES["cuda" if facts.device.startswith("cuda") else "cpu"]
    fits = min(budget // max(forward_bytes(facts, length, lean=lean), 1), LARGEST_BATCH)
    return 1 << max(fits.bit_length() - 1, 0)


def working_bytes(facts: ModelFacts, store: StorePlan) -> int:
    """Estimate the memory above the weights: a forward pass, the writer's queue, statistics."""
    if not (store.activations or store.statistics):
        return 0
    batch = min(store.batch_size, max(len(u.prompts) for u in store.units))
    tokens = sum(u.length * len(u.prompts) for u in store.units)
    n_layers = facts.n_layers if store.layers is None else len(store.layers)
    per_token = max((store.sizes[n] for n in store.activations), default=0) / tokens / n_layers
    waiting = math.ceil((WAITING + 2) * batch * store.longest * per_token)
    per_head = store.longest + facts.d_head**2
    statistics = len(store.statistics) * n_layers * facts.n_heads * per_head * 16
    forward = forward_bytes(facts, store.longest, lean=store.lean)
    return batch * forward + waiting + statistics


def peak_bytes(facts: ModelFacts, stores: Sequence[StorePlan], *, twins: bool) -> int:
    """Estimate the memory at its peak: the weights, a twin's beside them, and one store's work."""
    return facts.size * (2 if twins else 1) + max(working_bytes(facts, s) for s in stores)


def disk_bytes(facts: ModelFacts, store: StorePlan) -> int:
    """Estimate the most that a store takes on the disk."""
    whole = store.positions is None
    return sum(on_disk(name, size, facts, whole=whole) for name, size in store.sizes.items())


def on_disk(name: str, size: int, facts: ModelFacts, *, whole: bool) -> int:
    """Estimate the most that `size` raw bytes of an activation take on the disk.

    Parameters
    ----------
    name : str
    size : int
    facts : ModelFacts
    whole : bool
        Whether all positions are there.
    """
    # Masked cells of a causal pattern are a run of equal values, which costs nothing.
    half = facts.causal and whole and name in ("pattern", "scores")
    return size // 2 if half else size
