"""Arrays that are read when they are used, one unit at a time, and never quietly incomplete.

xarray reads zarr lazily but joins several stores only with dask. :class:`Joined` joins units
itself, through xarray's documented interface for backends, so that dask stays optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from xarray.backends import BackendArray
from xarray.core import indexing
from zarr.storage import LocalStore

from attnlens.activations import ACTIVATIONS
from attnlens.errors import DamagedStoreError, StoreError
from attnlens.store.layout import Layout

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

Index = npt.NDArray[np.intp]


class Block(Protocol):
    """One array of one unit, wherever it lies."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """How it is stored."""

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
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

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
        """Read the outer product of the indices."""
        return self.array[np.ix_(self.prompts[selection[0]], *selection[1:])]


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
                f"{self.root}: {array}: chunk {file} is missing.",
                hint="Restore it from a copy, or capture again.",
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

    @property
    def layout(self) -> Layout | None:
        """How it is chunked; None for arrays that are no activations."""
        array = self.array
        if self.name not in ACTIVATIONS or array.shards is None:
            return None
        return Layout(ACTIVATIONS[self.name], array.shape, self.dtype, array.chunks, array.shards)

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
        """Read the outer product of the indices.

        Raises
        ------
        DamagedStoreError
            If a chunk is missing or altered.
        """
        array = self.array
        steps = tuple(_as_slice(i) for i in selection)
        try:
            if all(isinstance(s, slice) for s in steps):
                return np.asarray(array[steps])
            return np.asarray(array.oindex[steps])
        except DamagedStoreError:
            raise
        except Exception as error:
            raise self._damage(error) from error

    def read_all(self) -> npt.NDArray[Any]:
        """Read everything."""
        return self.read([np.arange(n) for n in self.shape])

    def _damage(self, error: Exception) -> StoreError:
        """Find the chunk that made reading fail, for zarr does not say."""
        from attnlens.store.check import array_problems

        for problem in array_problems(self, deep=True):
            return DamagedStoreError(
                f"{self.folder}: {self.name}: {problem}.",
                hint="Restore it from a copy, or capture again.",
            )
        if isinstance(error, OSError):
            return StoreError(f"{self.folder}: {self.name} cannot be read: {error.strerror}.")
        return DamagedStoreError(f"{self.folder}: {self.name} cannot be decoded: {error}.")


def _as_slice(index: Index) -> slice | Index:
    """Turn a run of consecutive indices into a slice, which zarr reads faster."""
    if len(index) == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index) and (len(index) < 3 or bool((np.diff(index) == 1).all())):
        return slice(first, last + 1)
    return index


class OuterArray(BackendArray):
    """Base of lazy arrays: turns what xarray asks for into an outer product of indices."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        """Read what an indexer of xarray selects."""
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, self._outer
        )

    def _outer(self, key: tuple[Any, ...]) -> npt.NDArray[Any]:
        every = [np.arange(n) for n in self.shape]
        value = self.read([np.atleast_1d(e[k]) for e, k in zip(every, key, strict=True)])
        scalar = tuple(i for i, k in enumerate(key) if isinstance(k, int | np.integer))
        return np.squeeze(value, axis=scalar)

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
        """Read the outer product of the indices, one array of them for each dimension."""
        raise NotImplementedError

    def variable(self, dims: Sequence[str]) -> xr.Variable:
        """Wrap as xarray wraps what it opens itself: lazy, and safe to assign to."""
        lazy = indexing.LazilyIndexedArray(self)
        return xr.Variable(dims, _copy_on_write(lazy), fastpath=True)


class Single(OuterArray):
    """One block, as it is but for float16, which is read as float32.

    Parameters
    ----------
    block : Block
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.shape = block.shape
        self.dtype = read_dtype(block.dtype)

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
        """Read the outer product of the indices."""
        return self.block.read(selection).astype(self.dtype, copy=False)


@dataclass(frozen=True)
class Piece:
    """One unit's part of a joined array.

    Attributes
    ----------
    block : Block
    prompts : ndarray of int
        Where each of its prompts lies along the joined ``prompt`` dimension.
    places : tuple of (ndarray of int or None)
        For each further dimension: for each joined index, the index in this unit or -1; None where
        they are the same.
    """

    block: Block
    prompts: Index
    places: tuple[Index | None, ...]


class Joined(OuterArray):
    """Units side by side along ``prompt``; NaN where a unit has nothing.

    Parameters
    ----------
    pieces : sequence of Piece
    shape : tuple of int
    """

    def __init__(self, pieces: Sequence[Piece], shape: tuple[int, ...]) -> None:
        self.pieces = pieces
        self.shape = shape
        dtypes = {read_dtype(p.block.dtype) for p in pieces}
        self.dtype = np.result_type(*dtypes)
        self._owner = np.empty(shape[0], dtype=np.intp)
        self._local = np.empty(shape[0], dtype=np.intp)
        for number, piece in enumerate(pieces):
            self._owner[piece.prompts] = number
            self._local[piece.prompts] = np.arange(len(piece.prompts))

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
        """Read the outer product of the indices, unit by unit."""
        out = np.full([len(i) for i in selection], np.nan, dtype=self.dtype)
        owners = self._owner[selection[0]]
        for number in np.unique(owners):
            piece = self.pieces[number]
            here = np.flatnonzero(owners == number)
            source, target = [self._local[selection[0][here]]], [here]
            for index, place in zip(selection[1:], piece.places, strict=True):
                found = index if place is None else place[index]
                there = np.flatnonzero(found >= 0)
                source.append(found[there])
                target.append(there)
            if all(len(i) for i in source):
                out[np.ix_(*target)] = piece.block.read(source)
        return out


class HeadOutputs(OuterArray):
    """``result`` = z W_O, computed for what is asked.

    Parameters
    ----------
    z : OuterArray
        Over [prompt, layer, pos, head, d_head].
    w_o : ndarray, [layer, head, d_head, d_model]
        Float32, of the layers and heads of `z`.
    """

    def __init__(self, z: OuterArray, w_o: npt.NDArray[Any]) -> None:
        self.z = z
        self.w_o = w_o
        self.shape = (*z.shape[:4], w_o.shape[-1])
        self.dtype = np.result_type(z.dtype, w_o.dtype)

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
        """Multiply the selected prompts, layers, positions and heads of z by their W_O."""
        prompt, layer, pos, head, model = selection
        z = self.z.read([prompt, layer, pos, head, np.arange(self.z.shape[-1])])
        w_o = self.w_o[np.ix_(layer, head)][..., model]
        # One product of matrices for each layer and head: [prompt x pos, d_head] @ [d_head, model].
        rows = np.moveaxis(z, (1, 3), (0, 1)).reshape(len(layer), len(head), -1, z.shape[-1])
        out = (rows @ w_o).reshape(len(layer), len(head), len(prompt), len(pos), len(model))
        return np.ascontiguousarray(np.moveaxis(out, (0, 1), (1, 3)))


def _copy_on_write(lazy: indexing.LazilyIndexedArray) -> Any:
    # xarray's annotation of the argument is narrower than what its own backends pass.
    return indexing.CopyOnWriteArray(lazy)  # type: ignore[arg-type]


def read_dtype(stored: npt.DTypeLike) -> np.dtype[Any]:
    """Return the dtype in which values are handed out: float16 means would overflow."""
    stored = np.dtype(stored)
    return np.dtype(np.float32) if stored == np.float16 else stored
