"""What happens to one tensor between its hook and the store: cut, check, cast, copy.

Tensors are live when a hook sees them: the model, or a hook of the user's, may still change them
in place. What leaves this module is a copy, and holds no more memory than what was asked for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from attnlens.activations import ACTIVATIONS
from attnlens.errors import CaptureError, NonFiniteError, UnsupportedModelError

if TYPE_CHECKING:
    from attnlens.models import ModelFacts

#: float16 holds magnitudes up to this one.
LARGEST_HALF: Final = 65504.0
#: Below this largest magnitude, float16 would round to steps that are coarse beside the values.
SMALLEST_HALF: Final = 2.0**-12

#: How far softmax(scores) may be from the pattern, by the model's dtype.
_TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2}


_DTYPES: Final = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class DoesNotFitError(Exception):
    """An activation's values do not fit float16; its unit is written again in float32."""

    def __init__(self, name: str, largest: float) -> None:
        super().__init__(f"{name}: {largest:g}")
        self.name = name
        self.largest = largest


def check_shape(name: str, layer: int, value: Tensor, facts: ModelFacts, length: int) -> None:
    """Refuse a tensor whose dimensions are not those of the vocabulary.

    Raises
    ------
    UnsupportedModelError
        As with multi-head latent attention, where some hooks have another order.
    """
    known = {
        "head": facts.n_heads,
        "kv_head": facts.n_kv_heads,
        "pos": length,
        "query_pos": length,
        "key_pos": length,
        "d_model": facts.d_model,
    }
    dims = ("prompt", *ACTIVATIONS[name].dims[2:])
    fits = value.ndim == len(dims) and all(
        known.get(dim, size) == size for dim, size in zip(dims, value.shape, strict=True)
    )
    if not fits:
        raise UnsupportedModelError(
            f"{name} of layer {layer} has the shape {tuple(value.shape)} in {facts.architecture}, "
            f"not {list(dims)} with {length} tokens.",
            hint=f"attnlens cannot capture {name} from this architecture.",
        )


def largest_magnitude(
    name: str,
    layer: int,
    value: Tensor,
    *,
    prompts: Sequence[int],
    heads: Sequence[int] | None = None,
) -> float:
    """Return the largest magnitude, having made sure that every value is finite.

    Parameters
    ----------
    name : str
        The activation.
    layer : int
    value : Tensor
        ``[prompt, ...]`` with the dimensions of the vocabulary.
    prompts : sequence of int
        Ids of the prompts, for the message.
    heads : sequence of int, optional
        Numbers of the heads, where `value` does not hold all of them.

    Raises
    ------
    NonFiniteError
        Names the activation, layer, head, position and prompt of the first offending value.
    """
    low, high = (float(x) for x in torch.aminmax(value))
    if low - low == 0.0 and high - high == 0.0:
        return max(-low, high)
    dims = ("prompt", *ACTIVATIONS[name].dims[2:])
    first = [int(i) for i in torch.nonzero(~torch.isfinite(value))[0]]
    found = float(value[tuple(first)])
    place = dict(zip(dims, first, strict=True))
    place["prompt"] = prompts[place["prompt"]]
    for dim in ("head", "kv_head"):
        if dim in place and heads is not None:
            place[dim] = heads[place[dim]]
    # Which component of a vector it was tells nobody anything.
    shown = [f"{dim} {place[dim]}" for dim in dims if dim not in ("d_head", "d_model", "prompt")]
    raise NonFiniteError(
        f"{name} is not finite: {found} at layer {layer}, {', '.join(shown)} of prompt "
        f"{place['prompt']}.",
        hint="If the model runs in float16, try bfloat16 or float32 (--dtype float32); otherwise "
        "look at its weights, and at hooks that were added to it.",
    )


def cut(
    name: str,
    value: Tensor,
    *,
    heads: Sequence[int] | None,
    positions: Sequence[int] | None,
) -> Tensor:
    """Return the chosen heads and positions (a view where everything was chosen)."""
    for wanted, of in ((heads, ("head", "kv_head")), (positions, ("pos", "query_pos"))):
        if wanted is None:
            continue
        for axis, dim in enumerate(ACTIVATIONS[name].dims[1:]):
            # dims[1:] has the layer where the tensor has the prompt.
            if dim in of:
                length = value.shape[axis]
                index = torch.tensor([i % length for i in wanted], device=value.device)
                value = value.index_select(axis, index)
    return value


def check_fit(name: str, dtype: str, largest: float) -> None:
    """Make sure that float16 can hold the values, where they are to be stored so.

    Raises
    ------
    DoesNotFitError
        If they would overflow, or lose their precision.
    """
    if dtype != "float16" or ACTIVATIONS[name].dims[-1] == "key_pos":
        return
    if largest != 0.0 and not SMALLEST_HALF <= largest <= LARGEST_HALF:
        raise DoesNotFitError(name, largest)


class Buffers:
    """Copies of tensors, in memory that is used again.

    A copy that is made and freed for each tensor would leave holes between the model's own
    tensors, and the process would grow by far more than what is waiting to be written.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.Size, torch.dtype, torch.device], deque[Tensor]]
        self._free = defaultdict(deque)

    def copy(self, value: Tensor, dtype: str) -> Tensor:
        """Return a contiguous copy in the dtype of the store, still on the model's device."""
        key = (value.shape, _DTYPES[dtype], value.device)
        try:
            kept = self._free[key].pop()
        except IndexError:
            kept = torch.empty(value.shape, dtype=_DTYPES[dtype], device=value.device)
        return kept.copy_(value)

    def release(self, kept: Tensor) -> None:
        """Give a copy back, from whichever thread is done with it."""
        self._free[kept.shape, kept.dtype, kept.device].append(kept)


def check_softmax(layer: int, scores: Tensor, pattern: Tensor, dtype: torch.dtype) -> None:
    """Make sure that the pattern is the softmax of the scores.

    Rows are scaled to a sum of 1 first: a model with attention sinks drops a column.

    Parameters
    ----------
    layer : int
    scores, pattern : Tensor
        ``[prompt, head, query_pos, key_pos]``, masked cells of the scores at the documented number.
    dtype : torch.dtype
        The model's.

    Raises
    ------
    CaptureError
        If the two do not belong together.
    """
    weights = pattern.to(torch.float32)
    weights = weights / weights.sum(-1, keepdim=True)
    off = float((scores.softmax(-1) - weights).abs().max())
    if not off <= _TOLERANCE.get(dtype, 4e-2):
        raise CaptureError(
            f"The scores of layer {layer} are not what its pattern is the softmax of: they are "
            f"off by up to {off:.2g}.",
            hint="This architecture's hook_attn_scores means something else. Capture the pattern "
            "alone, or q_rot and k_rot.",
        )
