"""The store: a labelled tensor store on disk, or the same in memory.

Reading needs no torch; names are imported when they are first used, so that the schema alone can
be had without zarr and xarray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlens.store.check import Problem, verify
    from attnlens.store.exports import export
    from attnlens.store.read import Store, open_store
    from attnlens.store.schema import ActivationSpec, Manifest, PromptsSpec, UnitSpec
    from attnlens.store.show import store_info
    from attnlens.store.units import Unit
    from attnlens.store.write import StoreWriter
    from attnlens.store.write_unit import UnitWriter

__all__ = [
    "ActivationSpec",
    "Manifest",
    "Problem",
    "PromptsSpec",
    "Store",
    "StoreWriter",
    "Unit",
    "UnitSpec",
    "UnitWriter",
    "export",
    "open_store",
    "store_info",
    "verify",
]

_HOMES = {
    "ActivationSpec": "schema",
    "Manifest": "schema",
    "Problem": "check",
    "PromptsSpec": "schema",
    "Store": "read",
    "StoreWriter": "write",
    "Unit": "units",
    "UnitSpec": "schema",
    "UnitWriter": "write_unit",
    "export": "exports",
    "open_store": "read",
    "store_info": "show",
    "verify": "check",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
