"""The interface of a statistic, and what its subclasses share."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from attnlens.errors import UsageError

Array = npt.NDArray[np.float64]
State = dict[str, Array]


class Statistic(abc.ABC):
    """Base of all statistics; one instance accumulates one unit.

    Parameters
    ----------
    n_prompts : int
        Prompts of the unit.
    layers : sequence of int
        The layers that will be seen, in the order of the result.
    n_heads : int
        Heads of the activation (of k and v: key-value heads).
    length : int
        Positions of the unit.
    d_head : int
        Width of a head.
    """

    name: ClassVar[str]
    of: ClassVar[str]
    dims: ClassVar[tuple[str, ...]]

    def __init__(
        self, *, n_prompts: int, layers: Sequence[int], n_heads: int, length: int, d_head: int
    ) -> None:
        self.n_prompts = n_prompts
        self.layers = tuple(layers)
        self.n_heads = n_heads
        self.length = length
        self.d_head = d_head
        self._row = {layer: i for i, layer in enumerate(self.layers)}

    @abc.abstractmethod
    def update(self, layer: int, value: Any, prompts: slice) -> None:
        """Take in one layer of some prompts.

        Parameters
        ----------
        layer : int
        value : Attention or Tensor
            For a statistic of ``pattern`` an `Attention` over [batch, head, query_pos, key_pos],
            else a tensor [batch, pos, head, d_head].
        prompts : slice
            Which prompts of the unit these are.
        """

    @abc.abstractmethod
    def state(self) -> State:
        """Return the unit's partial sums: float64 arrays that `merge` can join."""

    @classmethod
    @abc.abstractmethod
    def merge(cls, states: Sequence[State]) -> State:
        """Join the states of several units, in the order of their prompts; associative."""

    @classmethod
    @abc.abstractmethod
    def finalize(cls, state: State) -> xr.DataArray:
        """Return the statistic with dimensions `dims`, float64."""

    def _layers(self) -> Array:
        return np.asarray(self.layers, dtype=np.float64)


def label(values: Array, dims: tuple[str, ...], name: str, layers: Array) -> xr.DataArray:
    """Return values with named dimensions and their coordinates."""
    coords: dict[str, Any] = {"layer": layers.astype(np.int64)}
    for dim, size in zip(dims, values.shape, strict=True):
        if dim not in ("layer", "prompt", "offset"):
            coords[dim] = np.arange(size)
    return xr.DataArray(values, dims=dims, coords=coords, name=name)


def check_layers(states: Sequence[State]) -> Array:
    """Return the layers that all states share."""
    if not states:
        raise UsageError("There are no units to merge.")
    first = states[0]["layer"]
    for state in states[1:]:
        if not np.array_equal(first, state["layer"]):
            raise UsageError(
                f"Units of different layers cannot be merged: {first.astype(int).tolist()} "
                f"and {state['layer'].astype(int).tolist()}."
            )
    return first


def to_numpy(value: Tensor) -> Array:
    """Return a tensor as float64 on the host."""
    return np.asarray(value.detach().to("cpu", torch.float64).numpy(), dtype=np.float64)


def ratio(sums: Array, counts: Array) -> Array:
    """Divide where there is something to divide by; NaN elsewhere."""
    out = np.full(np.broadcast_shapes(sums.shape, counts.shape), np.nan)
    np.divide(sums, counts, out=out, where=counts > 0)
    return out
