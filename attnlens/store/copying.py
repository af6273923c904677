"""Writing a store that was read, or made of arrays in memory, to a folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlens.store.schema import CORPORA, TWINS
from attnlens.store.units import Unit
from attnlens.store.write import StoreWriter
from attnlens.store.write_unit import UnitWriter

log = logging.getLogger("attnlens")

if TYPE_CHECKING:
    from attnlens.store.read import Store


def save(store: Store, path: Path, *, overwrite: bool) -> Store:
    """Do the work of :meth:`Store.save`, which see."""
    lost = sorted(set(store._given) - set(store.manifest.activations))
    if lost:
        log.warning("not saved, for only their partial sums could be: %s", ", ".join(lost))
    with StoreWriter.create(path, store.manifest, overwrite=overwrite) as writer:
        for unit in store.units():
            with writer.unit(unit.spec) as out:
                _copy(unit, out, store)
        if store.has_weights:
            writer.weights({str(n): v.values for n, v in store.weights.items()})
        if store.vocabulary is not None:
            writer.vocabulary(store.vocabulary)
        for number, twin in enumerate(store.twins):
            save(twin, path / TWINS / f"{number:03d}", overwrite=True)
        for name, corpus in store.corpora.items():
            save(corpus, path / CORPORA / name, overwrite=True)
        return writer.seal()


def _copy(unit: Unit, out: UnitWriter, store: Store) -> None:
    """Copy one unit, a layer at a time, as it is stored."""
    out.tokens(unit.tokens.values)
    for name, spec in store.manifest.activations.items():
        block = unit.blocks[name]
        for number, layer in enumerate(spec.layers):
            selection = [np.arange(n) for n in block.shape]
            selection[1] = np.array([number])
            value = np.empty([len(i) for i in selection], dtype=block.dtype)
            block.read_into(selection, value)
            out.write(name, layer, slice(None), value[:, 0])
    for name in store.manifest.statistics:
        out.statistic(name, unit.state(name))
