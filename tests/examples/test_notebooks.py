"""The notebooks run from start to end, and show each figure once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def by_name(path: Path) -> str:
    return path.stem


def images(cell: Any) -> list[str]:
    shown = (o.get("data", {}) for o in cell.get("outputs", []))
    return [data["image/png"] for data in shown if "image/png" in data]


def complaints(cell: Any) -> list[str]:
    """Return what a cell wrote to stderr; not that tqdm would like ipywidgets."""
    streams = [o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stderr"]
    return [text for text in streams if "IProgress not found" not in text]


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_is_committed_without_outputs_and_explains_itself(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in code)
    assert notebook.cells[0].source.startswith("# ")
    assert len(notebook.cells) - len(code) >= len(code) // 3


def test_the_notebooks_are_those_that_the_documentation_lists() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert {p.name for p in NOTEBOOKS} == {
        word.strip("`") for word in page.split() if word.strip("`").endswith(".ipynb")
    }
