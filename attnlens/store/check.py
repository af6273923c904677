"""Find out whether everything is there, and unaltered."""

from __future__ import annotations

import enum
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlens.errors import DamagedStoreError, StoreError
from attnlens.store.blocks import ZarrBlock
from attnlens.store.schema import (
    CORPORA,
    MANIFEST,
    TWINS,
    UNITS,
    VOCABULARY,
    WEIGHTS,
    Manifest,
    UnitSpec,
    load_manifest,
)
from attnlens.store.shards import ShardFile, shard_grid


class Depth(enum.IntEnum):
    """How closely to look."""

    PRESENCE = 0
    SIZE = 1
    CONTENT = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a store.

    Attributes
    ----------
    where : str
        Unit and array, or file.
    what : str
        What is wrong with it.
    path : Path
        The folder of the store in which it is.
    """

    where: str
    what: str
    path: Path

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def array_problems(block: ZarrBlock, *, deep: bool) -> Iterator[str]:
    """Yield what is wrong with one array on disk.

    Parameters
    ----------
    block : ZarrBlock
    deep : bool
        Decode every chunk, too.
    """
    layout = block.layout
    folder = block.folder / block.name
    if layout is None:
        if deep:
            yield from _plain_problems(block)
        return
    for shard in shard_grid(layout):
        try:
            file = ShardFile(folder, layout, shard)
            if deep:
                file.decode_all()
        except DamagedStoreError as error:
            yield error.message


def _plain_problems(block: ZarrBlock) -> Iterator[str]:
    """Decode, chunk by chunk, an array that zarr wrote whole."""
    array = block.array
    if 0 in array.shape:
        return
    counts = [-(-n // c) for n, c in zip(array.shape, array.chunks, strict=True)]
    for chunk in np.ndindex(*counts):
        try:
            array.get_block_selection(chunk)
        except Exception as error:
            yield f"chunk {'.'.join(['c', *map(str, chunk)])} cannot be decoded: {error}"


def unit_arrays(folder: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return the metadata of every array that a unit must hold, by name.

    Raises
    ------
    DamagedStoreError
        If the unit's metadata cannot be read, or lacks one of them.
    """
    try:
        text = (folder / "zarr.json").read_text(encoding="utf-8")
        known: dict[str, dict[str, Any]] = json.loads(text)["consolidated_metadata"]["metadata"]
    except FileNotFoundError:
        raise DamagedStoreError("zarr.json is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStoreError(f"zarr.json cannot be read: {error}") from error
    arrays = {name: meta for name, meta in known.items() if meta.get("node_type") == "array"}
    wanted = ["tokens", "prompt_id", *manifest.activations]
    # Numbers along dimensions: plain xarray reads them.
    wanted += [name for name in arrays if "/" not in name and name not in wanted]
    for name in manifest.statistics:
        partial = [key for key in arrays if key.startswith(f"statistics/{name}/")]
        wanted += partial or [f"statistics/{name}"]
    for name in wanted:
        if name not in arrays:
            raise DamagedStoreError(f"{name} is missing")
    return {name: arrays[name] for name in wanted}


def quick_problems(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (place, what is wrong) of what opening must refuse: whatever is not there.

    Nothing is decoded and no index is read, so that opening stays fast.
    """
    for unit in manifest.units:
        yield from unit_problems(folder, manifest, unit, depth=Depth.PRESENCE)
    yield from _weight_problems(folder, manifest, depth=Depth.PRESENCE)


def unit_problems(
    folder: Path, manifest: Manifest, unit: UnitSpec, *, depth: Depth
) -> Iterator[tuple[str, str]]:
    """Yield (place, what is wrong) for one unit of the store at `folder`."""
    place = f"{UNITS}/{unit.folder}"
    root = folder / UNITS / unit.folder
    if not root.is_dir():
        yield place, "is missing"
        return
    try:
        for name, meta in unit_arrays(root, manifest).items():
            for what in _array_problems(root, name, meta, depth):
                yield f"{place}: {name}", what
        if depth > Depth.PRESENCE:
            found = ZarrBlock(root, "prompt_id").read_all().tolist()
            if found != unit.prompts:
                yield place, f"holds the prompts {found}, not {unit.prompts}"
    except StoreError as error:
        yield place, error.message


def _array_problems(root: Path, name: str, meta: dict[str, Any], depth: Depth) -> Iterator[str]:
    absent = list(_absent(root / name, meta))
    yield from absent
    if absent or depth is Depth.PRESENCE:
        return
    try:
        yield from array_problems(ZarrBlock(root, name), deep=depth is Depth.CONTENT)
    except StoreError as error:
        yield error.message


def _weight_problems(
    folder: Path, manifest: Manifest, *, depth: Depth
) -> Iterator[tuple[str, str]]:
    root = folder / WEIGHTS
    for name in manifest.weights:
        place = f"{WEIGHTS}: {name}"
        try:
            meta = json.loads((root / name / "zarr.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            yield place, "zarr.json is missing or cannot be read"
            continue
        for what in _array_problems(root, name, meta, depth):
            yield place, what


def _absent(folder: Path, meta: dict[str, Any]) -> Iterator[str]:
    """Yield which of an array's files are not there."""
    try:
        names = {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        yield "is missing"
        return
    try:
        shape, chunks = meta["shape"], meta["chunk_grid"]["configuration"]["chunk_shape"]
        counts = [-(-n // c) for n, c in zip(shape, chunks, strict=True)]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        yield "its metadata does not make sense"
        return
    if "zarr.json" not in names:
        yield "zarr.json is missing"
    for chunk in itertools.product(*map(range, counts)):
        name = ".".join(["c", *map(str, chunk)])
        if name not in names:
            yield f"chunk {name} is missing"


def verify(path: str | Path, deep: bool = False) -> list[Problem]:
    """Check a store, with its twins and other corpora.

    Parameters
    ----------
    path : path
    deep : bool
        Decode every chunk and compare its checksum; otherwise only that everything is there and
        has the size that it should have.

    Returns
    -------
    list of Problem
        Empty if all is well.

    Raises
    ------
    StoreError
        If there is no store, or its manifest cannot be read.
    """
    folder = Path(path)
    manifest = load_manifest(folder)
    problems = [Problem(w, t, folder) for w, t in _store_problems(folder, manifest, deep=deep)]
    for companion in companions(folder):
        problems += [
            Problem(f"{companion.relative_to(folder)}/{p.where}", p.what, p.path)
            for p in verify(companion, deep)
        ]
    return problems


def companions(folder: Path) -> Iterator[Path]:
    """Yield the folders of a store's twins and of its other corpora."""
    for kind in (TWINS, CORPORA):
        if (folder / kind).is_dir():
            yield from sorted(p for p in (folder / kind).iterdir() if p.is_dir())


def _store_problems(folder: Path, manifest: Manifest, *, deep: bool) -> Iterator[tuple[str, str]]:
    depth = Depth.CONTENT if deep else Depth.SIZE
    if not manifest.sealed:
        yield MANIFEST, "the store was not finished; finish it with --resume"
    for unit in manifest.units:
        if manifest.sealed or (folder / UNITS / unit.folder).is_dir():
            yield from unit_problems(folder, manifest, unit, depth=depth)
    yield from _weight_problems(folder, manifest, depth=depth)
    if manifest.vocabulary:
        from attnlens.store.disk import disk_vocabulary

        try:
            disk_vocabulary(folder, manifest)
        except DamagedStoreError as error:
            yield VOCABULARY, error.message
