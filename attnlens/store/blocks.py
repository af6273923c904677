"""Arrays of one unit, on disk or in memory, which are never quietly incomplete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import ShardingCodec
from zarr.storage import LocalStore

from attnlens.activations import ACTIVATIONS
from attnlens.errors import DamagedStoreError, StoreError
from attnlens.store.layout import Layout
from attnlens.store.shards import ArrayReader, Index, as_slice, outer

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype


class Block(Protocol):
    """One array of one unit, wherever it lies."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """How it is stored."""

    def read_into(self, selection: Sequence[Index], out: npt.NDArray[Any]) -> None:
        """Read the outer product of the indices, one array of them for each dimension."""


@dataclass(frozen=True)
class MemoryBlock:
    """Prompts of one length out of an array in memory.

    Attributes
    ----------
    array : ndarray
        First dimension ``prompt``.
    prompts : ndarray of int
        Which prompts.
    shape : tuple of int
        Of the part that is seen: what lies beyond it is padding.
    """

    array: npt.NDArray[Any]
    prompts: Index
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """As in memory."""
        return self.array.dtype

    def read_into(self, selection: Sequence[Index], out: npt.NDArray[Any]) -> None:
        """Read the outer product of the indices."""
        picked = [self.prompts[selection[0]], *selection[1:]]
        out[...] = self.array[outer([as_slice(i) for i in picked])]


class StrictStore(LocalStore):
    """A folder in which a chunk that is not there is an error.

    zarr itself returns the fill value.
    """

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Read one file, or a part of it."""
        found: Buffer | None = self._there(key, await super().get(key, prototype, byte_range))
        return found

    def get_sync(self, key: str, **how: Any) -> Any:
        """Read one file, or a part of it, in zarr's pipeline without an event loop (zarr 3.3)."""
        return self._there(key, super().get_sync(key, **how))  # type: ignore[misc,unused-ignore]

    def _there(self, key: str, value: Any) -> Any:
        array, _, file = key.rpartition("/")
        if value is None and file.startswith("c"):
            raise DamagedStoreError(
                f"chunk {file} is missing", hint=f"It is part of {self.root / array}."
            )
        return value


class ZarrBlock:
    """One array of one group on disk.

    Parameters
    ----------
    folder : Path
        The group's folder.
    name : str
        The array's name in it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return (ZarrBlock, (self.folder, self.name))

    @cached_property
    def array(self) -> zarr.Array[Any]:
        """The zarr array.

        Raises
        ------
        DamagedStoreError
            If it is not there, or its metadata cannot be read.
        StoreError
            If it holds anything but numbers.
        """
        place = f"{self.folder}: {self.name}"
        try:
            array = zarr.open_array(
                StrictStore(self.folder, read_only=True), path=self.name, mode="r", zarr_format=3
            )
        except FileNotFoundError as error:
            raise DamagedStoreError(
                f"{place} is missing.", hint="Restore it from a copy, or capture again."
            ) from error
        except Exception as error:
            raise DamagedStoreError(f"{place}: its metadata cannot be read: {error}.") from error
        if array.dtype.kind not in "fiub":
            raise StoreError(
                f"{place} holds {array.dtype}; a store holds numbers only.",
                hint="It was not written by attnlens; do not trust it.",
            )
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """How it is stored."""
        return np.dtype(self.array.dtype)

    @cached_property
    def layout(self) -> Layout | None:
        """How it is chunked; None for arrays that are no activations."""
        array = self.array
        if self.name not in ACTIVATIONS or array.shards is None or not _ours(array):
            return None
        return Layout(ACTIVATIONS[self.name], array.shape, self.dtype, array.chunks, array.shards)

    def read_into(self, selection: Sequence[Index], out: npt.NDArray[Any]) -> None:
        """Read the outer product of the indices into `out`, cast to its dtype.

        Raises
        ------
        DamagedStoreError
            If a chunk is missing or altered.
        """
        place = f"{self.folder}: {self.name}"
        try:
            layout = self.layout
            if layout is not None:
                ArrayReader(self.folder / self.name, layout).read(selection, out)
            else:
                out[...] = self.array.oindex[tuple(as_slice(i) for i in selection)]
        except DamagedStoreError as error:
            raise DamagedStoreError(
                f"{place}: {error.message}.", hint="Restore it from a copy, or capture again."
            ) from error
        except OSError as error:
            raise StoreError(f"{place} cannot be read: {error.strerror}.") from error
        except (ValueError, RuntimeError) as error:
            raise DamagedStoreError(
                f"{place} cannot be decoded: {error}.",
                hint="Restore it from a copy, or capture again.",
            ) from error

    def read_all(self) -> npt.NDArray[Any]:
        """Read everything, as it is stored."""
        out = np.empty(self.shape, dtype=self.dtype)
        if out.size:
            self.read_into([np.arange(n) for n in self.shape], out)
        return out


def _ours(array: zarr.Array[Any]) -> bool:
    """Whether an array's shards are as :mod:`attnlens.store.shards` writes them."""
    codecs: Sequence[Any] = getattr(array.metadata, "codecs", ())
    if len(codecs) != 1 or not isinstance(codecs[0], ShardingCodec):
        return False
    # Through its JSON form: attributes of codecs differ between versions of zarr.
    config: Any = codecs[0].to_dict()["configuration"]
    names = [codec["name"] for codec in config["codecs"]]
    return (
        names in (["bytes", "zstd", "crc32c"], ["bytes", "blosc", "crc32c"])
        and config["index_location"] == "end"
    )
