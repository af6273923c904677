"""Statistics of attention, written against the `Attention` handle."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from attnlens.attention import Attention
from attnlens.statistics.base import (
    State,
    Statistic,
    check_layers,
    label,
    ratio,
    to_numpy,
)


class _RowMean(Statistic):
    """Mean of a quantity over each prompt's query rows."""

    of = "pattern"
    dims = ("prompt", "layer", "head")

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._values = np.full((self.n_prompts, len(self.layers), self.n_heads), np.nan)

    @staticmethod
    @abc.abstractmethod
    def _rows(attention: Attention) -> Tensor:
        """Return the quantity per row, [prompt, head, query_pos]."""

    @staticmethod
    def _counted(attention: Attention) -> Tensor:
        """Return the rows that count, broadcasting against `_rows`: those that see a key."""
        return attention.visible() > 0

    def update(self, layer: int, value: Any, prompts: slice) -> None:
        """Take in one layer of some prompts."""
        rows = self._rows(value).cpu().double()
        counted = self._counted(value).cpu().expand_as(rows)
        total = torch.where(counted, rows, 0.0).sum(-1)
        self._values[prompts, self._row[layer]] = ratio(to_numpy(total), to_numpy(counted.sum(-1)))

    def state(self) -> State:
        """Return the unit's partial sums."""
        return {"values": self._values, "layer": self._layers()}

    @classmethod
    def merge(cls, states: Sequence[State]) -> State:
        """Join the states of several units."""
        layers = check_layers(states)
        return {"values": np.concatenate([s["values"] for s in states]), "layer": layers}

    @classmethod
    def finalize(cls, state: State) -> xr.DataArray:
        """Return the statistic with dimensions `dims`, float64."""
        return label(state["values"], cls.dims, cls.name, state["layer"])


class PatternEntropy(_RowMean):
    """Shannon entropy of attention, mean over query rows, in nats."""

    name = "pattern.entropy"

    @staticmethod
    def _rows(attention: Attention) -> Tensor:
        return attention.entropy()


class PatternEntropyShare(_RowMean):
    """Each row's entropy over ln(visible keys), mean over the rows that see two keys or more."""

    name = "pattern.entropy_share"

    @staticmethod
    def _rows(attention: Attention) -> Tensor:
        return attention.entropy_share()

    @staticmethod
    def _counted(attention: Attention) -> Tensor:
        return attention.visible() > 1


class PatternMax(_RowMean):
    """Largest weight of each row, mean over query rows."""

    name = "pattern.max"

    @staticmethod
    def _rows(attention: Attention) -> Tensor:
        return attention.max()


class _Profile(Statistic):
    """Sums and counts along one axis of positions, over all prompts."""

    of = "pattern"
    #: Whether shorter units are padded on both sides (offsets) or behind (keys).
    centred: ClassVar[bool]

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        width = 2 * self.length - 1 if self.centred else self.length
        self._sums = np.zeros((len(self.layers), self.n_heads, width))
        self._counts = np.zeros((len(self.layers), width))

    @staticmethod
    @abc.abstractmethod
    def _profile(attention: Attention) -> tuple[Tensor, Tensor]:
        """Return sums [prompt, head, x] and counts [x] or [prompt, 1, x]."""

    def update(self, layer: int, value: Any, prompts: slice) -> None:
        """Take in one layer of some prompts."""
        sums, counts = self._profile(value)
        row, width = self._row[layer], sums.shape[-1]
        # Causal attention gives offsets from 0 on: the last ones of the two-sided profile.
        part = slice(self._sums.shape[-1] - width, None)
        self._sums[row, :, part] += to_numpy(sums.sum(0))
        shared = counts.ndim == 1
        total = counts * sums.shape[0] if shared else counts.sum((0, 1))
        self._counts[row, part] += to_numpy(total)

    def state(self) -> State:
        """Return the unit's partial sums."""
        return {"sums": self._sums, "counts": self._counts, "layer": self._layers()}

    @classmethod
    def merge(cls, states: Sequence[State]) -> State:
        """Join the states of several units."""
        layers = check_layers(states)
        width = max(s["counts"].shape[-1] for s in states)
        out: State = {"layer": layers}
        for key in ("sums", "counts"):
            total = np.zeros((*states[0][key].shape[:-1], width))
            for state in states:
                size = state[key].shape[-1]
                start = (width - size) // 2 if cls.centred else 0
                total[..., start : start + size] += state[key]
            out[key] = total
        return out


class PatternReceived(_Profile):
    """Mean weight that a key gets from the queries that can see it."""

    name = "pattern.received"
    dims = ("layer", "head", "key_pos")
    centred = False

    @staticmethod
    def _profile(attention: Attention) -> tuple[Tensor, Tensor]:
        return attention.received_sums()

    @classmethod
    def finalize(cls, state: State) -> xr.DataArray:
        """Return the statistic with dimensions `dims`, float64."""
        values = ratio(state["sums"], state["counts"][:, None])
        return label(values, cls.dims, cls.name, state["layer"])


class PatternByOffset(_Profile):
    """Mean weight at distance query - key, over the rows that have a key at that distance.

    Negative distances (later keys) appear only where some layer can see later keys.
    """

    name = "pattern.by_offset"
    dims = ("layer", "head", "offset")
    centred = True

    @staticmethod
    def _profile(attention: Attention) -> tuple[Tensor, Tensor]:
        return attention.by_offset()

    @classmethod
    def finalize(cls, state: State) -> xr.DataArray:
        """Return the statistic with dimensions `dims`, float64."""
        values = ratio(state["sums"], state["counts"][:, None])
        last = (values.shape[-1] - 1) // 2
        offsets = np.arange(-last, last + 1)
        if not state["counts"][:, :last].any():
            values, offsets = values[..., last:], offsets[last:]
        return label(values, cls.dims, cls.name, state["layer"]).assign_coords(offset=offsets)
