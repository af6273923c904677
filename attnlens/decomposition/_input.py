"""What a tensor must be before it is decomposed, and the checks that say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlens.errors import DecompositionError

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``."""

_WIDE = 1 << 26
"""Elements up to which half and single precision input is worked on in float64."""


@dataclass
class Labelled:
    """A finite tensor scaled to unit norm, with the names of its modes.

    ``tensor * scale`` is what was given; `scale` is a pair whose product may overflow.
    """

    tensor: Tensor
    dims: tuple[str, ...]
    coords: dict[Hashable, Any] = field(default_factory=dict)
    scale: tuple[float, float] = (1.0, 1.0)

    @property
    def is_zero(self) -> bool:
        """Whether every entry is zero."""
        return self.scale[0] == 0.0

    def rescale(self, values: np.ndarray) -> np.ndarray:
        """Undo the scaling of a quantity that is linear in the tensor.

        Raises
        ------
        DecompositionError
            If it leaves the range of float64.
        """
        with np.errstate(over="ignore"):
            found = np.asarray(values * self.scale[1] * self.scale[0])
        if not np.isfinite(found).all():
            raise DecompositionError(
                f"The result is above the largest float64: entries reach {self.scale[0]:.3g}.",
                hint="Divide the tensor by its largest magnitude first.",
            )
        return found


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int) -> int:
    """Read an option that is a whole number.

    Raises
    ------
    DecompositionError
        If it is none, or under `least`.
    """
    if not is_whole(value) or value < least:
        raise DecompositionError(f"{name}={value!r}: a whole number of at least {least} is needed.")
    return int(value)


def yes_or_no(name: str, value: Any) -> bool:
    """Read an option that is true or false.

    Raises
    ------
    DecompositionError
        If it is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise DecompositionError(f"{name}={value!r}: True or False is needed.")
    return bool(value)


def available_memory(device: torch.device) -> int:
    """Free bytes on a device; on the CPU, of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def check_size(shape: Sequence[int], memory: int, what: str = "the tensor") -> None:
    """Refuse a tensor that cannot be decomposed within `memory` bytes.

    Raises
    ------
    DecompositionError
        With the estimate.
    """
    elements = math.prod(shape)
    width = 8 if elements <= _WIDE else 4
    # The tensor as given, its working copy, and one block of temporaries.
    need = elements * width * 2.5
    if need > memory:
        size = " x ".join(map(str, shape))
        raise DecompositionError(
            f"{what} of {size} needs about {_bytes(need)} of memory; {_bytes(memory)} may be used.",
            hint="Decompose a sample of it (fewer prompts or positions), or compress it in slices "
            "with attnlens.decomposition.compress_slices.",
        )


def _bytes(count: float) -> str:
    units = ["bytes", "KiB", "MiB", "GiB"]
    power = min(int(math.log2(max(count, 1)) // 10), 3)
    return f"{count / 1024**power:,.{1 if power else 0}f} {units[power]}"


def names_of(tensor: Any, dims: Sequence[str] | None) -> tuple[str, ...]:
    """Names of a tensor's modes: xarray's own, `dims`, or ``mode_0, mode_1, ...``."""
    own = getattr(tensor, "dims", None)
    count = len(tensor.shape)
    if dims is not None:
        names = tuple(str(d) for d in dims)
    elif own is not None:
        names = tuple(str(d) for d in own)
    else:
        names = tuple(f"mode_{k}" for k in range(count))
    if len(names) != count or len(set(names)) != count:
        raise DecompositionError(
            f"dims={list(names)} does not name the {count} modes of a tensor of shape "
            f"{tuple(tensor.shape)}, each once."
        )
    _refuse_taken(names, names, "A mode")
    return names


def _refuse_taken(names: Sequence[str], modes: Sequence[str], what: str) -> None:
    """Refuse names that the results' datasets need for themselves."""
    taken = {"component", "weights", "restart", "restart_errors", "rank", "core"}
    for mode in modes:
        taken |= {f"factor_{mode}", f"energy_{mode}", f"{mode}_component", f"{mode}_direction"}
    for name in names:
        if name in taken or name.startswith("scan_"):
            raise DecompositionError(
                f"{what} of the tensor is called {name!r}, a name that the results' datasets use "
                "themselves.",
                hint="Rename it before decomposing.",
            )


def read(
    tensor: Any,
    *,
    dims: Sequence[str] | None = None,
    modes: tuple[int, int] = (3, 4),
    nonnegative: bool = False,
    memory: int | None = None,
) -> Labelled:
    """Bring an xarray, numpy or torch tensor into working form.

    Integers, booleans and half precision become float64 (float32 above 2**26 elements). The tensor
    is divided by its largest magnitude before any product, so that no scale over- or underflows.

    Raises
    ------
    DecompositionError
        Not a dense real tensor with the allowed number of modes, an empty mode, a value that is
        not finite (the message says where), a negative value under `nonnegative`, or too large.
    """
    if not hasattr(tensor, "shape"):
        try:
            tensor = np.asarray(tensor)
        except ValueError as error:
            raise DecompositionError(f"This is no tensor: {error}") from None
    shape = tuple(int(n) for n in tensor.shape)
    low, high = modes
    if not low <= len(shape) <= high:
        raise DecompositionError(
            f"A tensor with {low} to {high} modes is needed; this one has {len(shape)}: "
            f"shape {shape}."
        )
    if 0 in shape:
        raise DecompositionError(f"The tensor has an empty mode: shape {shape}.")
    names = names_of(tensor, dims)
    device = tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")
    check_size(
        shape, available_memory(device) if memory is None else whole_number("memory", memory, 1)
    )
    coords: dict[Hashable, Any] = {}
    if hasattr(tensor, "coords"):
        own = dict(zip((str(d) for d in tensor.dims), names, strict=True))
        for key, value in tensor.coords.items():
            if len(value.dims) <= 1 and (str(key) not in own or own[str(key)] == str(key)):
                coords[key] = (tuple(own[str(d)] for d in value.dims), np.asarray(value.values))
        _refuse_taken([str(key) for key in coords if str(key) not in names], names, "A coordinate")
        tensor = tensor.values
    data = _to_torch(tensor)
    low_value, high_value = (float(v) for v in torch.aminmax(data))  # NaN if there is one
    if not (math.isfinite(low_value) and math.isfinite(high_value)):
        _refuse(data, ~torch.isfinite(data), names, "not finite", "Mask or drop those first.")
    if nonnegative and low_value < 0:
        _refuse(data, data < 0, names, "negative", "Use nonnegative=False, or clip the tensor.")
    largest = max(-low_value, high_value)
    if largest == 0.0:
        return Labelled(data, names, coords, (0.0, 1.0))
    if not 1e-100 < largest < 1e100 or (data.dtype == torch.float32 and not 1e-15 < largest < 1e15):
        data = data / largest
    else:
        largest = 1.0
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(part)) ** 2 for part in data))
    return Labelled(data / norm, names, coords, (largest, norm))


def _to_torch(tensor: Any) -> Tensor:
    if isinstance(tensor, Tensor):
        data = tensor.detach()
    else:
        array = np.asarray(tensor)
        if array.dtype.kind not in "biuf":
            raise DecompositionError(
                f"A tensor of real numbers is needed; this one is of dtype {array.dtype}."
            )
        if array.dtype.kind == "f" and array.dtype.itemsize not in (2, 4, 8):
            array = array.astype(np.float64)
        if array.dtype.byteorder not in "=|" or array.dtype.kind == "u":
            array = array.astype(np.float64)
        if not array.flags.writeable or any(s < 0 for s in array.strides):
            array = array.copy()  # torch takes neither read-only nor reversed arrays
        data = torch.from_numpy(array)
    if data.is_complex() or data.layout != torch.strided:
        raise DecompositionError(
            f"A dense tensor of real numbers is needed; this one is {data.dtype}, {data.layout}."
        )
    if data.device.type == "mps":  # it has no float64
        data = data.cpu()
    if data.dtype == torch.float64:
        return data
    return data.to(torch.float64 if data.numel() <= _WIDE else torch.float32)


def _refuse(data: Tensor, bad: Tensor, names: tuple[str, ...], what: str, hint: str) -> None:
    where = bad.nonzero()
    place = ", ".join(f"{n}={int(i)}" for n, i in zip(names, where[0], strict=True))
    value = float(data[tuple(where[0])])
    raise DecompositionError(
        f"{len(where)} of {data.numel()} entries are {what}; the first is {value} at {place}.",
        hint=hint,
    )


def tell(progress: Progress | None, stage: str, done: int, total: int) -> None:
    """Report progress if somebody listens."""
    if progress is not None:
        progress(stage, done, total)
