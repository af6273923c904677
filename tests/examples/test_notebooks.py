"""The notebooks run from start to end, and show each figure once."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

_spec = importlib.util.spec_from_file_location("refresh", EXAMPLES / "refresh.py")
assert _spec is not None and _spec.loader is not None
refresh = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(refresh)


def by_name(path: Path) -> str:
    return path.stem


def images(cell: Any) -> list[str]:
    shown = (o.get("data", {}) for o in cell.get("outputs", []))
    return [data["image/png"] for data in shown if "image/png" in data]


def complaints(cell: Any) -> list[str]:
    """Return what a cell wrote to stderr; not what transformers does when it is imported itself."""
    streams = [o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stderr"]
    own = "from transformers import" not in cell.source
    return [text for text in streams if own or "IProgress not found" not in text]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_runs_and_shows_each_figure_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place)
    client.execute()
    shown: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        last = cell.source.strip().splitlines()[-1]
        expected = 1 if ".figures[" in last or last == "figure" else 0
        assert len(images(cell)) == expected, cell.source
        shown += images(cell)
        assert not complaints(cell)
    assert shown
    assert len(set(shown)) == len(shown)


def shows(source: str) -> bool:
    """Tell whether a cell ends in a value, which Jupyter shows."""
    last = ast.parse(source).body[-1]
    return isinstance(last, ast.Expr) and "assert_" not in ast.unparse(last)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_is_committed_with_the_outputs_of_its_own_sources(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["attnlens"]["sources"] == refresh.sources_hash(notebook), (
        f"{path.name} was changed; run: python examples/refresh.py {path.stem}"
    )
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert len(cell["outputs"]) == shows("".join(cell["source"])), cell["source"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_outputs_are_small_and_hold_nothing_of_the_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 1_500_000
    for unwanted in (
        "/tmp/",
        "/home/",
        "/root/",
        "/Users/",
        "IProgress",
        '"stderr"',
        "widget-view",
    ):
        assert unwanted not in text, unwanted


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_explains_itself(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert notebook.cells[0].source.startswith("# ")
    assert len(notebook.cells) - len(code) >= len(code) // 3


def test_the_notebooks_are_those_that_the_documentation_lists() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert {p.name for p in NOTEBOOKS} == {
        *re.findall(r"\]\(\.\./examples/([\w-]+\.ipynb)\)", page)
    }
