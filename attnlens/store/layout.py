"""How an activation lies inside a unit: chunks, shards, codecs, and names of dimensions.

One shard is one layer x all heads (at most :data:`SHARD_BYTES` raw), so that one file is one piece
of work; one inner chunk is one head (about :data:`CHUNK_BYTES` raw), so that one head is read
without its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from attnlens.activations import Activation

#: Raw bytes of one inner chunk, about.
CHUNK_BYTES: Final = 512 * 1024

#: Most raw bytes of one shard.
SHARD_BYTES: Final = 256 * 1024 * 1024

#: Most raw bytes that wait in memory, for one layer, until prompts of several batches fill a chunk.
_WAITING_BYTES: Final = 256 * 1024

#: Dimensions along which positions are chosen, and along which ragged prompts are padded.
ROW_DIMS: Final = ("pos", "query_pos")
RAGGED_DIMS: Final = ("pos", "query_pos", "key_pos")


@dataclass(frozen=True)
class Layout:
    """Shape and chunking of one activation in one unit.

    Attributes
    ----------
    activation : Activation
    shape : tuple of int
        Over the activation's dimensions.
    dtype : numpy.dtype
    chunks, shards : tuple of int
        Of an inner chunk and of a shard; each shard is a whole number of chunks.
    """

    activation: Activation
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    shards: tuple[int, ...]

    @classmethod
    def plan(
        cls,
        activation: Activation,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        batch_size: int,
    ) -> Layout:
        """Choose chunks and shards.

        Parameters
        ----------
        activation : Activation
        shape : sequence of int
            Over the activation's dimensions, for the whole unit.
        dtype : dtype
        batch_size : int
            Prompts that arrive together: chunks are aligned with it, so that few values wait.
        """
        dtype = np.dtype(dtype)
        dims = activation.dims
        sizes = dict(zip(dims, shape, strict=True))
        row_dim = next(d for d in dims if d in ROW_DIMS)
        heads = sizes[activation.head_dim] if activation.head_dim else 1
        row_bytes = dtype.itemsize * math.prod(
            n
            for d, n in sizes.items()
            if d not in ("prompt", "layer", row_dim, activation.head_dim)
        )
        prompts, rows = sizes["prompt"], max(sizes[row_dim], 1)

        blocks = min(rows, math.ceil(rows * row_bytes / CHUNK_BYTES))
        chunk_rows = math.ceil(rows / blocks)
        chunk_prompts = _chunk_prompts(rows * row_bytes, heads, min(batch_size, prompts))
        chunk_prompts = min(chunk_prompts, prompts)

        prompt_bytes = rows * row_bytes * heads
        shard_prompts = math.ceil(prompts / math.ceil(prompts * prompt_bytes / SHARD_BYTES))
        shard_prompts = chunk_prompts * math.ceil(shard_prompts / chunk_prompts)
        if shard_prompts * prompt_bytes > SHARD_BYTES and shard_prompts > chunk_prompts:
            shard_prompts -= chunk_prompts
        shard_rows = chunk_rows * math.ceil(rows / chunk_rows)
        while shard_rows > chunk_rows and (
            shard_prompts * heads * shard_rows * row_bytes > SHARD_BYTES
        ):
            shard_rows = chunk_rows * math.ceil(shard_rows / chunk_rows / 2)

        special = {"prompt": chunk_prompts, "layer": 1, row_dim: chunk_rows}
        if activation.head_dim:
            special[activation.head_dim] = 1
        chunks = tuple(special.get(d, max(sizes[d], 1)) for d in dims)
        special |= {"prompt": shard_prompts, row_dim: shard_rows}
        if activation.head_dim:
            special[activation.head_dim] = heads
        shards = tuple(special.get(d, max(sizes[d], 1)) for d in dims)
        return cls(activation, tuple(shape), dtype, chunks, shards)

    @property
    def chunks_per_shard(self) -> tuple[int, ...]:
        """Number of inner chunks in a shard, along each dimension."""
        return tuple(s // c for s, c in zip(self.shards, self.chunks, strict=True))

    def codecs(self) -> tuple[Any, ...]:
        """Return zarr's compressors for the inner chunks."""
        if self.activation.codec == "zstd":
            return (ZstdCodec(level=1, checksum=True), Crc32cCodec())
        return (
            BloscCodec(typesize=self.dtype.itemsize, cname="lz4", clevel=5, shuffle="bitshuffle"),
            Crc32cCodec(),
        )


def _chunk_prompts(prompt_bytes: int, heads: int, batch: int) -> int:
    """Choose how many prompts share a chunk, given the bytes of one prompt's head."""
    most = max(1, CHUNK_BYTES // max(prompt_bytes, 1))
    if most <= batch:
        return max(n for n in range(1, most + 1) if batch % n == 0)
    waiting = _WAITING_BYTES // max(prompt_bytes * heads, 1)
    return batch * max(1, min(most, waiting) // batch)


def stored_dims(
    arrays: Mapping[str, tuple[Sequence[str], Sequence[int], Mapping[str, object]]],
) -> dict[str, tuple[str, ...]]:
    """Name the dimensions of several arrays so that one xarray dataset can hold them all.

    Parameters
    ----------
    arrays : mapping from name to (dims, shape, labels)
        `labels` says, for some of the dimensions, what they hold (chosen layers, say).

    Returns
    -------
    dict from name to tuple of str
        The dimensions; where two arrays mean different things by ``layer``, the later one gets
        ``NAME_layer``.
    """
    taken: dict[str, tuple[int, object]] = {}
    names: dict[str, tuple[str, ...]] = {}
    for array, (dims, shape, labels) in arrays.items():
        chosen = []
        for dim, size in zip(dims, shape, strict=True):
            meaning = (size, labels.get(dim))
            if taken.setdefault(dim, meaning) != meaning:
                dim = f"{array}_{dim}"
                taken[dim] = meaning
            chosen.append(dim)
        names[array] = tuple(chosen)
    return names
