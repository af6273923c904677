"""A mkdocs hook: each notebook of ``examples/`` becomes a page, with what its cells show."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parents[2] / "examples"

#: Pages' HTML outputs, which Markdown must not touch.
_outputs: dict[str, str] = {}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page and its images for every notebook."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        text, images = page(json.loads(path.read_text(encoding="utf-8")), path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Put the HTML outputs in their places."""
    return re.sub(r"<p>(@@[\w-]+@@)</p>", lambda m: _outputs.get(m[1], m[0]), content)


def page(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its images by name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = {k: "".join(v) for k, v in output.get("data", {}).items()}
            key = f"{stem}-{len(parts)}"
            if "image/png" in data:
                images[f"{key}.png"] = base64.b64decode(data["image/png"])
                parts.append(f"![What the cell above draws]({key}.png){{ .figure }}")
            elif "text/html" in data:
                _outputs[f"@@{key}@@"] = f'<div class="output">{data["text/html"]}</div>'
                parts.append(f"@@{key}@@")
            elif text := data.get("text/plain") or "".join(output.get("text", "")):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", images
