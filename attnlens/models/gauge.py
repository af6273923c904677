"""Per-head weights of a live model: read exactly, and replaced for a while.

What acts is changed, not a copy: the projections that the hooked model calls. Hugging Face keeps
them in several layouts (one matrix a projection, the transpose of it, or all three fused, which
the bridge splits), so every change is read back through the bridge before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from attnlens.errors import UnsupportedModelError, UsageError
from attnlens.models.facts import ModelFacts
from attnlens.models.weights import unwrapped

#: One layer's attention weights by name.
Weights = dict[str, NDArray[np.float64]]

#: Name of a weight -> the projection that holds it, and the parameter there.
_PARTS: Final = {
    f"{kind}_{part}": (part.lower(), parameter)
    for part in "QKVO"
    for kind, parameter in (("W", "weight"), ("b", "bias"))
}

#: The names of a layer's attention weights that can be replaced.
REPLACEABLE: Final = tuple(_PARTS)


def head_weights(
    bridge: Any, facts: ModelFacts, layer: int, names: Sequence[str] | None = None
) -> Weights:
    """Return one layer's attention weights as they act, exactly.

    Parameters
    ----------
    bridge : TransformerBridge
    facts : ModelFacts
    layer : int
    names : sequence of str, optional
        These alone; all that there are by default.

    Returns
    -------
    dict of str to float64 array
        ``W_Q`` [head, d_model, d_head], ``W_K``, ``W_V`` [kv_head, d_model, d_head], ``W_O``
        [head, d_head, d_model], ``b_Q`` [head, d_head], ``b_K``, ``b_V`` [kv_head, d_head],
        ``b_O`` [d_model]: those that the layer has.

    Raises
    ------
    UnsupportedModelError
        If the layer's projections cannot be had one by one.
    """
    found: Weights = {}
    for name in _PARTS if names is None else names:
        place = _Place.find(bridge, facts, layer, name)
        if place is not None:
            found[name] = place.read().cpu().numpy()
    needed = ("W_Q", "W_K", "W_V", "W_O") if names is None else names
    lacking = [name for name in needed if name not in found]
    if lacking:
        raise UnsupportedModelError(
            f"layer {layer} of {facts.name!r} ({facts.architecture}) has no {', '.join(lacking)} "
            "of its heads"
        )
    return found


@contextmanager
def replaced_weights(
    bridge: Any, facts: ModelFacts, values: Mapping[tuple[str, int], ArrayLike]
) -> Iterator[None]:
    """Let the model run with other attention weights inside a with block.

    The old ones return bit for bit, also after an error.

    Parameters
    ----------
    bridge : TransformerBridge
    facts : ModelFacts
    values : mapping from (name, layer) to array
        In the layout of `head_weights`; rounded to the model's dtype.

    Raises
    ------
    UsageError
        If a weight is not there or a shape does not fit.
    UnsupportedModelError
        If the model does not take them.
    """
    places: list[tuple[_Place, Tensor]] = []
    for (name, layer), value in values.items():
        place = _Place.find(bridge, facts, layer, name)
        if place is None:
            raise UsageError(
                f"layer {layer} of {facts.name!r} has no {name!r} that can be replaced",
                hint=f"It may have {', '.join(REPLACEABLE)}.",
            )
        places.append((place, place.fitted(value)))
    saved = [(place.parameter, place.parameter.detach().clone()) for place, _ in places]
    try:
        with torch.no_grad():
            for place, value in places:
                place.write(value)
        yield
    finally:
        with torch.no_grad():
            for parameter, old in saved:
                parameter.data.copy_(old)


class _Place:
    """Where one weight of one layer lies."""

    def __init__(
        self, attention: Any, name: str, layer: int, parameter: Tensor, shape: tuple[int, ...],
        transposed: bool,
    ) -> None:  # fmt: skip
        self.attention = attention
        self.name = name
        self.layer = layer
        self.parameter = parameter
        self.shape = shape
        self.transposed = transposed

    @classmethod
    def find(cls, bridge: Any, facts: ModelFacts, layer: int, name: str) -> _Place | None:
        if name not in _PARTS:
            return None
        part, what = _PARTS[name]
        attention = getattr(bridge.blocks[layer], "attn", None)
        module = unwrapped(getattr(attention, part, None))
        parameter = getattr(module, what, None)
        if not isinstance(parameter, Tensor) or parameter.is_meta:
            return None
        heads = facts.n_heads if part in "qo" else facts.n_kv_heads
        d, d_head = facts.d_model, facts.d_head
        if what == "bias":
            shape: tuple[int, ...] = (d,) if part == "o" else (heads, d_head)
        else:
            shape = (heads, d_head, d) if part == "o" else (heads, d, d_head)
        if parameter.numel() != int(np.prod(shape)) or not parameter.is_floating_point():
            return None
        # Linear keeps [out, in]; GPT-2's Conv1D [in, out].
        conv = type(module).__name__ == "Conv1D"
        return cls(attention, name, layer, parameter, shape, transposed=not conv)

    def read(self) -> Tensor:
        value = self.parameter.detach().to(torch.float64)
        if self.name.startswith("b"):
            return value.reshape(self.shape)
        matrix = value.T if self.transposed else value  # [in, out]
        heads = self.shape[0]
        if self.name == "W_O":
            return matrix.reshape(self.shape).contiguous()
        return matrix.reshape(matrix.shape[0], heads, -1).transpose(0, 1).contiguous()

    def fitted(self, value: ArrayLike) -> Tensor:
        given = torch.as_tensor(np.asarray(value, dtype=np.float64))
        if tuple(given.shape) != self.shape:
            raise UsageError(
                f"{self.name} of layer {self.layer} has shape {list(self.shape)}, not "
                f"{list(given.shape)}"
            )
        return given.to(self.parameter.dtype).to(self.parameter.device)

    def write(self, value: Tensor) -> None:
        flat = value
        if self.name.startswith("W"):
            if self.name == "W_O":
                flat = value.reshape(-1, value.shape[-1])
            else:
                flat = value.transpose(0, 1).reshape(value.shape[1], -1)
            flat = flat.T if self.transposed else flat
        self.parameter.data.copy_(flat.reshape(self.parameter.shape))
        seen = getattr(self.attention, self.name, None)
        if (
            not isinstance(seen, Tensor)
            or seen.numel() != value.numel()
            or not torch.equal(seen.detach().reshape(self.shape), value)
        ):
            raise UnsupportedModelError(
                f"{self.name} of layer {self.layer} cannot be replaced: the model does not read it "
                "where it is written",
                hint="Weights that were folded (compatibility mode) or packed cannot be changed.",
            )
