"""From a run's folder to its report."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from attnlens.errors import OutputError, StoreError, StoreVersionError
from attnlens.report.parts import (
    Image,
    MissingPartError,
    keep_small,
    read_highlight,
    read_image,
    read_table,
)
from attnlens.wording import beside, clean, describe, duration, exact, facts, heading, shell

SCHEMA = "attnlens-run/1"


def write_report(folder: Path | str) -> Path:
    """Write ``report.html`` from a run's ``run.json`` and the files beside it.

    The page is one file: it asks nothing of the network, runs no script but its own, and shows
    every string literally. Figures, tables and highlights whose files are missing or damaged are
    reported in their place.

    Parameters
    ----------
    folder : pathlib.Path or str
        The run's folder.

    Returns
    -------
    pathlib.Path
        The report's path.

    Raises
    ------
    attnlens.errors.StoreError
        When there is no ``run.json``, or it cannot be read.
    attnlens.errors.StoreVersionError
        When another version of attnlens wrote it in another form.
    attnlens.errors.OutputError
        When the report cannot be written.
    """
    folder = Path(folder)
    page = _page(_read_run(folder), folder)
    return _replace(folder / "report.html", page)


def _read_run(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(
            f"There is no run.json in {folder}.", hint="Give the folder of a run."
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise StoreVersionError(
            f"{path} has the schema {schema!r}; this version of attnlens reads {SCHEMA!r}.",
            hint="Read it with the version that wrote it, or run the analyses again.",
        )
    return dict(content)


def _page(run: dict[str, Any], folder: Path) -> str:
    css = _text("report.css")
    script = _text("report.js")
    environment = Environment(
        loader=PackageLoader("attnlens", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["describe"] = describe
    policy = "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            f"style-src '{_hash(css)}'",
            f"script-src '{_hash(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    template = environment.get_template("report.html.j2")
    return template.render(css=css, script=script, policy=policy, **_view(run, folder))


def _view(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Gather everything that the template shows, with nothing left to be missing."""
    names = [str(a.get("name", "?")) for a in run.get("analyses") or []]
    original = run.get("analyses") or []
    command = shell(run.get("command") or [])
    run = clean(run)
    images: list[Image] = []
    analyses = [
        _analysis(shown, raw, i, folder, images)
        for i, (shown, raw) in enumerate(zip(run.get("analyses") or [], original, strict=True))
    ]
    keep_small(images)
    anchors = {str(clean(name)): f"a{i}" for i, name in enumerate(names)}
    findings = [_finding(f, anchors) for f in run.get("findings") or []]
    model = run.get("model") or {}
    corpus = run.get("corpus") or {}
    corpus = corpus if isinstance(corpus, Mapping) else {"name": corpus}
    return {
        "model_name": str(model.get("name") or "unnamed model"),
        "summary": _summary(run, model, corpus),
        "held": [f for f in findings if f["holds"]],
        "not_held": [f for f in findings if not f["holds"]],
        "failed": [a for a in analyses if a["status"] == "failed"],
        "notes": [str(n) for n in run.get("notes") or []],
        "analyses": analyses,
        "command": command,
        "call": str(run.get("call") or ""),
        "provenance": [
            ("Run", _run_facts(run)),
            ("Model", facts(model, leave=("config", "windows", "scales"))),
            ("Prompts", facts(corpus)),
            ("Captured", _captured(run.get("plan") or {})),
            ("Versions", facts(run.get("versions") or {})),
        ],
        "config": json.dumps(model["config"], indent=2, ensure_ascii=False, default=str)
        if model.get("config")
        else "",
    }


def _analysis(
    shown: dict[str, Any], raw: dict[str, Any], number: int, folder: Path, images: list[Image]
) -> dict[str, Any]:
    """Gather one analysis; `raw` holds file names as they are on disk, `shown` as displayed."""

    def parts(kind: str, read: Callable[[Path, dict[str, Any]], Any]) -> list[dict[str, Any]]:
        gathered = []
        for entry, on_disk in zip(shown.get(kind) or [], raw.get(kind) or [], strict=True):
            part = {
                "title": str(entry.get("title") or entry.get("name") or ""),
                "alt": str(entry.get("alt") or entry.get("title") or entry.get("name") or ""),
                "content": None,
                "missing": "",
            }
            try:
                part["content"] = read(folder, on_disk)
            except MissingPartError as error:
                part["missing"] = str(clean(str(error)))
            gathered.append(part)
        return gathered

    figures = parts("figures", read_image)
    images += [f["content"] for f in figures if f["content"] is not None]
    error = shown.get("error")
    return {
        "id": f"a{number}",
        "name": str(shown.get("name", "?")),
        "title": str(shown.get("title") or shown.get("name", "?")),
        "origin": " ".join(str(shown[k]) for k in ("distribution", "version") if shown.get(k)),
        "seconds": duration(float(shown.get("seconds") or 0.0)),
        "status": str(shown.get("status", "ok")),
        "error": None
        if not error
        else {key: str(error.get(key) or "") for key in ("type", "message", "hint")},
        "notes": [str(n) for n in shown.get("notes") or []],
        "options": [(k, exact(v)) for k, v in (shown.get("options") or {}).items()],
        "figures": figures,
        "tables": parts("tables", read_table),
        "highlights": parts("highlights", read_highlight),
    }


def _finding(finding: dict[str, Any], anchors: Mapping[str, str]) -> dict[str, Any]:
    evidence, null = ({**(finding.get(key) or {})} for key in ("evidence", "null"))
    analysis = str(finding.get("analysis", ""))
    return {
        "claim": str(finding.get("claim", "")),
        "heading": heading(str(finding.get("claim") or "claim")),
        "holds": bool(finding.get("holds")),
        "text": str(finding.get("text", "")),
        "analysis": analysis,
        "anchor": anchors.get(analysis, ""),
        "rows": beside(evidence, null),
        "has_null": bool(null),
    }


def _summary(
    run: Mapping[str, Any], model: Mapping[str, Any], corpus: Mapping[str, Any]
) -> list[str]:
    """Say in a few short pieces what was run."""
    pieces = []
    if model.get("n_layers") and model.get("n_heads"):
        pieces.append(f"{model['n_layers']} layers × {model['n_heads']} heads")
    prompts = corpus.get("n") or corpus.get("n_prompts") or corpus.get("samples")
    name = corpus.get("name") or corpus.get("corpus")
    if prompts and name:
        pieces.append(f"{describe(prompts)} prompts of “{name}”")
    elif name:
        pieces.append(f"prompts of “{name}”")
    if run.get("started"):
        pieces.append(_when(str(run["started"])))
    if run.get("seconds"):
        pieces.append(f"took {duration(float(run['seconds']))}")
    return pieces


def _run_facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("started", _when(str(run["started"])) if run.get("started") else "–"),
        ("took", duration(float(run.get("seconds") or 0.0))),
        ("seed", exact(run.get("seed"))),
        ("store", describe(run.get("store"))),
        ("attnlens", describe(run.get("attnlens"))),
    ]


def _captured(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say what each store was planned to hold; what was free on the machine decides nothing."""
    rows = [
        (str(store.get("where") or "store"), _held(store))
        for store in plan.get("stores") or []
        if isinstance(store, Mapping)
    ]
    return rows + facts(plan, leave=("stores", "notes", "free_disk", "free_memory"))


def _held(store: Mapping[str, Any]) -> str:
    derived = store.get("derived") or []
    parts = [
        ", ".join(f"{name} ({dtype})" for name, dtype in (store.get("activations") or {}).items()),
        f"{', '.join(derived)} from q_rot and k_rot" if derived else "",
        ", ".join(store.get("statistics") or []),
        "weights" if store.get("weights") else "",
    ]
    prompts = f"{store.get('prompts')} x {store.get('longest')} tokens"
    return f"{prompts}: {'; '.join(part for part in parts if part) or 'tokens alone'}"


def _when(text: str) -> str:
    with contextlib.suppress(ValueError):
        moment = datetime.fromisoformat(text)
        zone = moment.tzname() or ""
        return f"{moment.day} {moment:%B %Y, %H:%M} {zone}".strip()
    return text


def _text(name: str) -> str:
    return files("attnlens.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()


def _replace(path: Path, text: str) -> Path:
    """Write under another name first, so that a report is whole or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path
