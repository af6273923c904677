"""Stores of arrays in memory: activations of any other tool."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from attnlens.activations import ACTIVATIONS, MASKED_SCORE, nearest
from attnlens.errors import NeedError, NonFiniteError, UsageError
from attnlens.needs import BUILTIN_STATISTICS
from attnlens.store.arrays import Named, infer, to_numpy
from attnlens.store.blocks import Block, MemoryBlock
from attnlens.store.layout import RAGGED_DIMS
from attnlens.store.schema import ActivationSpec, Manifest, PromptsSpec, UnitSpec
from attnlens.store.units import Unit
from attnlens.store.weights import Weights, weight_dims

if TYPE_CHECKING:
    from attnlens.statistics import Statistic
    from attnlens.store.read import Store

log = logging.getLogger("attnlens")


def build(
    arrays: Mapping[str, Any],
    *,
    tokens: Any,
    vocabulary: list[str] | None,
    weights: Mapping[str, Any] | None,
    lengths: Any,
    twins: Iterable[Store],
    corpora: Mapping[str, Store] | None,
    model: Any,
    period: int | None,
    statistics: Mapping[str, type[Statistic]] | None,
) -> Store:
    """Do the work of :meth:`Store.from_arrays`, which see."""
    from attnlens.store.read import Store

    known = {*BUILTIN_STATISTICS, *(statistics or {})}
    given = {n: _statistic(n, a) for n, a in arrays.items() if n in known}
    wanted = {n: a for n, a in arrays.items() if n not in known}
    for name in wanted:
        if name not in ACTIVATIONS:
            near = nearest(name, {*ACTIVATIONS, *known})
            raise UsageError(
                f"{name!r} is no activation.",
                hint=(f"Did you mean {near!r}? " if near else "")
                + f"Known are {', '.join(ACTIVATIONS)}.",
            )
    ids = None if tokens is None else _tokens(tokens)
    sizes = None if lengths is None else to_numpy("lengths", lengths).astype(np.int64).reshape(-1)
    n_layers = _layers_of(weights)
    labelled = infer(wanted, tokens=ids, lengths=sizes, n_layers=n_layers)
    n, longest = _agree(labelled, ids, sizes, given)
    if ids is not None and ids.ndim == 1:
        ids = ids[None]
    if n == 0 or longest == 0:
        raise UsageError(
            "The arrays hold no prompt.", hint="Give at least one prompt of one token."
        )
    real = np.full(n, longest) if sizes is None else sizes
    _check_lengths(real, n, longest)
    values = {name: _clean(name, array, real) for name, array in labelled.items()}

    manifest = Manifest(
        model=_facts(model),
        corpus={"name": "arrays"},
        prompts=PromptsSpec(n=n, lengths=[int(x) for x in real], period=period),
        activations={
            name: ActivationSpec(
                dtype=str(values[name].dtype),
                layers=array.layers or list(range(array.value.shape[1])),
                heads=array.heads,
            )
            for name, array in labelled.items()
        },
        units=_units(real),
        batch_size=n,
        sealed=True,
    )
    if ids is None:
        ids = np.full((n, longest), -1, dtype=np.int32)

    dataset = None if weights is None else _weights(weights)
    held = Weights(None if dataset is None else lambda: dataset)
    units = []
    for spec in manifest.units:
        rows = np.array(spec.prompts)
        blocks: dict[str, Block] = {"tokens": MemoryBlock(ids, rows, (len(rows), spec.length))}
        for name, value in values.items():
            shape = (len(rows), *value.shape[1:])
            cut = tuple(
                spec.length if d in RAGGED_DIMS else s
                for d, s in zip(ACTIVATIONS[name].dims, shape, strict=True)
            )
            blocks[name] = MemoryBlock(value, rows, cut)
        units.append(Unit(spec, manifest, blocks, held))

    return Store(
        manifest,
        units,
        weights=held,
        vocabulary=None if vocabulary is None else [str(t) for t in vocabulary],
        twins=twins,
        corpora=corpora,
        statistics=statistics,
        given=given,
    )


def _facts(model: Any) -> dict[str, Any]:
    if hasattr(model, "to_json"):
        model = model.to_json()
    return dict(model or {})


def _statistic(name: str, array: Any) -> xr.DataArray:
    if not isinstance(array, xr.DataArray):
        raise UsageError(
            f"{name} is {type(array).__name__}; a statistic is given as an xarray.DataArray.",
            hint="Name its dimensions, as in xr.DataArray(x, dims=('prompt', 'layer', 'head')).",
        )
    return array.copy(data=to_numpy(name, array)).rename(name)


def _tokens(tokens: Any) -> npt.NDArray[np.int32]:
    array = to_numpy("tokens", tokens)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise UsageError(
            f"tokens are {array.dtype} of shape {array.shape}; token ids are integers over "
            "[prompt, pos] or [pos]."
        )
    return array.astype(np.int32)


def _layers_of(weights: Mapping[str, Any] | None) -> int | None:
    w_o = (weights or {}).get("W_O")
    return None if w_o is None else int(w_o.shape[0])


def _agree(
    arrays: Mapping[str, Named],
    tokens: npt.NDArray[Any] | None,
    lengths: npt.NDArray[Any] | None,
    given: Mapping[str, xr.DataArray],
) -> tuple[int, int]:
    """Find the number of prompts and of positions, on which everything must agree."""
    seen: dict[str, tuple[str, int]] = {}

    def check(dim: str, owner: str, size: int) -> None:
        other, expected = seen.setdefault(dim, (owner, size))
        if size != expected:
            what = {"prompt": "prompts", "pos": "positions", "head": "heads"}.get(dim, dim + "s")
            raise UsageError(
                f"{other} has {expected} {what} and {owner} has {size}.",
                hint="All arrays of a store are over the same prompts and tokens.",
            )

    for name, array in arrays.items():
        for dim, size in zip(ACTIVATIONS[name].dims, array.value.shape, strict=True):
            if dim == "prompt":
                check("prompt", name, size)
            elif dim in RAGGED_DIMS:
                check("pos", name, size)
            elif dim == "head" and array.heads is None:
                check("head", name, size)
    if tokens is not None:
        check("prompt", "tokens", 1 if tokens.ndim == 1 else tokens.shape[0])
        check("pos", "tokens", tokens.shape[-1])
    if lengths is not None:
        check("prompt", "lengths", len(lengths))
    for name, statistic in given.items():
        if "prompt" in statistic.dims:
            check("prompt", name, statistic.sizes["prompt"])
    n = seen.get("prompt", ("", 1))[1]
    longest = seen.get("pos", ("", int(lengths.max()) if lengths is not None else 1))[1]
    return n, longest


def _check_lengths(lengths: npt.NDArray[Any], n: int, longest: int) -> None:
    if len(lengths) != n or lengths.min(initial=1) < 1 or lengths.max(initial=0) > longest:
        raise UsageError(
            f"lengths are {lengths.tolist()}; expected {n} numbers between 1 and {longest}."
        )


def _units(lengths: npt.NDArray[Any]) -> list[UnitSpec]:
    return [
        UnitSpec(id=i, prompts=np.flatnonzero(lengths == size).tolist(), length=int(size))
        for i, size in enumerate(np.unique(lengths))
    ]


def _clean(name: str, array: Named, lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Check what lies at real tokens, mark masked scores, and blank out the padding."""
    dims, value = ACTIVATIONS[name].dims, array.value
    padding = np.zeros((1,) * value.ndim, dtype=bool)
    for axis, dim in enumerate(dims):
        if dim in RAGGED_DIMS:
            beyond = np.arange(value.shape[axis]) >= lengths[:, None]
            shape = [1] * value.ndim
            shape[0], shape[axis] = beyond.shape
            padding = padding | beyond.reshape(shape)
    if padding.any():
        np.copyto(value, 0, where=padding)
    if name == "scores":
        masked = value <= np.finfo(array.given).min if array.given.kind == "f" else None
        if masked is not None:
            value[masked] = MASKED_SCORE
    bad = ~np.isfinite(value)
    if bad.any():
        _refuse(name, array, value, np.argwhere(bad)[0])
    if name == "pattern" and (value.min(initial=0) < -1e-3 or value.max(initial=0) > 1.01):
        log.warning("pattern reaches beyond 0 and 1: these do not look like attention weights")
    return value


def _refuse(name: str, array: Named, value: npt.NDArray[Any], where: npt.NDArray[Any]) -> None:
    dims = ACTIVATIONS[name].dims
    place = []
    for dim, index in zip(dims, where, strict=True):
        if dim == "layer" and array.layers:
            index = array.layers[index]
        word = {"query_pos": "row", "pos": "position"}.get(dim, dim)
        if dim not in ("key_pos", "d_head", "d_model"):
            place.append(f"{word} {index}")
    raise NonFiniteError(
        f"{name} is {value[tuple(where)]} at {', '.join(place)}.",
        hint="If that is padding, give lengths=, the number of real tokens of each prompt.",
    )


def _weights(weights: Mapping[str, Any]) -> xr.Dataset:
    variables = {}
    for name, value in weights.items():
        array = to_numpy(name, value)
        dims = value.dims if isinstance(value, xr.DataArray) else weight_dims(name, array.ndim)
        variables[name] = (dims, array)
    try:
        return xr.Dataset(variables)
    except ValueError as error:
        raise UsageError(f"The weights do not fit together: {error}.") from error


def gather(
    cache: Mapping[str, Any], names: tuple[str, ...]
) -> tuple[dict[str, tuple[npt.NDArray[Any], tuple[str, ...]]], dict[str, list[int]]]:
    """Collect activations from a cache of hook points.

    Returns
    -------
    arrays : dict from name to (ndarray, dims)
    layers : dict from name to list of int
    """
    from attnlens.errors import MissingActivationError

    for name in names:
        if name not in ACTIVATIONS:
            raise NeedError(
                f"{name!r} is no activation.", hint=f"Known are {', '.join(ACTIVATIONS)}."
            )
    keys = [str(k) for k in cache.keys()]  # noqa: SIM118 - an ActivationCache iterates otherwise
    n_layers = 1 + max((_layer(k) for k in keys), default=-1)
    arrays: dict[str, tuple[npt.NDArray[Any], tuple[str, ...]]] = {}
    layers: dict[str, list[int]] = {}
    for name in names or tuple(ACTIVATIONS):
        hook = ACTIVATIONS[name].hook or "blocks.{layer}.attn.hook_" + name
        found = [i for i in range(n_layers) if hook.format(layer=i) in keys]
        if not found:
            if names:
                near = nearest(hook.format(layer=0), keys)
                raise MissingActivationError(
                    f"The cache holds no {name}: nothing is called {hook}.",
                    hint=f"Nearest is {near!r}." if near else f"It holds {', '.join(keys[:8])}.",
                )
            continue
        parts = [to_numpy(name, cache[hook.format(layer=i)]) for i in found]
        dims = tuple(d for d in ACTIVATIONS[name].dims if d != "layer")
        if parts[0].ndim == len(dims) - 1:
            parts = [p[None] for p in parts]
        if len({p.shape for p in parts}) > 1 or parts[0].ndim != len(dims):
            raise UsageError(
                f"{name} in the cache has shapes {sorted({p.shape for p in parts})}, "
                f"expected one over {list(dims)}."
            )
        arrays[name] = (np.stack(parts, axis=1), ("prompt", "layer", *dims[1:]))
        layers[name] = found
    if not arrays:
        raise MissingActivationError(
            "The cache holds no activation that attnlens knows.",
            hint=f"It holds {', '.join(keys[:8])}; known are hooks such as "
            f"{ACTIVATIONS['pattern'].hook}.",
        )
    _drop_false_scores(arrays, wanted="scores" in names)
    return arrays, layers


def _layer(key: str) -> int:
    parts = key.split(".")
    return int(parts[1]) if len(parts) > 2 and parts[0] == "blocks" and parts[1].isdigit() else -1


def _drop_false_scores(arrays: dict[str, Any], *, wanted: bool) -> None:
    """Leave out "scores" that are the pattern: in some models the hook comes after the softmax."""
    if "scores" not in arrays:
        return
    scores = arrays["scores"][0]
    after = bool(((scores >= 0) & (scores <= 1)).all()) and np.allclose(
        scores.sum(-1), 1, atol=1e-2
    )
    if not after:
        return
    if wanted:
        raise UsageError(
            "hook_attn_scores of this model comes after the softmax: these are no scores.",
            hint="Take the pattern instead.",
        )
    log.warning("hook_attn_scores of this cache comes after the softmax; scores are left out")
    del arrays["scores"]
