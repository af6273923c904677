"""Tokens as people can read them: one look for every tokenizer.

Tokenizers write a leading space as ``Ġ`` (byte-level BPE), ``▁`` (SentencePiece) or a space, and a
newline as ``Ċ``, ``<0x0A>`` or a newline. In figures and reports they all look the same: a middle
dot for a space, ``⏎`` for a newline, ``⇥`` for a tab.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from typing import TYPE_CHECKING, Literal

import matplotlib.font_manager as font_manager

from attnlens.errors import AnalysisError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_log = logging.getLogger("attnlens")

SPACE, NEWLINE, TAB, NOTHING = "·", "⏎", "⇥", "∅"

_MARKS = {
    " ": SPACE,
    "\u0120": SPACE,  # Ġ: byte-level BPE writes byte 0x20 like this
    "\u2581": SPACE,  # ▁: SentencePiece
    "\u00a0": SPACE,
    "\u3000": SPACE,
    "\n": NEWLINE,
    "\u010a": NEWLINE,  # Ċ: byte-level BPE, byte 0x0A
    "\u2028": NEWLINE,
    "\u2029": NEWLINE,
    "\r": "␍",
    "\u010d": "␍",  # č: byte-level BPE, byte 0x0D; only where the whole token is it, see below
    "\t": TAB,
    "\u0109": TAB,  # ĉ: byte-level BPE, byte 0x09
}
# These are ordinary letters in some language: a mark only where the token is made of nothing else.
_LETTERS = frozenset("\u010d\u0109\u010a")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ELLIPSIS = "…"

# Tried in this order, where installed, for each character that the one before lacks.
FONTS = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans JP",
    "Noto Sans SC",
    "Noto Sans KR",
    "Source Han Sans",
    "Hiragino Sans",
    "PingFang SC",
    "Yu Gothic",
    "Microsoft YaHei",
    "Malgun Gothic",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "Noto Sans Hebrew",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Sans Symbols",
    "Noto Sans Symbols2",
    "Noto Emoji",
    "Symbola",
    "Unifont",
)


def visible_token(token: str | bytes, limit: int | None = None) -> str:
    """Write a token so that every character of it is seen.

    Parameters
    ----------
    token : str or bytes
        A token's text, or the tokenizer's own spelling of it (``"Ġthe"``, ``"▁the"``,
        ``"<0x0A>"``). Bytes that are not UTF-8 are written as ``<0xE6>``.
    limit : int, optional
        Longest text to return, in characters; what is cut is marked by an ellipsis.

    Returns
    -------
    str
        Printable, on one line, never empty; for HTML, tables and terminals. For labels in
        figures use :func:`show_token`.
    """
    if isinstance(token, bytes):
        text = token.decode("utf-8", errors="surrogateescape")
    else:
        text = _BYTE_TOKEN.sub(lambda match: _ascii_byte(int(match[1], 16)), token)
    letters = bool(text.strip("".join(_LETTERS)))
    shown = "".join(_visible(c, letters=letters) for c in text) or NOTHING
    if limit is not None and len(shown) > limit:
        shown = shown[: max(limit - 1, 0)] + _ELLIPSIS
    return shown


def show_token(token: str | bytes, limit: int | None = 24) -> str:
    r"""Write a token as a label in a matplotlib figure.

    As :func:`visible_token`, with ``$`` written as ``\$``, so that matplotlib shows it literally
    and never reads a token as mathematics.

    Parameters
    ----------
    token : str or bytes
        A token's text, or the tokenizer's own spelling of it.
    limit : int, optional
        Longest label, in characters.

    Returns
    -------
    str
        Text for ``set_text``, ``set_xticklabels`` and the like. Characters that no installed font
        has stay in it: the PNG then shows ``U+6771``, the SVG leaves them to the browser.
    """
    return escape_math(visible_token(token, limit))


def escape_math(text: str) -> str:
    """Make matplotlib show a text literally, dollar signs included.

    Parameters
    ----------
    text : str

    Returns
    -------
    str
    """
    return text.replace("$", r"\$")


def token_axis(
    ax: Axes,
    tokens: Sequence[str | bytes],
    axis: Literal["x", "y"] = "x",
    *,
    length: int | None = None,
    limit: int = 14,
    size: float = 7.5,
) -> None:
    """Label an axis with tokens, one at each whole number from 0.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    tokens : sequence of str or bytes
    axis : {"x", "y"}
    length : int, optional
        How many positions are drawn; checked against the number of tokens.
    limit : int
        Longest label, in characters.
    size : float
        Font size, in points.

    Raises
    ------
    attnlens.errors.AnalysisError
        When there are more or fewer tokens than positions, or `axis` is neither.
    """
    if axis not in ("x", "y"):
        raise AnalysisError(f"token_axis labels an axis 'x' or 'y', not {axis!r}.")
    if length is not None and length != len(tokens):
        raise AnalysisError(
            f"{len(tokens)} tokens label {length} positions.",
            hint="Pass the tokens of exactly the positions that are drawn.",
        )
    labels = [show_token(token, limit) for token in tokens]
    if axis == "x":
        ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=size)
    else:
        ax.set_yticks(range(len(labels)), labels, fontsize=size)
    ax.tick_params(axis=axis, length=0, pad=2)


def drawable(text: str) -> str:
    """Replace what no installed font can draw by its code point, as in ``U+6771``.

    Parameters
    ----------
    text : str

    Returns
    -------
    str
        The text itself where every character can be drawn.
    """
    if text.isascii():
        return text
    missing = [c for c in text if not c.isascii() and ord(c) not in _drawable_points()]
    if not missing:
        return text
    _say_once()
    pieces: list[str] = []
    for c in text:
        if c not in missing:
            pieces.append(c)
        elif unicodedata.category(c) not in ("Cf", "Mn"):  # joiners of what cannot be drawn either
            after_another = bool(pieces) and pieces[-1].lstrip().startswith("U+")
            pieces.append(" " * after_another + f"U+{ord(c):04X}")
    return "".join(pieces)


def _visible(c: str, *, letters: bool) -> str:
    if c in _MARKS and not (letters and c in _LETTERS):
        return _MARKS[c]
    point = ord(c)
    if 0xDC80 <= point <= 0xDCFF:  # a byte that was not UTF-8
        return f"<0x{point - 0xDC00:02X}>"
    if unicodedata.category(c) == "Zs":
        return SPACE
    # Joiners belong to emoji, Persian and Indic words.
    return c if c.isprintable() or c in "\u200d\u200c" else f"U+{point:04X}"


def _ascii_byte(value: int) -> str:
    """Return the character of a byte token, where the byte alone is one."""
    return chr(value) if value < 0x80 else f"<0x{value:02X}>"


@functools.cache
def installed_fonts() -> tuple[str, ...]:
    """Return those of :data:`FONTS` that this machine has, in their order.

    Returns
    -------
    tuple of str
    """
    names = {entry.name for entry in font_manager.fontManager.ttflist}
    return tuple(name for name in FONTS if name in names)


@functools.cache
def _drawable_points() -> frozenset[int]:
    points: set[int] = set()
    for name in installed_fonts():
        path = font_manager.findfont(font_manager.FontProperties(family=name))
        points.update(font_manager.get_font(path).get_charmap())
    return frozenset(points)


@functools.cache
def _say_once() -> None:
    _log.warning(
        "Some characters have no font on this machine: PNG files show their code points (U+6771); "
        "SVG files and the report keep the characters."
    )
