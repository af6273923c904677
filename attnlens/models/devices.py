"""What people write for a dtype or a device."""

from __future__ import annotations

from typing import Any, Final

import torch

from attnlens.errors import OptionError

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_MAPS: Final = ("auto", "balanced", "balanced_low_0", "sequential")
_OTHER_NAMES: Final = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "double": "float64",
    "fp64": "float64",
}


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """Return the dtype that a name such as ``"bfloat16"`` or ``"fp16"`` means; float32 for None.

    Raises
    ------
    OptionError
    """
    if dtype is None:
        return torch.float32
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    else:
        name = dtype.lower().removeprefix("torch.")
    found = _DTYPES.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise OptionError(
            f"dtype {str(dtype)!r} is not one that a model can run in",
            hint=f"Choose {', '.join(_DTYPES)} or auto.",
        )
    return found


def own_dtype(config: Any) -> torch.dtype:
    """Return the dtype in which a checkpoint was saved, as its configuration says."""
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32


def refuse_device(device: Any) -> str:
    """Return no device, for a device map decides; refuse one that is given beside the map.

    Raises
    ------
    OptionError
    """
    if device is not None:
        raise OptionError(
            f"device {str(device)!r} and a device map are both given",
            hint="Give one of them.",
        )
    return ""


def check_device_map(device_map: Any) -> Any:
    """Return a device map as transformers takes it.

    Raises
    ------
    OptionError
        If it is a word that transformers does not know.
    """
    if isinstance(device_map, str) and device_map not in _MAPS:
        try:
            torch.device(device_map)
        except RuntimeError as error:
            raise OptionError(
                f"device_map {device_map!r} is not one that transformers knows",
                hint=f"Choose {', '.join(_MAPS)} or a device.",
            ) from error
    return device_map


def parse_device(device: str | torch.device | None) -> str:
    """Return the device to use; for None and ``"auto"`` a CUDA device if there is one, or the CPU.

    Apple's GPU is taken only by name: it has given plausible but wrong results.

    Raises
    ------
    OptionError
        If there is no such device here.
    """
    if device is None or str(device) == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise OptionError(
            f"there is no device {str(device)!r}", hint="Choose cpu, cuda, cuda:N, mps or auto."
        ) from error
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(wanted.type, False) or (
        wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count()
    ):
        raise OptionError(
            f"device {str(device)!r} is not available on this machine",
            hint="Choose cpu, or auto for what there is.",
        )
    return str(wanted)
