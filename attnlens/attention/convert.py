"""What users pass in (torch, numpy, xarray) as torch tensors of one form."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from attnlens.errors import UsageError

#: Anything that holds numbers: torch, numpy or xarray.
ArrayLike = Any


def to_tensor(value: ArrayLike, last: Sequence[tuple[str, ...]] = ()) -> Tensor:
    """Return `value` as a tensor, in float32 at least if it holds floats.

    Parameters
    ----------
    value : Tensor, ndarray, DataArray or nested sequence
    last : sequence of tuple of str, optional
        For a DataArray: the names (with alternatives) that its last dimensions must have, in
        order; dimensions are moved there.

    Raises
    ------
    UsageError
        A DataArray lacks one of the names.
    """
    if isinstance(value, xr.DataArray):
        value = _ordered(value, last).values
    if not isinstance(value, Tensor):
        array = np.asarray(value, order="C")  # unlike ascontiguousarray, leaves a number a number
        # torch warns of arrays that it could write to but must not; nothing here writes.
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
    tensor: Tensor = value.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _ordered(value: xr.DataArray, last: Sequence[tuple[str, ...]]) -> xr.DataArray:
    names = []
    for choices in last:
        found = [name for name in choices if name in value.dims]
        if not found:
            raise UsageError(
                f"The array has dimensions {value.dims}, and none is called {choices[0]!r}.",
                hint="Rename its dimensions, or pass the plain values.",
            )
        names.append(found[0])
    return value.transpose(..., *names) if names else value


def to_float(value: Tensor) -> Tensor:
    """Return `value` as float32 or float64."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype to accumulate in: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def whole_number(value: object, what: str, least: int = 0) -> int:
    """Return a whole number of at least `least` as an int.

    Raises
    ------
    UsageError
        It is something else; `what` names it.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{what} must be a whole number, not {value!r}.") from None
    if number < least:
        raise UsageError(f"{what} must be at least {least}, not {number}.")
    return number


def generator(seed: int) -> torch.Generator:
    """Return random numbers under a seed.

    Raises
    ------
    UsageError
        The seed is no whole number of at least 0.
    """
    return torch.Generator().manual_seed(whole_number(seed, "seed"))


def per_prompt(
    value: ArrayLike | None, prompts: tuple[int, ...], n: int, what: str, device: torch.device
) -> Tensor | None:
    """Return a number per prompt, flattened to [prompt] int64, or None.

    Raises
    ------
    UsageError
        It does not fit the prompts, or is not between 0 and n.
    """
    if value is None:
        return None
    given = torch.as_tensor(to_tensor(value), device=device)
    if given.is_floating_point() or given.dtype == torch.bool:
        raise UsageError(f"{what} must be whole numbers, not {given.dtype}.")
    if given.numel() == 1:
        given = given.reshape(())
    try:
        given = given.to(torch.int64).expand(prompts)
    except RuntimeError:
        raise UsageError(
            f"{what} has shape {tuple(given.shape)}, but the prompts have shape {prompts}.",
            hint="Give one number, or one per prompt.",
        ) from None
    if given.numel() and (int(given.min()) < 0 or int(given.max()) > n):
        raise UsageError(
            f"{what} must lie between 0 and the {n} positions; "
            f"found {int(given.min())} to {int(given.max())}."
        )
    return given.reshape(math.prod(prompts)).contiguous()


def pairs_of(x: Tensor, prompts: Tensor, heads: Tensor) -> Tensor:
    """Return chosen (prompt, head) pairs of [prompt, head, ...] as [pair, 1, ...].

    A single pair is a view: its numbers are not copied.
    """
    if len(prompts) == 1:
        prompt, head = int(prompts[0]), int(heads[0])
        return x[prompt : prompt + 1, head : head + 1]
    return x[prompts, heads][:, None]
