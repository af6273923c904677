"""Shard files, written as a stream and read chunk by chunk.

A shard of zarr v3 is its inner chunks one after another, then an index: offset and length of each
chunk (uint64, little-endian, C order, all ones where there is none) and the index's crc32c.
zarr-python writes a shard in one piece, or decodes and rewrites it for each piece; here pieces are
appended as they arrive, so that the memory needed does not grow with the shard. Reading chunk by
chunk is several times faster than through zarr's event loop, and tells which chunk is missing or
altered, where zarr gives the fill value. zarr reads the same files: the tests hold one against the
other.

References
----------
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numcodecs  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from attnlens.errors import DamagedStoreError, StoreError
from attnlens.store.layout import Layout

Index = npt.NDArray[np.intp]

_EMPTY: Final = np.uint64(2**64 - 1)


class Codec:
    """Compression of inner chunks: what :meth:`Layout.codecs` tells zarr, called directly.

    Parameters
    ----------
    layout : Layout
    """

    def __init__(self, layout: Layout) -> None:
        self._codec = (
            numcodecs.Zstd(level=1, checksum=True)
            if layout.activation.codec == "zstd"
            else numcodecs.Blosc("lz4", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
        )

    def encode(self, chunk: npt.NDArray[Any]) -> bytes:
        """Compress one chunk and append its crc32c."""
        packed = self._codec.encode(np.ascontiguousarray(chunk))
        return bytes(packed) + _crc(packed)

    def decode(self, data: bytes) -> bytes:
        """Undo :meth:`encode`.

        Raises
        ------
        ValueError
            If the checksum does not match.
        """
        packed = data[:-4]
        if _crc(packed) != data[-4:]:
            raise ValueError("its checksum does not match")
        raw: bytes = self._codec.decode(packed)
        return raw


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(4, "little")


def shard_file(folder: Path, coordinates: tuple[int, ...]) -> Path:
    """Return the path of one shard of the array at `folder`."""
    return folder / ".".join(["c", *map(str, coordinates)])


def shard_grid(layout: Layout) -> Iterator[tuple[int, ...]]:
    """Yield the coordinates of every shard of an array."""
    counts = (math.ceil(n / s) for n, s in zip(layout.shape, layout.shards, strict=True))
    return itertools.product(*map(range, counts))


class ArrayWriter:
    """Writes one activation of one unit.

    Parameters
    ----------
    folder : Path
        The array's folder.
    layout : Layout
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.layout = layout
        self._folder = folder
        self._codec = Codec(layout)
        self._index: dict[tuple[int, ...], npt.NDArray[np.uint64]] = {}
        self._size: dict[tuple[int, ...], int] = {}
        self._written = np.zeros(layout.shape[:2], dtype=bool)
        self._waiting: dict[tuple[int, int], npt.NDArray[Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, layer: int, start: int, value: npt.NDArray[Any]) -> None:
        """Write some prompts of one layer.

        Parameters
        ----------
        layer : int
            Index along the ``layer`` dimension.
        start : int
            Index of the first of the prompts.
        value : ndarray
            Over the activation's dimensions without ``layer``.
        """
        stop = start + value.shape[0]
        if self._written[start:stop, layer].any():
            raise StoreError(
                f"{self.layout.activation.name}: prompts {start} to {stop - 1} of layer index "
                f"{layer} were written twice."
            )
        self._written[start:stop, layer] = True
        step = self.layout.chunks[0]
        for chunk in range(start // step, math.ceil(stop / step)):
            low, high = chunk * step, min((chunk + 1) * step, self.layout.shape[0])
            part = value[max(low - start, 0) : high - start]
            if part.shape[0] == high - low:
                self._append(layer, chunk, part)
            else:
                self._wait(layer, chunk, slice(max(low, start) - low, min(high, stop) - low), part)

    def _wait(self, layer: int, chunk: int, where: slice, part: npt.NDArray[Any]) -> None:
        """Keep prompts until others fill their chunk."""
        step = self.layout.chunks[0]
        low, high = chunk * step, min((chunk + 1) * step, self.layout.shape[0])
        key = (layer, chunk)
        if key not in self._waiting:
            self._waiting[key] = np.empty((high - low, *part.shape[1:]), dtype=self.layout.dtype)
        self._waiting[key][where] = part
        if self._written[low:high, layer].all():
            self._append(layer, chunk, self._waiting.pop(key))

    def _append(self, layer: int, prompt_chunk: int, value: npt.NDArray[Any]) -> None:
        """Append all chunks of one run of prompts to the layer's shards."""
        layout = self.layout
        per_shard = layout.chunks_per_shard
        starts = [range(0, n, c) for n, c in zip(layout.shape[2:], layout.chunks[2:], strict=True)]
        pieces: dict[tuple[int, ...], list[tuple[tuple[int, ...], bytes]]] = {}
        for corner in itertools.product(*starts):
            where = tuple(slice(s, s + c) for s, c in zip(corner, layout.chunks[2:], strict=True))
            chunk = _padded(value[(slice(None), *where)], (layout.chunks[0], *layout.chunks[2:]))
            coordinates = (
                prompt_chunk,
                layer,
                *(s // c for s, c in zip(corner, layout.chunks[2:], strict=True)),
            )
            shard = tuple(i // n for i, n in zip(coordinates, per_shard, strict=True))
            inside = tuple(i % n for i, n in zip(coordinates, per_shard, strict=True))
            pieces.setdefault(shard, []).append((inside, self._codec.encode(chunk)))
        for shard, parts in pieces.items():
            index = self._index.setdefault(shard, np.full((*per_shard, 2), _EMPTY, dtype="<u8"))
            size = self._size.get(shard, 0)
            for inside, data in parts:
                index[inside] = (size, len(data))
                size += len(data)
            self._size[shard] = size
            with shard_file(self._folder, shard).open("ab") as file:
                file.writelines(data for _, data in parts)

    def missing(self) -> npt.NDArray[np.intp]:
        """Return (prompt index, layer index) of everything not yet written."""
        return np.argwhere(~self._written)

    def finish(self) -> None:
        """Append the index to every shard."""
        for shard, index in self._index.items():
            data = index.tobytes()
            with shard_file(self._folder, shard).open("ab") as file:
                file.write(data + _crc(data))


def _padded(chunk: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Fill a chunk at the array's edge up to its full shape, as the format asks."""
    if chunk.shape == shape:
        return chunk
    full = np.zeros(shape, dtype=chunk.dtype)
    full[tuple(slice(n) for n in chunk.shape)] = chunk
    return full


class ShardFile:
    """One shard, opened for reading.

    Parameters
    ----------
    folder : Path
        The array's folder.
    layout : Layout
    coordinates : tuple of int
        Of the shard.

    Raises
    ------
    DamagedStoreError
        If the file is missing, its index is damaged, or its size is not what the index says, or
        the index lacks a chunk.
    """

    def __init__(self, folder: Path, layout: Layout, coordinates: tuple[int, ...]) -> None:
        self._layout = layout
        self._codec = Codec(layout)
        self._path = shard_file(folder, coordinates)
        per_shard = layout.chunks_per_shard
        length = 16 * math.prod(per_shard) + 4
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - length))
                tail = file.read()
        except FileNotFoundError:
            raise self._damaged("is missing") from None
        if len(tail) != length or _crc(tail[:-4]) != tail[-4:]:
            raise self._damaged("is cut short, or its index is altered")
        self._index = np.frombuffer(tail[:-4], dtype="<u8").reshape(*per_shard, 2)
        present = self._index[..., 0] != _EMPTY
        end = int(self._index.sum(-1)[present].max(initial=0))
        if end + length != size:
            raise self._damaged(f"has {size} bytes where its index says {end + length}")
        # Chunks that lie wholly beyond the array's edge are not written.
        self._chunks = list(
            itertools.product(
                *(
                    range(min(n, math.ceil((total - at * s) / c)))
                    for n, total, at, s, c in zip(
                        per_shard,
                        layout.shape,
                        coordinates,
                        layout.shards,
                        layout.chunks,
                        strict=True,
                    )
                )
            )
        )
        for inside in self._chunks:
            if not present[inside]:
                raise self._damaged(f"lacks inner chunk {_dotted(inside)}")

    def _damaged(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(f"chunk {self._path.name} {what}")

    def read(self, chunks: Iterable[tuple[int, ...]]) -> Iterator[npt.NDArray[Any]]:
        """Yield inner chunks by their coordinates in the shard.

        Raises
        ------
        DamagedStoreError
            Naming the first that does not decode.
        """
        layout = self._layout
        try:
            with self._path.open("rb") as file:
                for inside in chunks:
                    offset, length = map(int, self._index[inside])
                    file.seek(offset)
                    try:
                        raw = self._codec.decode(file.read(length))
                        yield np.frombuffer(raw, dtype=layout.dtype).reshape(layout.chunks)
                    except (ValueError, RuntimeError) as error:
                        raise self._damaged(f"inner chunk {_dotted(inside)}: {error}") from error
        except FileNotFoundError:
            raise self._damaged("is missing") from None

    def decode_all(self) -> None:
        """Decode every chunk.

        Raises
        ------
        DamagedStoreError
            Naming the first that does not decode.
        """
        for _ in self.read(self._chunks):
            pass


class ArrayReader:
    """Reads one activation of one unit, touching only the chunks that are asked for.

    Parameters
    ----------
    folder : Path
        The array's folder.
    layout : Layout
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.layout = layout
        self._folder = folder

    def read(self, selection: Sequence[Index], out: npt.NDArray[Any]) -> None:
        """Read the outer product of `selection` into `out`, cast to its dtype.

        Parameters
        ----------
        selection : sequence of ndarray of int
            Indices along each dimension, in any order.
        out : ndarray
            With as many elements along each dimension as there are indices.

        Raises
        ------
        DamagedStoreError
            If a chunk is missing or altered.
        """
        steps = [_steps(i, c) for i, c in zip(selection, self.layout.chunks, strict=True)]
        per_shard = self.layout.chunks_per_shard
        shards: dict[tuple[int, ...], list[tuple[tuple[int, ...], Any, Any]]] = {}
        for step in itertools.product(*steps):
            numbers = [s[0] for s in step]
            shard = tuple(i // n for i, n in zip(numbers, per_shard, strict=True))
            inside = tuple(i % n for i, n in zip(numbers, per_shard, strict=True))
            parts = (inside, tuple(s[1] for s in step), tuple(s[2] for s in step))
            shards.setdefault(shard, []).append(parts)
        for shard, wanted in shards.items():
            file = ShardFile(self._folder, self.layout, shard)
            chunks = file.read(inside for inside, _, _ in wanted)
            for chunk, (_, source, target) in zip(chunks, wanted, strict=True):
                out[outer(target)] = chunk[outer(source)]


Step = tuple[int, "slice | Index", "slice | Index"]


def _steps(index: Index, chunk: int) -> list[Step]:
    """Split indices along one dimension by the chunk that they lie in.

    Returns
    -------
    list of (chunk's number, indices within it, places in the result)
    """
    numbers = index // chunk
    found: list[Step] = []
    for number in np.unique(numbers):
        places = np.flatnonzero(numbers == number)
        inside = index[places] - number * chunk
        found.append((int(number), as_slice(inside), as_slice(places)))
    return found


def as_slice(index: Index) -> slice | Index:
    """Turn a run of consecutive indices into a slice, which is faster."""
    if len(index) == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index) and (len(index) < 3 or bool((np.diff(index) == 1).all())):
        return slice(first, last + 1)
    return index


def outer(selection: Sequence[slice | Index]) -> tuple[Any, ...]:
    """Return an index for numpy that selects the outer product."""
    arrays = [i for i, s in enumerate(selection) if not isinstance(s, slice)]
    if len(arrays) < 2:
        # One array among slices means the outer product already.
        return tuple(selection)
    return np.ix_(*(np.arange(s.start, s.stop) if isinstance(s, slice) else s for s in selection))


def _dotted(coordinates: tuple[int, ...]) -> str:
    return ".".join(map(str, coordinates))
