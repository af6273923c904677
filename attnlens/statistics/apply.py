"""Statistics of activations that exist already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr

from attnlens.activations import ACTIVATIONS, nearest
from attnlens.attention import Attention
from attnlens.attention.convert import to_tensor
from attnlens.errors import NeedError, UsageError
from attnlens.statistics.base import State, Statistic
from attnlens.statistics.registry import STATISTICS

#: Bytes of one layer that `compute` turns into a tensor at a time.
_CHUNK_BYTES: Final = 64 << 20


def compute(statistic: str | type[Statistic], units: Any, *, lengths: Any = None) -> xr.DataArray:
    """Apply a statistic to activations that are there already.

    Parameters
    ----------
    statistic : str or type of Statistic
        A name in `STATISTICS`, or a class.
    units : DataArray, or iterable of DataArray or of units of a store
        The activation that the statistic is of, with dimensions prompt, layer and those of
        `attnlens.activations.ACTIVATIONS` in any order. Of a unit, ``unit[activation]`` is read,
        or ``unit.attention(layer)`` if there is such a method and the activation is the pattern.
        Nothing larger than a layer is loaded at a time.
    lengths : array of int, [prompt], optional
        Real positions of each prompt of a single DataArray that is padded behind.

    Returns
    -------
    DataArray
        With the dimensions of the statistic; prompt coordinates as given.

    Raises
    ------
    NeedError
        No statistic of that name.
    UsageError
        No units, or an array without the dimensions it needs.
    """
    kind = _find(statistic) if isinstance(statistic, str) else statistic
    if isinstance(units, xr.DataArray):
        units = [units]
    states: list[State] = []
    ids: list[Any] = []
    for unit in units:
        array = unit if isinstance(unit, xr.DataArray) else unit[kind.of]
        attention = None if isinstance(unit, xr.DataArray) else getattr(unit, "attention", None)
        states.append(_one_unit(kind, array, attention, lengths))
        if "prompt" in array.coords:
            ids.append(array.coords["prompt"].values)
    result = kind.finalize(kind.merge(states))
    if "prompt" in result.dims and ids and sum(map(len, ids)) == result.sizes["prompt"]:
        result = result.assign_coords(prompt=np.concatenate(ids))
    return result


def _find(name: str) -> type[Statistic]:
    if name in STATISTICS:
        return STATISTICS[name]
    near = nearest(name, STATISTICS)
    raise NeedError(
        f"There is no statistic called {name!r}.",
        hint=f"Did you mean {near!r}?" if near else f"There are {', '.join(sorted(STATISTICS))}.",
    )


def _one_unit(kind: type[Statistic], array: xr.DataArray, attention: Any, lengths: Any) -> State:
    wanted = ACTIVATIONS[kind.of].dims
    missing = [d for d in wanted if d not in array.dims]
    if missing:
        raise UsageError(
            f"{kind.name} needs {kind.of} with dimensions {wanted}, not {array.dims}.",
            hint=f"Missing: {', '.join(missing)}.",
        )
    array = array.transpose(*wanted)
    head = ACTIVATIONS[kind.of].head_dim
    size = array.sizes
    layers = array.coords["layer"].values if "layer" in array.coords else range(size["layer"])
    square = kind.of in ("pattern", "scores")
    statistic = kind(
        n_prompts=size["prompt"],
        layers=[int(x) for x in layers],
        n_heads=size[head] if head else 1,
        length=size["query_pos"] if square else size["pos"],
        d_head=size.get("d_head", 0),
    )
    real = None if lengths is None else np.asarray(lengths)
    for i, layer in enumerate(statistic.layers):
        if square and attention is not None:
            statistic.update(layer, attention(layer), slice(0, size["prompt"]))
            continue
        for prompts in _chunks(array):
            block = array.isel(layer=i, prompt=prompts).values
            part = None if real is None else real[prompts]
            _feed(statistic, layer, block, prompts, part)
    return statistic.state()


def _feed(
    statistic: Statistic, layer: int, block: npt.NDArray[Any], prompts: slice, lengths: Any
) -> None:
    if statistic.of in ("pattern", "scores"):
        statistic.update(layer, Attention.from_pattern(block, lengths=lengths), prompts)
        return
    value = to_tensor(block)
    if lengths is None:
        statistic.update(layer, value, prompts)
        return
    # One prompt at a time, cut to its length: padding is no token.
    for i, length in enumerate(np.asarray(lengths)):
        at = prompts.start + i
        statistic.update(layer, value[i : i + 1, : int(length)], slice(at, at + 1))


def _chunks(array: xr.DataArray) -> Iterable[slice]:
    n = array.sizes["prompt"]
    each = max(1, array.nbytes // max(1, n * array.sizes["layer"]))
    step = max(1, _CHUNK_BYTES // each)
    return [slice(i, min(n, i + step)) for i in range(0, n, step)]
