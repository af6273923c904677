"""Everything that an analysis shows of one result, saved beside it."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import xarray as xr

from attnlens.analysis import Analysis, Drawing, Skip
from attnlens.errors import AttnlensError
from attnlens.folders import write_json
from attnlens.results import check_highlights


def draw_all(analysis: Analysis, result: xr.Dataset, folder: Path) -> dict[str, Any]:
    """Draw the figures, write the tables and the highlights of one analysis.

    Parameters
    ----------
    analysis : Analysis
    result : xarray.Dataset
    folder : pathlib.Path
        The analysis's own folder.

    Returns
    -------
    dict
        ``figures``, ``tables`` and ``highlights`` as run.json lists them, with paths relative
        to the run's folder; ``notes`` on what was skipped; ``errors`` on what failed.
    """
    shown: dict[str, Any] = {
        "figures": [],
        "tables": [],
        "highlights": [],
        "notes": [],
        "errors": [],
    }
    for kind, save in (
        ("figure", _save_figure),
        ("table", _save_table),
        ("highlight", _save_highlight),
    ):
        for drawing in analysis.drawings(kind):
            try:
                entry = save(analysis, drawing, result, folder)
            except Skip as reason:
                shown["notes"].append(f"{drawing.title}: {reason}")
            except Exception as error:
                shown["errors"].append(
                    {
                        "message": f"{kind} {drawing.name}: {_told(error)}",
                        "traceback": traceback.format_exc(),
                    }
                )
            else:
                shown[f"{kind}s"].append({"name": drawing.name, "title": drawing.title, **entry})
    return shown


def _save_figure(
    analysis: Analysis, drawing: Drawing, result: xr.Dataset, folder: Path
) -> dict[str, str]:
    from attnlens.figures import save_figure
    from attnlens.figures.told import tell

    drawn = analysis.draw(drawing.name, result)
    place = folder / "figures"
    place.mkdir(parents=True, exist_ok=True)
    png, svg = save_figure(drawn, place, drawing.name)
    return {
        "alt": drawn.get_gid() or tell(drawn, drawing.title),
        "png": _relative(png, folder),
        "svg": _relative(svg, folder),
    }


def _save_table(
    analysis: Analysis, drawing: Drawing, result: xr.Dataset, folder: Path
) -> dict[str, Any]:
    from pandas.api.types import is_numeric_dtype

    frame = analysis.tabulate(drawing.name, result)
    place = folder / "tables"
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{drawing.name}.csv"
    frame.to_csv(path, index=frame.index.name is not None, encoding="utf-8")
    text = [str(name) for name, kind in frame.dtypes.items() if not is_numeric_dtype(kind)]
    return {"csv": _relative(path, folder), "text": text}


def _save_highlight(
    analysis: Analysis, drawing: Drawing, result: xr.Dataset, folder: Path
) -> dict[str, str]:
    rows = check_highlights(getattr(analysis, drawing.name)(result), drawing.name)
    place = folder / "highlights"
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{drawing.name}.json"
    signed = any(w < 0 for row in rows for w in row.weights)
    write_json(path, {"rows": [r.model_dump() for r in rows], "signed": signed})
    return {"json": _relative(path, folder)}


def _told(error: Exception) -> str:
    if isinstance(error, AttnlensError):
        return " ".join([error.message, error.hint or ""]).strip()
    return f"{type(error).__name__}: {error}"


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder.parent).as_posix()
