"""Writing one unit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import LocalStore

from attnlens.activations import ACTIVATIONS
from attnlens.errors import StoreError
from attnlens.store.files import clear_errors
from attnlens.store.layout import ROW_DIMS, Layout, stored_dims
from attnlens.store.schema import Manifest, UnitSpec, resolve_positions
from attnlens.store.shards import ArrayWriter


class UnitWriter:
    """Writes one unit; made by :meth:`StoreWriter.unit`.

    Parameters
    ----------
    folder : Path
        The unit's folder, under its temporary name.
    manifest : Manifest
    spec : UnitSpec
    """

    def __init__(self, folder: Path, manifest: Manifest, spec: UnitSpec) -> None:
        self._folder = folder
        self._manifest = manifest
        self.spec = spec
        self._arrays: dict[str, ArrayWriter] = {}
        self._statistics: dict[str, dict[str, npt.NDArray[Any]]] = {}
        self._tokens: npt.NDArray[np.int32] | None = None

    def tokens(self, tokens: npt.ArrayLike) -> None:
        """Write the unit's tokens.

        Parameters
        ----------
        tokens : array_like of int, shape [prompt, pos]
        """
        array = np.ascontiguousarray(tokens, dtype=np.int32)
        expected = (len(self.spec.prompts), self.spec.length)
        if array.shape != expected:
            raise StoreError(
                f"unit {self.spec.id}: tokens have shape {array.shape}, expected {expected}."
            )
        self._tokens = array

    def write(self, name: str, layer: int, prompts: slice, value: npt.NDArray[Any]) -> None:
        """Write an activation of some prompts of one layer.

        Parameters
        ----------
        name : str
            One of the manifest's activations.
        layer : int
            The layer's number in the model.
        prompts : slice
            Which of the unit's prompts, in any order and split; each exactly once.
        value : ndarray of float16, float32 or float64
            Over the activation's dimensions without ``layer``. Its dtype is how the unit stores
            it: one unit may need float32 where others do with the manifest's float16.

        Raises
        ------
        StoreError
            If shape or dtype is not what the unit and the earlier writes say, or the disk is full.
        """
        spec = self._manifest.activations.get(name)
        if spec is None or layer not in spec.layers:
            raise StoreError(f"{name} of layer {layer} is not in the store's manifest.")
        start, stop, _ = prompts.indices(len(self.spec.prompts))
        layout = self._layout(name, value)
        expected = (stop - start, *layout.shape[2:])
        if value.shape != expected or value.dtype != layout.dtype:
            raise StoreError(
                f"unit {self.spec.id}: {name} of layer {layer} is {value.dtype} {value.shape}, "
                f"expected {layout.dtype} {expected} over {self._dims(name)}."
            )
        with clear_errors(self._folder / name):
            self._arrays[name].write(spec.layers.index(layer), start, value)

    def _dims(self, name: str) -> str:
        return "[" + ", ".join(d for d in ACTIVATIONS[name].dims if d != "layer") + "]"

    def _layout(self, name: str, value: npt.NDArray[Any]) -> Layout:
        """Return the layout; the first value written says how many heads and components."""
        if name in self._arrays:
            return self._arrays[name].layout
        spec, activation = self._manifest.activations[name], ACTIVATIONS[name]
        dims = [d for d in activation.dims if d != "layer"]
        if value.ndim != len(dims):
            raise StoreError(
                f"unit {self.spec.id}: {name} has shape {value.shape}, expected {self._dims(name)}."
            )
        if value.dtype not in (np.float16, np.float32, np.float64):
            raise StoreError(f"unit {self.spec.id}: {name} is {value.dtype}, not a float.")
        known = {
            "prompt": len(self.spec.prompts),
            "layer": len(spec.layers),
            "key_pos": self.spec.length,
        }
        rows = len(resolve_positions(spec.positions, self.spec.length)[0])
        known |= dict.fromkeys(ROW_DIMS, rows)
        if spec.heads is not None and activation.head_dim:
            known[activation.head_dim] = len(spec.heads)
        found = dict(zip(dims, value.shape, strict=True))
        shape = [known.get(d, found.get(d, 0)) for d in activation.dims]
        layout = Layout.plan(activation, shape, value.dtype, self._manifest.batch_size)
        with clear_errors(self._folder / name):
            self._arrays[name] = ArrayWriter(self._folder / name, layout)
        return layout

    def statistic(self, name: str, state: Mapping[str, npt.ArrayLike]) -> None:
        """Write the partial sums of one statistic over this unit.

        Parameters
        ----------
        name : str
        state : mapping from str to array_like
            What ``Statistic.state()`` returned.
        """
        if name not in self._manifest.statistics:
            raise StoreError(f"{name} is not among the statistics of the store's manifest.")
        self._statistics[name] = {key: np.asarray(value) for key, value in state.items()}

    def finish(self) -> None:
        """Write all metadata; called when the unit's block ends without an error."""
        tokens = self._check_complete()
        group = zarr.create_group(LocalStore(self._folder), zarr_format=3)
        described: dict[str, tuple[Any, Any, dict[str, object]]] = {
            "tokens": (("prompt", "pos"), (len(self.spec.prompts), self.spec.length), {})
        }
        for name in self._manifest.activations:
            layout, spec = self._arrays[name].layout, self._manifest.activations[name]
            labels: dict[str, object] = {"layer": spec.layers}
            if ACTIVATIONS[name].head_dim:
                labels[str(ACTIVATIONS[name].head_dim)] = spec.heads
            labels |= dict.fromkeys(ROW_DIMS, spec.positions)
            described[name] = (ACTIVATIONS[name].dims, layout.shape, labels)
        dims = stored_dims(described)
        for name, writer in self._arrays.items():
            writer.finish()
            layout, spec = writer.layout, self._manifest.activations[name]
            group.create_array(
                name,
                shape=layout.shape,
                dtype=layout.dtype,
                chunks=layout.chunks,
                shards=layout.shards,
                compressors=layout.codecs(),
                fill_value=np.nan,
                dimension_names=dims[name],
                chunk_key_encoding={"name": "default", "separator": "."},
                attributes={
                    "long_name": ACTIVATIONS[name].what,
                    **spec.model_dump(exclude={"dtype"}, exclude_none=True),
                },
            )
        put_array(group, "tokens", tokens, dims["tokens"])
        ids = np.array(self.spec.prompts, dtype=np.int64)
        put_array(group, "prompt_id", ids, ("prompt",))
        for dim, numbers in self._numbers(dims).items():
            put_array(group, dim, numbers, (dim,))
        for name, state in sorted(self._statistics.items()):
            partial = group.create_group(f"statistics/{name}")
            for key, value in sorted(state.items()):
                put_array(partial, key, value, None)
        consolidate(self._folder)

    def _numbers(self, dims: Mapping[str, tuple[str, ...]]) -> dict[str, npt.NDArray[np.int64]]:
        """Return the numbers along dimensions that have some: coordinates to plain xarray."""
        found = {
            "prompt": np.array(self.spec.prompts, dtype=np.int64),
            "pos": np.arange(self.spec.length),
        }
        for name, stored in dims.items():
            if name not in self._arrays:
                continue
            spec, activation = self._manifest.activations[name], ACTIVATIONS[name]
            for own, dim, size in zip(
                activation.dims, stored, self._arrays[name].layout.shape, strict=True
            ):
                if own == "layer":
                    found[dim] = np.array(spec.layers, dtype=np.int64)
                elif own in ROW_DIMS:
                    found[dim] = resolve_positions(spec.positions, self.spec.length)[1]
                elif own == "key_pos" or (own == activation.head_dim and spec.heads is None):
                    found[dim] = np.arange(size)
                elif own == activation.head_dim:
                    found[dim] = np.array(spec.heads, dtype=np.int64)
        return found

    def _check_complete(self) -> npt.NDArray[np.int32]:
        for name, spec in self._manifest.activations.items():
            writer = self._arrays.get(name)
            gaps = writer.missing() if writer else np.array([[0, 0]])
            if len(gaps):
                prompt, layer = self.spec.prompts[gaps[0][0]], spec.layers[gaps[0][1]]
                raise StoreError(
                    f"unit {self.spec.id}: {name} of layer {layer}, prompt {prompt} was never "
                    "written."
                )
        for name in self._manifest.statistics:
            if name not in self._statistics:
                raise StoreError(f"unit {self.spec.id}: {name} was never written.")
        if self._tokens is None:
            raise StoreError(f"unit {self.spec.id}: its tokens were never written.")
        return self._tokens


def put_array(
    group: zarr.Group, name: str, value: npt.NDArray[Any], dims: tuple[str, ...] | None
) -> None:
    """Write a small array whole, in chunks of at most 16 MB along its first axis.

    Raises
    ------
    StoreError
        If it holds Python objects: there are no pickles in a store.
    """
    if value.dtype.kind not in "fiub":
        raise StoreError(f"{name} holds {value.dtype}; a store holds numbers only.")
    row = max(1, value.nbytes // max(1, value.shape[0])) if value.ndim else 1
    first = max(1, min(16 * 1024 * 1024 // row, value.shape[0])) if value.ndim else 1
    array = group.create_array(
        name,
        shape=value.shape,
        dtype=value.dtype,
        chunks=(first, *(max(1, n) for n in value.shape[1:])) if value.ndim else (),
        compressors=(ZstdCodec(level=1, checksum=True), Crc32cCodec()),
        dimension_names=dims,
        chunk_key_encoding={"name": "default", "separator": "."},
        config={"write_empty_chunks": True},
    )
    if value.size:
        array[...] = value


def consolidate(folder: Path) -> None:
    """Copy all metadata under `folder` into its own, so that opening reads one file."""
    with warnings.catch_warnings():
        # zarr warns that consolidated metadata is not yet in the v3 specification; every reader
        # that does not know it reads the arrays' own metadata instead.
        warnings.filterwarnings("ignore", message=".*[Cc]onsolidated metadata.*")
        zarr.consolidate_metadata(LocalStore(folder), zarr_format=3)
