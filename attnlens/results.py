"""Results on disk: one labelled dataset with its provenance, for each analysis of a run."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xarray as xr

from attnlens.analysis import Finding, Highlight, plain
from attnlens.errors import DamagedStoreError, ResultError

_Item = TypeVar("_Item")

#: Name of a result in an analysis's folder.
RESULT = "result.zarr"

#: The attribute that holds a result's provenance, as JSON.
PROVENANCE = "attnlens"


def check_result(result: Any, analysis: str) -> xr.Dataset:
    """Refuse what cannot be kept.

    Parameters
    ----------
    result : object
        What ``compute`` returned.
    analysis : str

    Raises
    ------
    ResultError
        If it is no dataset, is empty, or holds objects other than strings.
    """
    if isinstance(result, xr.DataArray):
        raise ResultError(
            f"{analysis} returned a DataArray.",
            hint="Return a Dataset: xr.Dataset({'name': array}).",
        )
    if not isinstance(result, xr.Dataset):
        raise ResultError(
            f"{analysis} returned {type(result).__name__} instead of an xarray.Dataset.",
            hint="`compute` must return one labelled xarray.Dataset.",
        )
    if not result.data_vars:
        raise ResultError(f"{analysis} returned an empty dataset.")
    for name, array in result.variables.items():
        if array.dtype.kind == "O" and not all(isinstance(x, str) for x in array.values.flat):
            raise ResultError(
                f"The variable {name!r} of {analysis} holds Python objects.",
                hint="Results hold numbers, booleans and strings only.",
            )
    return result


def check_findings(findings: Any, analysis: str) -> list[Finding]:
    """Gather an analysis's findings, refusing what is none.

    Parameters
    ----------
    findings : object
        What ``findings`` returned.
    analysis : str

    Returns
    -------
    list of Finding
        With the analysis's name in them.

    Raises
    ------
    ResultError
        If it holds something other than findings, or one that run.json cannot hold.
    """
    return [
        Finding(
            **{name: getattr(one, name) for name in Finding.model_fields} | {"analysis": analysis}
        )
        for one in _several(findings, Finding, f"The findings of {analysis}")
    ]


def check_highlights(rows: Any, what: str) -> list[Highlight]:
    """Gather the rows of a highlight, refusing what is none.

    Parameters
    ----------
    rows : object
        What the method returned.
    what : str
        Its name, for the error's message.

    Raises
    ------
    ResultError
    """
    return _several(rows, Highlight, what)


def _several(items: Any, kind: type[_Item], what: str) -> list[_Item]:
    hint = f"Yield each attnlens.{kind.__name__}, or return a list of them."
    if isinstance(items, kind) or not isinstance(items, Iterable):
        raise ResultError(f"{what}: {items!r:.80} was returned.", hint=hint)
    gathered = list(items)
    for item in gathered:
        if not isinstance(item, kind):
            raise ResultError(f"{what}: {item!r:.80} is no {kind.__name__}.", hint=hint)
    return gathered


def provenance(result: xr.Dataset) -> dict[str, Any]:
    """Return what is known of a result's origin."""
    found: dict[str, Any] = json.loads(result.attrs.get(PROVENANCE, "{}"))
    return found


def with_provenance(result: xr.Dataset, origin: Mapping[str, Any]) -> xr.Dataset:
    """Return the result with attributes that JSON can hold, and its provenance among them."""
    attributes = {str(k): plain(v) for k, v in result.attrs.items()}
    return result.assign_attrs({**attributes, PROVENANCE: json.dumps(plain(origin))})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence zarr's notes on string types, which are part of its format by now."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification.*")
        warnings.filterwarnings("ignore", message=".*[Cc]onsolidated metadata.*")
        yield


def save_result(result: xr.Dataset, folder: Path) -> Path:
    """Write a result into an analysis's folder, whole or not at all.

    Parameters
    ----------
    result : xarray.Dataset
    folder : pathlib.Path

    Returns
    -------
    pathlib.Path
        The zarr group.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final, partial = folder / RESULT, folder / f".{RESULT}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    flat = result.drop_encoding()
    for name, variable in flat.variables.items():
        if variable.dtype.kind == "U":
            # Fixed-width unicode has no specification in zarr v3; variable-width has.
            flat = flat.assign({name: variable.astype(np.dtypes.StringDType())})
        elif variable.dtype.kind == "O":
            flat = flat.assign({name: variable.astype(str).astype(np.dtypes.StringDType())})
    with _quiet():
        flat.to_zarr(partial, mode="w", consolidated=False, zarr_format=3)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return final


def load_result(folder: Path) -> xr.Dataset:
    """Read a result into memory.

    Parameters
    ----------
    folder : pathlib.Path
        The analysis's folder in a run.

    Raises
    ------
    DamagedStoreError
        If it is missing or unreadable.
    """
    path = folder / RESULT
    try:
        with _quiet():
            stored = xr.open_zarr(path, consolidated=False, chunks=None).load()
    except Exception as error:
        raise DamagedStoreError(
            f"The result at {path} cannot be read: {type(error).__name__}: {error}",
            hint="Run the analysis again: `attnlens analyze`.",
        ) from error
    texts = {
        n: v.copy(data=np.array(v.values.tolist(), dtype=str).reshape(v.shape))
        for n, v in stored.variables.items()
        if v.dtype.kind == "T"
    }
    result: xr.Dataset = stored.assign(
        {n: v for n, v in texts.items() if n in stored.data_vars}
    ).assign_coords({n: v for n, v in texts.items() if n in stored.coords})
    return result
