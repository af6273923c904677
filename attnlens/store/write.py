"""Writing a store, unit by unit."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import LocalStore

from attnlens.errors import OutputError, StoreError
from attnlens.store.files import (
    TEMPORARY,
    WriterLock,
    clear_errors,
    fsync_folder,
    new_folder,
    remove,
    sweep,
    write_atomically,
)
from attnlens.store.layout import stored_dims
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
from attnlens.store.weights import weight_dims
from attnlens.store.write_unit import UnitWriter, consolidate, put_array

if TYPE_CHECKING:
    from attnlens.store.read import Store

__all__ = ["StoreWriter", "UnitWriter"]


class StoreWriter:
    """Writes one store; at most one process at a time.

    Made by :meth:`create` or :meth:`resume`; use it as a context manager, or call :meth:`close`
    or :meth:`seal`.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: WriterLock) -> None:
        self.path = path
        self.manifest = manifest
        self._lock: WriterLock | None = lock

    @classmethod
    def create(
        cls, path: str | Path, manifest: Manifest, *, overwrite: bool = False
    ) -> StoreWriter:
        """Begin a store.

        Parameters
        ----------
        path : path
            Folder of the store; made with its parents if need be.
        manifest : Manifest
            What it will hold.
        overwrite : bool
            Replace a store that is there.

        Raises
        ------
        OutputError
            If something is there already, or the folder cannot be made.
        StoreLockedError
            If another process is writing there.
        """
        folder = Path(path)
        lock = _claim(folder)
        try:
            with clear_errors(folder):
                _make_room(folder, lock, overwrite=overwrite)
                (folder / UNITS).mkdir()
            manifest = manifest.model_copy(
                update={"sealed": False, "weights": [], "vocabulary": False, "vocabulary_hash": ""}
            )
            manifest.save(folder)
        except BaseException:
            lock.release()
            raise
        return cls(folder, manifest, lock)

    @classmethod
    def resume(cls, path: str | Path, manifest: Manifest) -> StoreWriter:
        """Go on with a store that was interrupted; begin it where there is none.

        Raises
        ------
        StoreError
            If what is there was begun with another manifest; the message says what differs.
        StoreLockedError
            If another process is writing there.
        """
        folder = Path(path)
        if not (folder / MANIFEST).exists():
            return cls.create(folder, manifest)
        lock = _claim(folder)
        try:
            found = load_manifest(folder)
            different = list(found.differences(manifest))
            if different:
                raise StoreError(
                    f"{folder} was begun with other settings: {'; '.join(different[:6])}"
                    + (f"; and {len(different) - 6} more." if len(different) > 6 else "."),
                    hint="Resume with the same settings, or start again with --overwrite.",
                )
            sweep(folder)
            sweep(folder / UNITS)
        except BaseException:
            lock.release()
            raise
        return cls(folder, found, lock)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def missing_units(self) -> list[UnitSpec]:
        """Return the units that are still to be written, in the manifest's order."""
        units = self.path / UNITS
        return [u for u in self.manifest.units if not (units / u.folder).is_dir()]

    @contextlib.contextmanager
    def unit(self, spec: UnitSpec) -> Iterator[UnitWriter]:
        """Write one unit: it is there, whole, when the block has ended without an error."""
        target = self.path / UNITS / spec.folder
        if target.exists():
            raise StoreError(f"unit {spec.id} of {self.path} has been written already.")
        with new_folder(target) as temporary:
            writer = UnitWriter(temporary, self.manifest, spec)
            yield writer
            with clear_errors(target):
                writer.finish()

    def weights(self, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the model's weights, under their TransformerLens names.

        Parameters
        ----------
        weights : mapping from str to ndarray
            ``W_Q`` over [layer, head, d_model, d_head] and so on.
        """
        if self.manifest.weights and (self.path / WEIGHTS).is_dir():
            return
        arrays = {name: np.ascontiguousarray(value) for name, value in weights.items()}
        described: dict[str, tuple[Any, Any, dict[str, object]]] = {
            name: (weight_dims(name, value.ndim), value.shape, {})
            for name, value in sorted(arrays.items())
        }
        dims = stored_dims(described)
        with clear_errors(self.path / WEIGHTS):
            remove(self.path / WEIGHTS)
        with new_folder(self.path / WEIGHTS) as temporary:
            group = zarr.create_group(LocalStore(temporary), zarr_format=3)
            for name in sorted(arrays):
                put_array(group, name, arrays[name], dims[name])
            consolidate(temporary)
        self._update(weights=sorted(arrays))

    def vocabulary(self, texts: list[str]) -> None:
        """Write the literal text of every token id."""
        data = json.dumps(texts, ensure_ascii=False).encode("utf-8", "surrogatepass")
        write_atomically(self.path / VOCABULARY, data)
        self._update(vocabulary=True, vocabulary_hash=hashlib.sha256(data).hexdigest())

    def _update(self, **fields: Any) -> None:
        self.manifest = self.manifest.model_copy(update=fields)
        self.manifest.save(self.path)

    def seal(self) -> Store:
        """Say that everything is there, and open the store.

        Raises
        ------
        StoreError
            If a unit is missing.
        """
        from attnlens.store.read import Store

        missing = self.missing_units()
        if missing:
            raise StoreError(
                f"{self.path} cannot be sealed: {len(missing)} of {len(self.manifest.units)} "
                f"units are missing, the first is {missing[0].id}."
            )
        with clear_errors(self.path):
            fsync_folder(self.path / UNITS)
        self._update(sealed=True)
        self.close()
        return Store.open(self.path)

    def close(self) -> None:
        """Stop writing; what is not sealed can be resumed."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _claim(folder: Path) -> WriterLock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be made: {error.strerror}.",
            hint="Choose another folder.",
        ) from error
    return WriterLock(folder)


#: What a writer puts into a store's folder, and may take out again.
_OWN = frozenset({MANIFEST, UNITS, WEIGHTS, VOCABULARY, TWINS, CORPORA})


def _make_room(folder: Path, lock: WriterLock, *, overwrite: bool) -> None:
    """Empty the folder, if it may be emptied."""
    there = [p for p in folder.iterdir() if not lock.covers(p)]
    if not there:
        return
    if not (folder / MANIFEST).exists() and not (folder / UNITS).exists():
        raise OutputError(
            f"{folder} is not empty and is no store: {there[0].name} is in it.",
            hint="Choose another folder; attnlens removes nothing that it did not write.",
        )
    if not overwrite:
        raise OutputError(
            f"There is a store at {folder} already.",
            hint="Finish it with --resume, replace it with --overwrite, or choose another folder.",
        )
    # The manifest goes first: a half-emptied store must not look whole. What somebody else put
    # into the folder stays.
    for path in sorted(there, key=lambda p: p.name != MANIFEST):
        if path.name in _OWN or path.name.startswith(TEMPORARY):
            remove(path)
