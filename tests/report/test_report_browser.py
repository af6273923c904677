"""The report in a real browser, where there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium_pipe import Chromium, executable
from conftest import build_run

from attnlens.report import write_report

pytestmark = pytest.mark.skipif(executable() is None, reason="no chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    started = Chromium()
    yield started
    started.close()


@pytest.fixture(scope="module")
def report(drawn_run: Path) -> Path:
    return write_report(drawn_run)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_loads_quietly_and_fits(browser: Chromium, report: Path, width: int, dark: bool) -> None:
    browser.open(report, width=width, dark=dark)
    assert browser.js("document.documentElement.scrollWidth") <= width
    assert browser.js("[...document.images].every(i => i.complete && i.naturalWidth > 50)")
    assert browser.said() == []
    assert browser.requested() == [report.as_uri()]
    light = browser.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(light) < 150) == dark


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_told_from_its_ground(browser: Chromium, report: Path, dark: bool) -> None:
    """WCAG AA: 4.5 to 1 for every text that lies on a plain ground."""
    browser.open(report, dark=dark)
    worst = browser.js("""(() => {
      const lum = (c) => { const l = c.map(v => v / 255).map(v =>
        v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * l[0] + .7152 * l[1] + .0722 * l[2]; };
      const rgba = (s) => { const n = s.match(/[\\d.]+/g).map(Number);
        return n.length < 4 ? [...n, 1] : n; };
      const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3]));
      const ground = (e) => e ? over(rgba(getComputedStyle(e).backgroundColor),
        ground(e.parentElement)) : [255, 255, 255];
      let worst = [99, ""];
      for (const e of document.querySelectorAll("body *")) {
        const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
        if (!own || e.closest("script, style, dialog")) continue;
        const a = lum(over(rgba(getComputedStyle(e).color), ground(e))), b = lum(ground(e));
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < worst[0]) worst = [ratio, e.outerHTML.slice(0, 120)];
      }
      return worst;
    })()""")
    assert worst[0] >= 4.5, worst


def test_no_number_is_broken_on_a_phone(browser: Chromium, tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", draw=False)
    run = json.loads((folder / "run.json").read_text())
    few, many = [0.00016753, 0.00014891], {f"{i}.{i}": 0.00012345 + i for i in range(9)}
    own = {"redundant_dimensions": few, "error": 1.234e-7, "values": few}
    run["findings"][0].update(evidence=own, null={"error": 1.234e-7, "values": many})
    (folder / "run.json").write_text(json.dumps(run))
    browser.open(write_report(folder), width=360)
    assert browser.js("document.documentElement.scrollWidth") <= 360
    broken = browser.js("""[...document.querySelectorAll('td, .said')].flatMap(cell => {
      const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
      for (let node; node = walker.nextNode();)
        for (const m of node.data.matchAll(/[−\\d.]+(\\u00a0×\\u00a010[⁻⁰-⁹¹²³]+)?/g)) {
          const range = document.createRange();
          range.setStart(node, m.index);
          range.setEnd(node, m.index + m[0].length);
          if (new Set([...range.getClientRects()].map(r => r.top)).size > 1) found.push(m[0]);
        }
      return found;
    })""")
    assert broken == []


def test_a_row_of_sentences_is_lower_than_its_box(browser: Chromium, tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", draw=False)
    columns = [f"c{i}" for i in range(8)]
    row = ["Heads 0.6 and 0.4, on all tokens alike, write a direction that raises “ God”."] * 8
    lines = [columns, row, row]
    table = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    (folder / "cp/tables/fit.csv").write_text(table, encoding="utf-8")
    browser.open(write_report(folder), width=360)
    assert browser.js("document.querySelectorAll('.data')[1].tBodies[0].rows[0].offsetHeight") < 200
    assert browser.js("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("dark", [False, True])
def test_figures_go_with_the_page(browser: Chromium, report: Path, dark: bool) -> None:
    browser.open(report, dark=dark)
    shown = "getComputedStyle(document.querySelector('.paper img')).filter"
    assert ("invert" in browser.js(shown)) == dark


def test_a_figure_enlarges_and_closes_from_the_keyboard(browser: Chromium, report: Path) -> None:
    browser.open(report)
    browser.js("document.querySelector('[data-enlarge]').focus()")
    browser.press("Enter", 13)
    assert browser.js("document.getElementById('viewer').open")
    shown = browser.js("document.querySelector('#viewer img').getBoundingClientRect().width")
    assert shown > browser.js("document.querySelector('figure img').clientWidth")
    assert browser.js("document.querySelector('#viewer img').alt").startswith("Heat map")
    browser.press("Escape", 27)
    assert not browser.js("document.getElementById('viewer').open")
    assert browser.js("document.activeElement.hasAttribute('data-enlarge')")
    assert browser.said() == []


def test_a_table_sorts_both_ways_from_the_keyboard(browser: Chromium, report: Path) -> None:
    browser.open(report)
    column = "[...document.querySelector('.data').tBodies[0].rows].map(r => +r.cells[3].dataset.v)"
    before = browser.js(column)
    browser.js("document.querySelectorAll('.data')[0].querySelectorAll('[data-sort]')[3].focus()")
    browser.press("Enter", 13)
    assert browser.js(column) == sorted(before, reverse=True)
    browser.press("Enter", 13)
    assert browser.js(column) == sorted(before)
    assert browser.js("document.querySelector('.data th[aria-sort]').ariaSort") == "ascending"


def test_the_command_is_copied_at_one_press(browser: Chromium, report: Path) -> None:
    browser.open(report)
    browser.js("document.querySelector('[data-copy]').click()")
    status = "document.getElementById('status').textContent"
    told = f"new Promise(r => setTimeout(() => r({status}), 300))"
    assert "copied" in browser.js(told)


def test_everything_is_open_on_paper(browser: Chromium, report: Path) -> None:
    browser.open(report)
    pages = browser.call("Page.printToPDF")["data"]
    assert len(pages) > 10_000
    assert browser.js("[...document.querySelectorAll('main details')].every(d => d.open)")


def test_without_scripts_everything_can_still_be_read(browser: Chromium, report: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(report)
        document = browser.call("DOM.getDocument", depth=-1)
        assert document["root"]["childNodeCount"] >= 1
        browser.call("Page.captureScreenshot")
        assert browser.said() == []
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
