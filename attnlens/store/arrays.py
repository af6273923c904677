"""Arrays of other tools, made into plain numpy with known dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from attnlens.activations import ACTIVATIONS
from attnlens.errors import UsageError


@dataclass
class Named:
    """One activation over all its dimensions.

    Attributes
    ----------
    value : ndarray
        A copy, at least float32.
    given : numpy.dtype
        What it was before.
    layers, heads : list of int or None
        Labels, where it had some.
    """

    value: npt.NDArray[Any]
    given: np.dtype[Any]
    layers: list[int] | None = None
    heads: list[int] | None = None


def to_numpy(name: str, value: Any) -> npt.NDArray[Any]:
    """Copy an array of numpy, torch or xarray.

    Raises
    ------
    UsageError
        If it holds something else than numbers.
    """
    if isinstance(value, xr.DataArray):
        value = value.values
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16.
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    try:
        array = np.array(value, order="C", copy=True)
    except ValueError as error:
        raise UsageError(f"{name} is no array: {error}.") from error
    if array.dtype.kind not in "fiub":
        raise UsageError(
            f"{name} holds {array.dtype}, not numbers.",
            hint="Give an array of floats; objects and pickles are not taken.",
        )
    return array


def _as_float(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Upcast: statistics of float16 overflow, and those of integers wrap around."""
    if array.dtype.kind == "f" and array.dtype.itemsize >= 4:
        return array.astype(np.float64) if array.dtype.itemsize > 8 else array
    return array.astype(np.float32 if array.dtype.itemsize <= 2 else np.float64)


def infer(
    arrays: Mapping[str, Any],
    *,
    tokens: npt.NDArray[Any] | None,
    lengths: npt.NDArray[Any] | None,
    n_layers: int | None,
) -> dict[str, Named]:
    """Give every activation its dimensions, adding ``prompt`` and ``layer`` where they lack.

    Parameters
    ----------
    arrays : mapping from activation to array
    tokens : ndarray of int, [prompt, pos] or [pos], optional
    lengths : ndarray of int, [prompt], optional
    n_layers : int, optional
        Of the model, where the weights say it.

    Raises
    ------
    UsageError
        If the number of dimensions is wrong, or it is not clear which one is missing.
    """
    sizes: dict[str, set[int]] = {"prompt": set(), "layer": set()}
    if tokens is not None:
        sizes["prompt"].add(1 if tokens.ndim == 1 else tokens.shape[0])
    if lengths is not None:
        sizes["prompt"].add(len(lengths))
    if n_layers is not None:
        sizes["layer"].add(n_layers)
    found: dict[str, Named] = {}
    waiting: dict[str, npt.NDArray[Any]] = {}
    for name, array in arrays.items():
        value = to_numpy(name, array)
        dims = ACTIVATIONS[name].dims
        if isinstance(array, xr.DataArray):
            found[name] = _by_name(name, array, value)
        elif value.ndim == len(dims):
            found[name] = Named(value, value.dtype)
        elif value.ndim == len(dims) - 2:
            found[name] = Named(value[None, None], value.dtype)
        elif value.ndim == len(dims) - 1:
            waiting[name] = value
        else:
            raise _wrong(name, value.shape)
    for named in found.values():
        sizes["prompt"].add(named.value.shape[0])
        sizes["layer"].add(named.value.shape[1])
    for name, value in waiting.items():
        axis = _missing(name, value.shape, sizes)
        found[name] = Named(np.expand_dims(value, axis), value.dtype)
    for named in found.values():
        named.value = np.ascontiguousarray(_as_float(named.value))
    return {name: found[name] for name in arrays}


def _missing(name: str, shape: tuple[int, ...], sizes: Mapping[str, set[int]]) -> int:
    """Find which of ``prompt`` (0) and ``layer`` (1) an array lacks."""
    first = shape[0]
    if first == 1:
        return 0
    # It lacks one dimension, which therefore has size 1; the other one has size `first`.
    no_prompt = sizes["prompt"] <= {1} and sizes["layer"] <= {first}
    no_layer = sizes["layer"] <= {1} and sizes["prompt"] <= {first}
    if no_prompt == no_layer:
        raise _wrong(name, shape)
    return 0 if no_prompt else 1


def _wrong(name: str, shape: tuple[int, ...]) -> UsageError:
    dims = ACTIVATIONS[name].dims
    doubt = len(shape) == len(dims) - 1
    return UsageError(
        f"{name} has shape {shape}; expected [{', '.join(dims)}].",
        hint=(
            "One dimension is missing, and it is not clear whether that is prompt or layer: "
            if doubt
            else "Add the dimensions that are missing: "
        )
        + "x[None] adds a dimension in front, x[:, None] one after the first.",
    )


def _by_name(name: str, array: xr.DataArray, value: npt.NDArray[Any]) -> Named:
    dims = ACTIVATIONS[name].dims
    missing = [d for d in dims if d not in array.dims]
    extra = [str(d) for d in array.dims if d not in dims]
    if extra or not set(missing) <= {"prompt", "layer"}:
        raise UsageError(
            f"{name} has dimensions [{', '.join(map(str, array.dims))}]; "
            f"expected [{', '.join(dims)}].",
            hint="Rename them: x.rename(old='new').",
        )
    there = [d for d in dims if d in array.dims]
    value = value.transpose([array.dims.index(d) for d in there])
    for dim in missing:
        value = np.expand_dims(value, dims.index(dim))
    head_dim = ACTIVATIONS[name].head_dim
    return Named(
        np.ascontiguousarray(value),
        value.dtype,
        layers=_labels(array, "layer"),
        heads=_labels(array, head_dim) if head_dim else None,
    )


def _labels(array: xr.DataArray, dim: str) -> list[int] | None:
    """Return the labels along a dimension, where they are not just 0, 1, 2, ..."""
    if dim not in array.coords:
        return None
    labels = np.atleast_1d(array.coords[dim].values)
    if labels.dtype.kind not in "iu":
        return None
    plain = dim in array.dims and np.array_equal(labels, np.arange(len(labels)))
    return None if plain else [int(x) for x in labels]
