"""The folder of a run: made, tested for writing, never taken by mistake."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from attnlens.errors import DamagedStoreError, OutputError, UsageError

RUN_FILE = "run.json"
STORE = "store.attn"
REPORT = "report.html"
DEFAULT_PARENT = "attnlens-runs"

#: By which an analysis's folder is known.
_OF_ANALYSES = ("result.zarr", "traceback.txt", "figures", "tables", "highlights")


def slug(text: str) -> str:
    """Reduce a name to what any file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:60] or "run"


def default_folder(model_name: str, suffix: str = "") -> Path:
    """Return a folder that is not there yet, named after the model and the time."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path(DEFAULT_PARENT) / f"{slug(Path(model_name).name)}-{stamp}"
    path, count = base.with_name(base.name + suffix), 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}{suffix}")
    return path


def prepare(path: Path, *, overwrite: bool = False, resume: bool = False) -> Path:
    """Make the folder and write into it once, before anything heavy starts.

    Parameters
    ----------
    path : pathlib.Path
    overwrite : bool
        Allow that an earlier run lies there. It stays until :func:`clear`, when the new one is
        about to be written.
    resume : bool
        Keep an earlier run that lies there, to finish it.

    Raises
    ------
    OutputError
        If it cannot be made or written, or holds something else.
    """
    if overwrite and resume:
        raise UsageError(
            "--overwrite and --resume exclude each other.",
            hint="--overwrite replaces what is there, --resume finishes it.",
        )
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file, and a run needs a folder.", hint="Choose another.")
    if path.is_dir() and any(path.iterdir()) and not resume:
        if not overwrite:
            raise OutputError(
                f"The folder {path} is not empty.",
                hint="--overwrite replaces the run in it, --resume finishes it.",
            )
        if not ((path / RUN_FILE).exists() or (path / STORE).exists()):
            raise OutputError(
                f"The folder {path} holds something that is not a run of attnlens.",
                hint="Nothing was deleted. Choose another folder.",
            )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"attnlens")
    except OSError as error:
        raise OutputError(
            f"The folder {path} cannot be written: {error.strerror or error}.",
            hint="Choose another with --out.",
        ) from error
    return path


def clear(path: Path, *, reading: Iterable[Path] = ()) -> None:
    """Remove an earlier run from its folder; what somebody else put there stays.

    Parameters
    ----------
    path : pathlib.Path
    reading : iterable of pathlib.Path
        Stores and runs that are about to be read.

    Raises
    ------
    UsageError
        If one of those lies in the folder.
    """
    for source in reading:
        if source.resolve().is_relative_to(path.resolve()):
            raise UsageError(
                f"--overwrite would delete {source}, which is to be read.",
                hint="Nothing was deleted. Choose another folder with --out.",
            )
    for entry in path.iterdir():
        own = entry.name in (RUN_FILE, REPORT, STORE, "checkpoints") or entry.suffix == ".partial"
        of_analysis = entry.is_dir() and any((entry / part).exists() for part in _OF_ANALYSES)
        if not (own or of_analysis):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    text = json.dumps(content, indent=1, ensure_ascii=False)
    # A lone surrogate, as in the name of a file that is not UTF-8, becomes its escape in JSON.
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


def read_run(path: Path) -> dict[str, Any]:
    """Read a run's record.

    Raises
    ------
    OutputError
        If there is no run in the folder.
    DamagedStoreError
        If its record cannot be read.
    """
    file = path / RUN_FILE
    if not file.is_file():
        raise OutputError(
            f"There is no run in {path}: it has no {RUN_FILE}.",
            hint="Name the folder that `attnlens run` printed.",
        )
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        record["analyses"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedStoreError(f"{file} is damaged: {error}.") from error
    return record
