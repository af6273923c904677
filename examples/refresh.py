"""Run the notebooks and keep what they show: ``python examples/refresh.py [NAME ...]``.

A notebook holds the hash of the sources that its outputs belong to; the tests compare it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def sources_hash(notebook: Any) -> str:
    """Return the hash of all cells' sources."""
    sources = [[cell["cell_type"], "".join(cell["source"])] for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def run(path: Path) -> None:
    """Run one notebook in an empty folder, and write it with its outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, timeout=900, resources=resources).execute()
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.metadata.clear()
        cell.execution_count = number
        cell.outputs = [_clean(output, number) for output in cell.outputs if _kept(output)]
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["attnlens"] = {"sources": sources_hash(notebook)}
    nbformat.write(notebook, path)


def _kept(output: Any) -> bool:
    """Leave out progress bars, and the hint that there could be some."""
    return output.output_type != "stream" or output.name != "stderr"


def _clean(output: Any, number: int) -> Any:
    """Drop widgets and the paths of this machine."""
    if output.output_type == "execute_result":
        output.execution_count = number
    data = output.get("data", {})
    data.pop("application/vnd.jupyter.widget-view+json", None)
    for kind, text in data.items():
        if kind.startswith("text/"):
            data[kind] = re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w.-]+/?", "", text)
    return output


if __name__ == "__main__":
    for notebook_path in sorted(HERE.glob("*.ipynb")):
        if not sys.argv[1:] or notebook_path.stem in sys.argv[1:]:
            run(notebook_path)
            sys.stdout.write(f"{notebook_path.name}: {notebook_path.stat().st_size / 1e6:.2f} MB\n")
