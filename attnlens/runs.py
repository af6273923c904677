"""A finished run, as a notebook holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import xarray as xr

from attnlens.analysis import Analysis, Finding
from attnlens.errors import AttnlensError
from attnlens.folders import REPORT, read_run
from attnlens.plugins import discover, find, load_analysis
from attnlens.results import load_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnlens.store import Store


class Run(Mapping[str, xr.Dataset]):
    """One run: a mapping from the names of its analyses to their results.

    Parameters
    ----------
    path : pathlib.Path
        The run's folder.
    analyses : mapping from str to Analysis, optional
        The analyses that ran; found again among the installed plugins otherwise.

    Attributes
    ----------
    path : pathlib.Path
    record : dict
        What run.json holds.
    """

    def __init__(self, path: Path, analyses: Mapping[str, Analysis] | None = None) -> None:
        self.path = Path(path)
        self.record = read_run(self.path)
        self._analyses = dict(analyses or {})
        self._results: dict[str, xr.Dataset] = {}

    def _listed(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self.record["analyses"]}

    def _has_result(self, name: str) -> bool:
        return name in self._listed() and (self.path / name / "result.zarr").is_dir()

    def __getitem__(self, name: str) -> xr.Dataset:
        if name not in self._results:
            if not self._has_result(name):
                raise KeyError(f"{name}: {self.errors.get(name, 'this run has no such analysis')}")
            self._results[name] = load_result(self.path / name)
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._listed() if self._has_result(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def report(self) -> Path:
        """Where the report lies."""
        return self.path / REPORT

    @cached_property
    def store(self) -> Store:
        """The store that the analyses read."""
        from attnlens.store import open_store

        return open_store((self.path / self.record["store"]).resolve())

    @property
    def findings(self) -> list[Finding]:
        """Every claim that was made or looked for, with the analysis that judged it."""
        return [Finding(**entry) for entry in self.record["findings"]]

    @property
    def errors(self) -> dict[str, str]:
        """What failed, by analysis."""
        return {
            entry["name"]: entry["error"]["message"]
            for entry in self.record["analyses"]
            if entry["error"]
        }

    def analysis(self, name: str) -> Analysis:
        """Return the analysis object, with the options that it ran with.

        Raises
        ------
        PluginError
            If its plugin is no longer installed or cannot be loaded.
        """
        if name not in self._analyses:
            entry = self._listed()[name]
            wanted = f"{entry['distribution']}:{name}" if entry["distribution"] else name
            kind = load_analysis(find(wanted, discover()))
            self._analyses[name] = kind(**entry["options"])
        return self._analyses[name]

    @property
    def figures(self) -> Mapping[str, Figure]:
        """Every figure by ``"analysis.figure"``, drawn when looked at."""
        return _Drawn(self, "figure")

    @property
    def tables(self) -> Mapping[str, Any]:
        """Every table by ``"analysis.table"``, as a pandas DataFrame."""
        return _Drawn(self, "table")

    def __repr__(self) -> str:
        states = ", ".join(f"{n}: {e['status']}" for n, e in self._listed().items())
        made = sum(f.holds for f in self.findings)
        return f"<Run {self.path} ({states}; {made} of {len(self.findings)} claims hold)>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'✓' if f.holds else '–'}</td><td><code>{escape(f.analysis)}</code></td>"
            f"<td style='text-align:left'>{escape(f.text)}</td></tr>"
            for f in sorted(self.findings, key=lambda f: not f.holds)
        )
        failed = "".join(
            f"<tr><td>✗</td><td><code>{escape(n)}</code></td>"
            f"<td style='text-align:left'>{escape(e)}</td></tr>"
            for n, e in self.errors.items()
        )
        model = escape(str(self.record["model"].get("name", "")))
        return (
            f"<div><strong>Run of {model}</strong> "
            f"<code>{escape(str(self.path))}</code>: "
            f"<a href='{escape(self._address())}' target='_blank'>{REPORT}</a>"
            f"<table><thead><tr><th></th><th>analysis</th><th>finding</th></tr></thead>"
            f"<tbody>{failed}{rows}</tbody></table>{self._contents()}</div>"
        )

    def _address(self) -> str:
        """Return the report's address, as seen from a notebook in the working directory."""
        report, here = self.report.resolve(), Path.cwd()
        if report.is_relative_to(here):
            return quote(report.relative_to(here).as_posix())
        return report.as_uri()

    def _contents(self) -> str:
        """List what ``run[...]``, ``run.figures[...]`` and ``run.tables[...]`` give."""
        kinds = {"run": self, "run.figures": self.figures, "run.tables": self.tables}
        rows = "".join(
            f"<tr><th scope='row'><code>{of}[...]</code></th><td style='text-align:left'>"
            f"{', '.join(f'<code>{escape(name)}</code>' for name in names) or 'none'}</td></tr>"
            for of, names in kinds.items()
        )
        return f"<table><tbody>{rows}</tbody></table>"


class _Drawn(Mapping[str, Any]):
    """Figures or tables of a run, made on demand."""

    def __init__(self, run: Run, kind: str) -> None:
        self._run = run
        self._kind = kind

    def _names(self) -> list[tuple[str, str]]:
        return [
            (entry["name"], drawn["name"])
            for entry in self._run.record["analyses"]
            for drawn in entry[f"{self._kind}s"]
        ]

    def __iter__(self) -> Iterator[str]:
        return (f"{analysis}.{name}" for analysis, name in self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"<{self._kind}s of {self._run.path}: {', '.join(self) or 'none'}>"

    def __getitem__(self, key: str) -> Any:
        analysis, _, name = key.partition(".")
        if (analysis, name) not in self._names():
            raise KeyError(f"{key}: this run has {', '.join(self) or 'none'}")
        one, result = self._run.analysis(analysis), self._run[analysis]
        return one.draw(name, result) if self._kind == "figure" else one.tabulate(name, result)


def open_run(path: str | Path) -> Run:
    """Open a run's folder.

    Raises
    ------
    OutputError
        If there is no run in it.
    """
    return Run(Path(path))


def redraw(path: str | Path) -> Run:
    """Draw every figure, table and highlight of a run again from its saved results.

    Neither torch nor the model is needed.

    Parameters
    ----------
    path : str or pathlib.Path
        The run's folder.
    """
    from attnlens.drawing import draw_all
    from attnlens.folders import RUN_FILE, write_json
    from attnlens.report import write_report

    run = Run(Path(path))
    for entry in run.record["analyses"]:
        if entry["name"] not in run:
            continue
        try:
            analysis = run.analysis(entry["name"])
        except AttnlensError as error:
            entry["notes"].append(f"It was not drawn again: {error.message}")
            continue
        shown = draw_all(analysis, run[entry["name"]], run.path / entry["name"])
        errors = shown.pop("errors")
        notes = shown.pop("notes")
        entry.update(shown)
        entry["notes"] += [n for n in notes if n not in entry["notes"]]
        if errors:
            message = "; ".join(e["message"] for e in errors)
            entry["status"] = "failed"
            entry["error"] = {"type": "AttnlensError", "message": message, "hint": None}
        elif entry["error"] and entry["status"] == "failed":
            entry["status"], entry["error"] = "ok", None
    write_json(run.path / RUN_FILE, run.record)
    write_report(run.path)
    return run
