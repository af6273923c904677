"""A mkdocs hook: formulas become MathML, which browsers draw without any script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

#: What pymdownx.arithmatex leaves in the page.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Turn every formula of a page into MathML."""
    return _FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    tag, bracket, source = match.groups()
    display = "block" if bracket == "[" else "inline"
    drawn = convert(html.unescape(source).strip(), display=display)
    return f'<{tag} class="formula">{drawn}</{tag}>'
