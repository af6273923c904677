"""The site builds without a warning, offline, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.chromium_pipe import Chromium, executable

from .conftest import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(needed, reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        # A proxy that nobody answers: whoever would load something fails.
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9",
             "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//", text)
        assert not loaded, f"{page.name} loads something from elsewhere"


def test_formulas_are_drawn_without_a_script(site: Path) -> None:
    text = (site / "analyses" / "spectrum.html").read_text("utf-8")
    assert text.count("<math") >= 15
    for page in site.rglob("*.html"):
        assert "arithmatex" not in page.read_text("utf-8"), page.name


def test_roles_of_docstrings_do_not_show(site: Path) -> None:
    for page in (site / "reference").rglob("*.html"):
        assert not re.search(r":(class|func|meth|mod|data|attr|exc):", page.read_text("utf-8"))


def test_every_page_of_the_reference_shows_its_names(site: Path) -> None:
    text = (site / "reference" / "api" / "index.html").read_text("utf-8")
    assert 'id="attnlens.analysis.Analysis"' in text
    assert 'id="attnlens.runner.run"' in text


def test_notebooks_are_pages_with_what_their_cells_show(site: Path) -> None:
    for path in (ROOT / "examples").glob("*.ipynb"):
        text = (site / "notebooks" / f"{path.stem}.html").read_text("utf-8")
        outputs = [
            o for c in json.loads(path.read_text("utf-8"))["cells"] for o in c.get("outputs", [])
        ]
        images = re.findall(r'src="([\w-]+\.png)"', text)
        assert len(images) == sum("image/png" in o["data"] for o in outputs)
        assert all((site / "notebooks" / name).is_file() for name in images)
        assert text.count('class="output"') + len(images) > len(outputs) / 2
        assert "@@" not in text
    assert "notebooks/quickstart.html" in (site / "examples.html").read_text("utf-8")


def test_notes_for_readers_of_the_repository_stay_there(site: Path) -> None:
    assert "In the repository" in (ROOT / "docs/reference/api/view.md").read_text("utf-8")
    for page in (site / "reference").rglob("*.html"):
        assert "In the repository, this page" not in page.read_text("utf-8")


def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    if executable() is None:
        pytest.skip("no chromium on this machine")
    browser = Chromium()
    try:
        wide = {}
        for page in sorted(site.rglob("*.html")):
            browser.open(page, width=360)
            width = browser.js("document.documentElement.scrollWidth")
            if width > 360:
                wide[str(page.relative_to(site))] = width
        assert not wide
    finally:
        browser.close()
