"""The files beside a run: figures, tables and highlights, read into what the template shows.

A file that is missing, damaged or outside the run's folder becomes a sentence in its place.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from attnlens.figures.tokens import visible_token
from attnlens.wording import clean, number

# A vector figure is sharp at every size, so it is taken while it is small; past this, the smaller.
_SMALL_SVG = 120_000
_BUDGET = 3_300_000  # bytes of all figures before base64, which adds a third
_MOST_ROWS = 500
_MOST_TOKENS = 4_000
_SENTENCE = 24  # characters; longer cells need room beside others
LEVELS = 10  # shades of a highlight, each way


class MissingPartError(Exception):
    """A file that the report cannot show, and why."""


@dataclass
class Image:
    """One figure in the candidates that were found, and the one chosen."""

    candidates: dict[str, bytes]  # "svg" or "png" -> content
    links: list[tuple[str, str]]
    kind: str = ""
    width: int = 0
    height: int = 0

    @property
    def size(self) -> int:
        """Bytes of the file that is shown."""
        return len(self.candidates[self.kind])

    @property
    def saving(self) -> int:
        """Bytes that the other candidate would save."""
        return self.size - min(map(len, self.candidates.values()))

    @property
    def uri(self) -> str:
        """The file itself, as an address that asks nothing of the network."""
        mime = "image/svg+xml" if self.kind == "svg" else "image/png"
        return f"data:{mime};base64,{base64.b64encode(self.candidates[self.kind]).decode()}"


@dataclass
class Cell:
    """One cell of a table: what is shown, and what it is sorted by."""

    text: str
    sort: str
    exact: str = ""


@dataclass
class Table:
    """A table as the report shows it."""

    columns: list[str]
    numeric: list[bool]
    wordy: list[bool]  # holds whole sentences
    rows: list[list[Cell]]
    total: int
    link: str


@dataclass
class Line:
    """Tokens with their shades, -LEVELS to LEVELS."""

    label: str
    tokens: list[tuple[str, str, str]] = field(default_factory=list)  # text, class, exact weight
    left_out: int = 0


def inside(folder: Path, relative: Any) -> Path:
    """Return a file of the run; refuse what lies outside its folder or is not there."""
    if not isinstance(relative, str) or not relative:
        raise MissingPartError("run.json names no file for it")
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise MissingPartError(f"{relative} lies outside the run's folder")
    if not path.is_file():
        raise MissingPartError(f"the file {relative} is not there")
    return path


def link(relative: str) -> str:
    """Return a relative link to a file beside the report, whatever characters its path has."""
    return quote(str(PurePosixPath(relative)), safe="/")


def read_image(folder: Path, figure: dict[str, Any]) -> Image:
    """Read a figure's files and choose which to show."""
    found: dict[str, bytes] = {}
    links: list[tuple[str, str]] = []
    reasons: list[str] = []
    for kind, looks_right in (("svg", _is_svg), ("png", _is_png)):
        if not figure.get(kind):
            continue
        try:
            content = inside(folder, figure[kind]).read_bytes()
        except (MissingPartError, OSError) as error:
            reasons.append(str(error))
            continue
        if looks_right(content):
            found[kind] = content
            links.append((kind.upper(), link(figure[kind])))
        else:
            reasons.append(f"{figure[kind]} is not a {kind.upper()} file")
    if not found:
        raise MissingPartError("; ".join(reasons) or "run.json names no file for it")
    image = Image(found, links)
    small = "svg" in found and len(found["svg"]) <= _SMALL_SVG
    image.kind = "svg" if small else min(found, key=lambda kind: len(found[kind]))
    image.width, image.height = _dimensions(found)
    return image


def keep_small(images: list[Image]) -> None:
    """Take the smaller file of the figures where that saves most, until all fit the budget."""
    for image in sorted(images, key=lambda image: -image.saving):
        if sum(other.size for other in images) <= _BUDGET:
            return
        image.kind = min(image.candidates, key=lambda kind: len(image.candidates[kind]))


def read_table(folder: Path, table: dict[str, Any]) -> Table:
    """Read a CSV file; at most 500 of its rows are kept."""
    path = inside(folder, table.get("csv"))
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
            lines = list(csv.reader(stream))
    except (OSError, csv.Error) as error:
        raise MissingPartError(f"{table['csv']} cannot be read: {error}") from error
    if not lines or not any(lines[0]):
        raise MissingPartError(f"{table['csv']} is empty")
    columns, body = lines[0], [row for row in lines[1:] if row]
    width = len(columns)
    body = [(row + [""] * width)[:width] for row in body]
    if columns[0] == "" and [row[0] for row in body] == [str(i) for i in range(len(body))]:
        columns, body, width = columns[1:], [row[1:] for row in body], width - 1
    # Text that looks like a number, such as head 0.10, is not one.
    text = set(table.get("text") or ())
    numeric = [
        columns[j] not in text
        and any(row[j] for row in body)
        and all(_number(row[j]) is not None for row in body if row[j])
        for j in range(width)
    ]
    decimals = [_decimals([row[j] for row in body]) if numeric[j] else None for j in range(width)]
    shown = [
        [_cell(row[j], numeric=numeric[j], decimals=decimals[j]) for j in range(width)]
        for row in body[:_MOST_ROWS]
    ]
    wordy = [any(len(row[j].text) > _SENTENCE for row in shown) for j in range(width)]
    names = [str(clean(c)) for c in columns]
    return Table(names, numeric, wordy, shown, len(body), link(table["csv"]))


def read_highlight(folder: Path, highlight: dict[str, Any]) -> tuple[list[Line], bool]:
    """Read lines of tokens, their weights turned into shades of one common scale."""
    path = inside(folder, highlight.get("json"))
    name = highlight["json"]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [(str(r["label"]), list(r["tokens"]), list(r["weights"])) for r in content["rows"]]
        weights = [_weight(w) for _, _, row in rows for w in row]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MissingPartError(f"{name} cannot be read: {error}") from error
    for label, tokens, row in rows:
        if len(tokens) != len(row):
            raise MissingPartError(f"{name}: {len(tokens)} tokens for {len(row)} weights ({label})")
    top = max((abs(w) for w in weights), default=0.0) or 1.0
    signed = bool(content.get("signed", False)) or any(w < 0 for w in weights)
    lines = []
    for label, tokens, row in rows:
        line = Line(str(clean(label)), left_out=max(len(tokens) - _MOST_TOKENS, 0))
        for token, raw in list(zip(tokens, row, strict=True))[:_MOST_TOKENS]:
            weight = _weight(raw)
            level = round(abs(weight) / top * LEVELS)
            shade = "" if level == 0 else f"{'m' if weight < 0 else 'p'}{level}"
            line.tokens.append((_readable(str(token)), shade, number(weight)))
        lines.append(line)
    return lines, signed


def _readable(token: str) -> str:
    """Write a token so that text reads on: spaces as spaces, every other mark visible."""
    shown = visible_token(token)
    return shown.replace("·", " ") if shown.strip("·") and "·" not in token else shown


def _weight(value: Any) -> float:
    weight = float(value) if value is not None else 0.0
    return weight if math.isfinite(weight) else 0.0


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _decimals(column: list[str]) -> int | None:
    """Return how many decimals a column of numbers takes, so that its points stand in line.

    None where the numbers are too different in size for that: each is then written by itself.
    """
    sizes = [abs(value) for text in column if (value := _number(text)) and math.isfinite(value)]
    if not sizes or all(re.fullmatch(r"[+-]?\d*", text) for text in column):
        return None
    decimals = max(3 - math.floor(math.log10(max(sizes))), 0)
    return decimals if decimals <= 6 and min(sizes) >= 10.0 ** (1 - decimals) else None


def _cell(text: str, *, numeric: bool, decimals: int | None) -> Cell:
    if text == "":
        return Cell("–", "")
    if not numeric:
        marked = text != text.strip() or any(not c.isprintable() for c in text)
        return Cell(visible_token(text) if marked else text, text.casefold())
    value = float(text)
    if math.isnan(value):
        return Cell("–", "")
    whole = re.fullmatch(r"[+-]?\d+", text) is not None
    if whole or decimals is None or not math.isfinite(value):
        shown = text.replace("-", "−") if whole else number(value)
    else:
        shown = f"{value:.{decimals}f}".replace("-", "−")
    return Cell(shown, repr(value), "" if whole else text)


def _is_png(content: bytes) -> bool:
    return content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 33


def _is_svg(content: bytes) -> bool:
    return b"<svg" in content[:2000] and b"</svg>" in content[-200:]


def _dimensions(found: dict[str, bytes]) -> tuple[int, int]:
    """Return the size at which a figure's 9-point text reads like the page's small text."""
    if "svg" in found:
        head = found["svg"][:2000].decode("utf-8", errors="replace")
        points = [re.search(rf'<svg[^>]*\b{k}="([\d.]+)pt"', head) for k in ("width", "height")]
        if points[0] and points[1]:
            return round(float(points[0][1]) * 1.2), round(float(points[1][1]) * 1.2)
    if "png" in found:
        width, height = struct.unpack(">II", found["png"][16:24])
        return round(width * 1.2 * 72 / 160), round(height * 1.2 * 72 / 160)
    return 640, 420
