"""Activations for other tools: ``.npy`` and safetensors.

Both are written as a stream, prompt by prompt, so that a store larger than memory can be exported.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr

from attnlens.errors import OptionError, OutputError
from attnlens.store.files import TEMPORARY, clear_errors

if TYPE_CHECKING:
    from attnlens.store.read import Store

_FORMATS: Final = ("npy", "safetensors")
_SAFETENSORS: Final = {"f4": "F32", "f8": "F64", "i4": "I32", "i8": "I64"}


def export(
    store: Store,
    name: str,
    path: str | Path,
    format: str | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write one activation or statistic to a file.

    Parameters
    ----------
    store : Store
    name : str
        As in ``store[name]``; values and padding are the same.
    path : path
        The file.
    format : {"npy", "safetensors"}, optional
        Taken from the path's ending if not given. A safetensors file also holds ``tokens`` and
        ``lengths``, and in its metadata the dimensions and the model; an ``.npy`` file is the
        array alone.
    overwrite : bool
        Replace a file that is there; a link stays a link, and the file keeps its mode.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    OptionError
        If the format is not known.
    OutputError
        If the file is there already.
    NeedError
        If the store does not hold `name`.
    """
    target = Path(path)
    kind = format or target.suffix.removeprefix(".")
    if kind not in _FORMATS:
        raise OptionError(
            f"{kind or target.name!r} is no format to export to.",
            hint=f"Known are {' and '.join(_FORMATS)}.",
        )
    array = store[name]
    if target.exists() and not overwrite:
        raise OutputError(
            f"{target} is there already.", hint="Choose another name, or use --overwrite."
        )
    with _replacing(target) as file:
        if kind == "npy":
            _write_npy(file, array)
        else:
            _write_safetensors(file, store, array)
    return target


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """Write beside the file that `target` means, and take its place when all is written."""
    real = Path(os.path.realpath(target))
    with clear_errors(target):
        temporary = real.with_name(f"{TEMPORARY}{real.name}")
        try:
            with temporary.open("wb") as file:
                if real.exists():
                    temporary.chmod(real.stat().st_mode & 0o777)
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(real)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _blocks(array: xr.DataArray) -> Iterator[npt.NDArray[Any]]:
    """Yield the array's values in C order, in pieces along its first dimension."""
    if array.ndim == 0 or "prompt" not in array.dims[:1]:
        yield np.ascontiguousarray(array.values)
        return
    for i in range(array.shape[0]):
        yield np.ascontiguousarray(array[i].values)


def _write_npy(file: IO[bytes], array: xr.DataArray) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": array.shape,
    }
    np.lib.format.write_array_header_2_0(file, header)  # type: ignore[arg-type,unused-ignore]
    for block in _blocks(array):
        file.write(block.data)


def _write_safetensors(file: IO[bytes], store: Store, array: xr.DataArray) -> None:
    """Write the format: length of the header, the header, the raw tensors one after another.

    References
    ----------
    https://github.com/huggingface/safetensors#format
    """
    name = str(array.name)
    tensors: dict[str, xr.DataArray] = {name: array, "lengths": store.lengths}
    if store.has_tokens:
        tensors["tokens"] = store.tokens
    header: dict[str, Any] = {
        "__metadata__": {
            "dims": json.dumps([str(d) for d in array.dims]),
            "model": str(store.manifest.model.get("name", "")),
            "layers": json.dumps(array.coords["layer"].values.tolist())
            if "layer" in array.coords
            else "",
            "format": "np",
        }
    }
    offset = 0
    for key, tensor in tensors.items():
        end = offset + tensor.size * tensor.dtype.itemsize
        header[key] = {
            "dtype": _SAFETENSORS[tensor.dtype.str[1:]],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        for block in _blocks(tensor):
            file.write(block.data)
