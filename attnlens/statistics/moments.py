"""First and second moments of a head's vectors, per token and uncentred."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from attnlens.activations import ACTIVATIONS
from attnlens.statistics.base import State, Statistic, check_layers, label, ratio, to_numpy


class _Moment(Statistic):
    """Sums over tokens of a head's vectors."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        shape = (len(self.layers), self.n_heads, *self._widths())
        self._sums = np.zeros(shape)
        self._counts = np.zeros(len(self.layers))

    @abc.abstractmethod
    def _widths(self) -> tuple[int, ...]: ...

    @staticmethod
    @abc.abstractmethod
    def _total(value: Tensor) -> Tensor:
        """Return the sum over tokens, value [head, token, d_head] in float64."""

    def update(self, layer: int, value: Any, prompts: slice) -> None:
        """Take in one layer of some prompts."""
        batch, pos, heads, width = value.shape
        value = value.detach()
        if value.device.type == "mps":  # which has no float64
            value = value.cpu()
        wide = value.to(torch.float64).permute(2, 0, 1, 3).reshape(heads, -1, width)
        row = self._row[layer]
        self._sums[row] += to_numpy(self._total(wide))
        self._counts[row] += batch * pos

    def state(self) -> State:
        """Return the unit's partial sums."""
        return {"sums": self._sums, "counts": self._counts, "layer": self._layers()}

    @classmethod
    def merge(cls, states: Sequence[State]) -> State:
        """Join the states of several units."""
        layers = check_layers(states)
        sums = np.sum([s["sums"] for s in states], axis=0)
        counts = np.sum([s["counts"] for s in states], axis=0)
        return {"sums": sums, "counts": counts, "layer": layers}

    @classmethod
    def finalize(cls, state: State) -> xr.DataArray:
        """Return the statistic with dimensions `dims`, float64."""
        sums = state["sums"]
        counts = state["counts"].reshape(-1, *(1,) * (sums.ndim - 1))
        return label(ratio(sums, counts), cls.dims, cls.name, state["layer"])


class _Mean(_Moment):
    """Mean vector of a head, per token."""

    def _widths(self) -> tuple[int, ...]:
        return (self.d_head,)

    @staticmethod
    def _total(value: Tensor) -> Tensor:
        return value.sum(1)


class _SecondMoment(_Moment):
    """Uncentred second moment of a head's vectors, per token."""

    def _widths(self) -> tuple[int, ...]:
        return (self.d_head, self.d_head)

    @staticmethod
    def _total(value: Tensor) -> Tensor:
        return value.mT @ value


def _moment(base: type[_Moment], of: str, kind: str, *more: str) -> type[Statistic]:
    """Make the moment of one activation: the same sums under another name."""
    head = ACTIVATIONS[of].head_dim
    assert head is not None
    body = {
        "name": f"{of}.{kind}",
        "of": of,
        "dims": ("layer", head, "d_head", *more),
        "__doc__": f"{base.__doc__} Of {of}.",
    }
    return type(f"{of.upper()}{base.__name__}", (base,), body)


#: Both moments of every vector activation.
MOMENTS: Final[tuple[type[Statistic], ...]] = tuple(
    _moment(base, of, kind, *more)
    for base, kind, more in ((_Mean, "mean", ()), (_SecondMoment, "second_moment", ("d_head_2",)))
    for of in ("q", "k", "v", "z")
)
