"""Numbers, lists and texts as reports and notebooks write them."""

from __future__ import annotations

import json
import math
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_ITEMS = 24
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def clean(value: Any) -> Any:
    """Make every string in a JSON value printable.

    Control characters, lone surrogates and the marks that reorder text (which could make one
    string look like another) are written as their code points.

    Parameters
    ----------
    value : Any
        What :func:`json.loads` returns.

    Returns
    -------
    Any
        The same, with clean strings.
    """
    if isinstance(value, str):
        return "".join(_printable(c) for c in value)
    if isinstance(value, Mapping):
        return {clean(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value


def number(value: float) -> str:
    """Write a number with four digits that count.

    Parameters
    ----------
    value : float

    Returns
    -------
    str
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e6):
        return f"{value:.0f}".replace("-", "−")
    digits, _, power = f"{value:.4g}".partition("e")
    digits = digits.replace("-", "−")
    if not power:
        return digits
    return f"{digits}\u00a0×\u00a010{str(int(power)).translate(_RAISED)}"  # one word: never broken


def describe(value: Any) -> str:
    """Write any JSON value in one readable line.

    Parameters
    ----------
    value : Any

    Returns
    -------
    str
        Pairs of whole numbers, which name heads, as ``5.1``; long lists cut, with their length.
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) or "–"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _list(value)
    return str(value)


def beside(evidence: Mapping[str, Any], null: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Set what was measured beside what it is by chance.

    Parameters
    ----------
    evidence, null : mapping

    Returns
    -------
    list of (str, str, str)
        Name, value and value by chance; empty where there is none.
    """
    return [
        (
            str(key).replace("_", " "),
            describe(evidence[key]) if key in evidence else "",
            describe(null[key]) if key in null else "",
        )
        for key in {**evidence, **null}
    ]


def exact(value: Any) -> str:
    """Write an option or a fact so that it can be given again: no digit is lost.

    Parameters
    ----------
    value : Any

    Returns
    -------
    str
        Strings as they are, lists of them joined by commas, everything else as JSON; a long list
        of one value said once.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > 3 and all(item == value[0] for item in value):
        return f"{exact(value[0])} (each of {len(value)})"
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def shell(words: Sequence[str]) -> str:
    r"""Write a command so that what is read is what a shell gets, whatever it holds.

    Parameters
    ----------
    words : sequence of str

    Returns
    -------
    str
        Words with invisible characters in the form ``$'\u202e'``, which bash and zsh read.
    """
    return " ".join(
        shlex.quote(word) if clean(word) == word else f"$'{''.join(map(_escaped, word))}'"
        for word in map(str, words)
    )


def heading(claim: str) -> str:
    """Write a claim's name as a heading: ``certificate.gauge`` as ``Certificate: gauge``.

    Parameters
    ----------
    claim : str

    Returns
    -------
    str
    """
    text = claim.replace(".", ": ").replace("-", " ")
    return text[:1].upper() + text[1:]


def size(n_bytes: float) -> str:
    """Write a number of bytes in the unit that people would use.

    Parameters
    ----------
    n_bytes : float

    Returns
    -------
    str
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.3g} TiB"


def facts(value: Mapping[str, Any], *, leave: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Flatten a mapping to pairs of name and text, nested names joined by a dot.

    Parameters
    ----------
    value : mapping
    leave : sequence of str
        Keys to leave out.

    Returns
    -------
    list of (str, str)
        Without what is null or empty.
    """
    pairs: list[tuple[str, str]] = []
    for key, item in value.items():
        if key in leave or item is None or item in ({}, []):
            continue
        if isinstance(item, Mapping):
            pairs += [(f"{key}.{name}", text) for name, text in facts(item)]
        elif str(key).endswith("bytes") and isinstance(item, int):
            pairs.append((str(key), size(item)))
        else:
            pairs.append((str(key), exact(item)))
    return pairs


def duration(seconds: float) -> str:
    """Write a time span as people say it.

    Parameters
    ----------
    seconds : float

    Returns
    -------
    str
    """
    if seconds < 0.95:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _list(items: Sequence[Any]) -> str:
    if not items:
        return "none"
    if len(items) > 3 and all(item == items[0] for item in items):
        return f"{describe(items[0])} (each of {len(items)})"
    shown = [_head(item) or describe(item) for item in items[:_MOST_ITEMS]]
    rest = len(items) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _head(item: Any) -> str | None:
    pair = isinstance(item, list | tuple) and len(item) == 2
    if pair and all(isinstance(n, int) and not isinstance(n, bool) for n in item):
        return f"{item[0]}.{item[1]}"
    return None


def _escaped(c: str) -> str:
    """Write a character as it stands between ``$'`` and ``'``."""
    point = ord(c)
    if c in "\\'":
        return f"\\{c}"
    if _printable(c) == c:
        return c
    if 0xDC80 <= point <= 0xDCFF:  # a byte of the command line that was not UTF-8
        return f"\\x{point - 0xDC00:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _printable(c: str) -> str:
    if c.isprintable() or c in "\n\t\u200d\u200c" or unicodedata.category(c) == "Zs":
        return c
    return f"U+{ord(c):04X}"
