"""A mkdocs hook: what helps readers of the files in the repository, and not those of the site."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to notebooks to their pages, and drop the notes on unbuilt pages."""
    markdown = re.sub(r"\(\.\./examples/([\w-]+)\.ipynb\)", r"(notebooks/\1.md)", markdown)
    return re.sub(r"^> In the repository(?:.*\n>)*.*\n", "", markdown, flags=re.MULTILINE)
