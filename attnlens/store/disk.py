"""What a store's folder holds, made into units, weights and vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import xarray as xr

from attnlens.errors import DamagedStoreError
from attnlens.store.blocks import ZarrBlock
from attnlens.store.lazy import Single
from attnlens.store.schema import VOCABULARY, WEIGHTS, Manifest, UnitSpec
from attnlens.store.units import State, Unit
from attnlens.store.weights import Weights, weight_dims


def disk_unit(folder: Path, spec: UnitSpec, manifest: Manifest, weights: Weights) -> Unit:
    """Return a unit that lies in a folder."""
    names = ("tokens", "prompt_id", *manifest.activations)
    blocks = {name: ZarrBlock(folder, name) for name in names}
    return Unit(spec, manifest, blocks, weights, _DiskStates(folder, manifest))


class _DiskStates(Mapping[str, State]):
    """Partial sums on disk, read when they are asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._names = manifest.statistics

    def __getitem__(self, name: str) -> State:
        if name not in self._names:
            raise KeyError(name)
        group = f"statistics/{name}"
        keys = sorted(p.name for p in (self._folder / group).iterdir() if p.is_dir())
        return {key: ZarrBlock(self._folder, f"{group}/{key}").read_all() for key in keys}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted; none if it is not there."""
    return sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []


def disk_vocabulary(folder: Path, manifest: Manifest) -> list[str]:
    """Read the literal text of every token id.

    Raises
    ------
    DamagedStoreError
        If the file is missing, altered or cannot be read.
    """
    try:
        data = (folder / VOCABULARY).read_bytes()
        if hashlib.sha256(data).hexdigest() != manifest.vocabulary_hash:
            raise DamagedStoreError(
                f"{folder / VOCABULARY} was altered: its checksum does not fit its content.",
                hint="Restore it from a copy, or capture again.",
            )
        return [str(t) for t in json.loads(data.decode("utf-8", "surrogatepass"))]
    except (OSError, ValueError) as error:
        raise DamagedStoreError(
            f"{folder / VOCABULARY} cannot be read: {error}.",
            hint="Restore it from a copy, or capture again.",
        ) from error


def disk_weights(folder: Path, manifest: Manifest) -> xr.Dataset:
    """Return the model's weights, lazy."""
    variables = {}
    for name in manifest.weights:
        block = ZarrBlock(folder / WEIGHTS, name)
        dims = getattr(block.array.metadata, "dimension_names", None) or weight_dims(
            name, len(block.shape)
        )
        variables[name] = Single(block).variable([str(d) for d in dims])
    return xr.Dataset(variables)
