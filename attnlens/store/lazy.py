"""Arrays that are read when they are used, one unit at a time.

xarray reads zarr lazily but joins several stores only with dask. :class:`Joined` joins units
itself, through xarray's documented interface for backends, so that dask stays optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from attnlens.store.blocks import Block
from attnlens.store.shards import Index, as_slice, outer


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
        out = np.empty([len(i) for i in selection], dtype=self.dtype)
        if out.size:
            self.block.read_into(selection, out)
        return out


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
        self._ragged = any(
            place is not None and (place < 0).any() for p in pieces for place in p.places
        )
        for number, piece in enumerate(pieces):
            self._owner[piece.prompts] = number
            self._local[piece.prompts] = np.arange(len(piece.prompts))

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
        """Read the outer product of the indices, unit by unit."""
        out = np.empty([len(i) for i in selection], dtype=self.dtype)
        if self._ragged:
            out.fill(np.nan)
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
                self._fill(out, piece.block, source, target)
        return out

    def _fill(
        self,
        out: npt.NDArray[Any],
        block: Block,
        source: Sequence[Index],
        target: Sequence[Index],
    ) -> None:
        """Read one unit's part to where it belongs."""
        where = [as_slice(i) for i in target]
        if all(isinstance(w, slice) for w in where):
            block.read_into(source, out[tuple(where)])
            return
        part = np.empty([len(i) for i in source], dtype=self.dtype)
        block.read_into(source, part)
        out[outer(where)] = part


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
