"""Shard files, written as a stream and read chunk by chunk.

A shard of zarr v3 is its inner chunks one after another, then an index: offset and length of each
chunk (uint64, little-endian, C order, all ones where there is none) and the index's crc32c.
zarr-python writes a shard in one piece, or decodes and rewrites it for each piece; here pieces are
appended as they arrive, so that the memory needed does not grow with the shard. zarr reads the
result; the tests hold one against the other.

References
----------
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numcodecs  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from attnlens.errors import DamagedStoreError, StoreError
from attnlens.store.layout import Layout

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
        packed = bytes(self._codec.encode(np.ascontiguousarray(chunk)))
        return packed + _crc(packed)

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
        return bytes(self._codec.decode(packed))


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


class ShardReader:
    """Reads a shard's chunks one by one, to find the one that is damaged.

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
        If the file is missing, its index is damaged, or its size is not what the index says.
    """

    def __init__(self, folder: Path, layout: Layout, coordinates: tuple[int, ...]) -> None:
        self._layout = layout
        self._file = shard_file(folder, coordinates)
        per_shard = layout.chunks_per_shard
        length = 16 * math.prod(per_shard) + 4
        try:
            with self._file.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - length))
                tail = file.read()
        except FileNotFoundError:
            raise DamagedStoreError("is missing") from None
        if len(tail) != length or _crc(tail[:-4]) != tail[-4:]:
            raise DamagedStoreError("is cut short, or its index is altered")
        index = np.frombuffer(tail[:-4], dtype="<u8").reshape(*per_shard, 2)
        present = index[..., 0] != _EMPTY
        end = int((index[..., 0] + index[..., 1])[present].max(initial=0))
        if end + length != size:
            raise DamagedStoreError(f"has {size} bytes where its index says {end + length}")
        self.index = index
        expected = [
            min(n, math.ceil((total - at * s) / c))
            for n, total, at, s, c in zip(
                per_shard, layout.shape, coordinates, layout.shards, layout.chunks, strict=True
            )
        ]
        for inside in itertools.product(*map(range, expected)):
            if not present[inside]:
                raise DamagedStoreError(f"has no inner chunk {_dotted(inside)}")
        self._inside = [tuple(map(int, i)) for i in np.argwhere(present)]

    def decode_all(self) -> None:
        """Decode every chunk.

        Raises
        ------
        DamagedStoreError
            Naming the first that does not decode.
        """
        codec = Codec(self._layout)
        raw = math.prod(self._layout.chunks) * self._layout.dtype.itemsize
        with self._file.open("rb") as file:
            for inside in self._inside:
                offset, length = map(int, self.index[inside])
                file.seek(offset)
                try:
                    got = len(codec.decode(file.read(length)))
                except (ValueError, RuntimeError) as error:
                    raise DamagedStoreError(f"inner chunk {_dotted(inside)}: {error}") from error
                if got != raw:
                    raise DamagedStoreError(
                        f"inner chunk {_dotted(inside)}: {got} bytes where {raw} were stored"
                    )


def _dotted(coordinates: tuple[int, ...]) -> str:
    return ".".join(map(str, coordinates))
