"""Computing one analysis, apart from all others: its failure is its own."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from attnlens.analysis import Finding, Skip, plain
from attnlens.drawing import draw_all
from attnlens.errors import AttnlensError, NeedError
from attnlens.plugins import Observers
from attnlens.results import check_findings, check_result, save_result, with_provenance
from attnlens.selection import Selected
from attnlens.view import View, missing

if TYPE_CHECKING:
    from attnlens.store import Store


class Executor:
    """Runs analyses one after the other on one store.

    Parameters
    ----------
    store : Store
    folder : pathlib.Path
        The run's folder.
    origin : mapping
        Provenance that every result carries.
    observers : Observers
    model : object, optional
        The live model, for analyses that act on it.

    Attributes
    ----------
    results : dict from str to xarray.Dataset
    findings : list of Finding
    records : list of dict
        One entry for each analysis, as run.json lists them.
    exceptions : dict from str to exception
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        origin: Mapping[str, Any],
        observers: Observers,
        model: Any = None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._origin = origin
        self._observers = observers
        self._model = model
        self.results: dict[str, xr.Dataset] = {}
        self.findings: list[Finding] = []
        self.records: list[dict[str, Any]] = []
        self.exceptions: dict[str, Exception | SystemExit] = {}

    def execute(self, selected: Selected) -> dict[str, Any]:
        """Compute, save, judge and draw one analysis; return its record."""
        record: dict[str, Any] = {
            "name": selected.name,
            "title": selected.name,
            "distribution": selected.distribution,
            "version": selected.version,
            "options": {},
            "status": "ok",
            "error": None,
            "notes": [],
            "figures": [],
            "tables": [],
            "highlights": [],
        }
        self.records.append(record)
        started = time.perf_counter()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("default")
            try:
                self._run(selected, record)
            except Skip as reason:
                record["status"] = "skipped"
                record["notes"].append(str(reason))
            except (Exception, SystemExit) as error:
                self._fail(selected.name, record, error, traceback.format_exc())
        record["notes"] += dict.fromkeys(
            str(w.message) for w in heard if not issubclass(w.category, DeprecationWarning)
        )
        record["seconds"] = round(time.perf_counter() - started, 3)
        return record

    def _run(self, selected: Selected, record: dict[str, Any]) -> None:
        name, analysis = selected.name, selected.analysis
        record["title"] = analysis.title()
        record["options"] = plain(analysis.options.model_dump(mode="json"), "options")
        unmet = [
            n.name for n in selected.needs if n.kind == "analysis" and n.name not in self.results
        ]
        if unmet:
            raise Skip(f"it needs the result of {', '.join(unmet)}, which there is not")
        lacking = missing(self._store, selected.needs)
        if lacking:
            raise NeedError(
                f"{name} needs {', '.join(lacking)}, which this store does not hold.",
                hint="Capture it: `attnlens run` does, or `attnlens capture` for this analysis.",
            )
        view = View(
            self._store, selected.needs, analysis=name, results=self.results, model=self._model
        )
        self._observers.before(name, view)
        place = self._folder / name
        result = with_provenance(
            check_result(analysis.compute(view), name),
            {
                **self._origin,
                "analysis": name,
                "version": selected.version,
                "options": record["options"],
            },
        )
        save_result(result, place)
        self.results[name] = result
        self.findings += check_findings(analysis.findings(result), name)
        self._observers.after(name, result)
        shown = draw_all(analysis, result, place)
        errors = shown.pop("errors")
        for key, value in shown.items():
            record[key] += value
        if errors:
            message = "; ".join(e["message"] for e in errors)
            trace = "\n".join(e["traceback"] for e in errors)
            self._fail(name, record, AttnlensError(f"{message} (the result is kept)"), trace)

    def _fail(
        self, name: str, record: dict[str, Any], error: Exception | SystemExit, trace: str
    ) -> None:
        self.exceptions[name] = error
        record["status"] = "failed"
        message = error.message if isinstance(error, AttnlensError) else str(error)
        record["error"] = {
            "type": type(error).__name__,
            "message": message or repr(error),
            "hint": getattr(error, "hint", None),
        }
        place = self._folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "traceback.txt").write_text(trace, encoding="utf-8", errors="backslashreplace")
        self._observers.failed(name, error)

    def listed_findings(self) -> list[dict[str, Any]]:
        """Return the findings as run.json lists them."""
        order = ("analysis", "claim", "holds", "text", "evidence", "null")
        return [{key: plain(f.model_dump()[key]) for key in order} for f in self.findings]
