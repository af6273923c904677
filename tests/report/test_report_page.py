"""The report: whole in itself, literal about every string, honest about what is missing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from conftest import build_run

from attnlens.errors import OutputError, StoreError, StoreVersionError
from attnlens.report import write_report

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
FETCHING = {"src", "srcset", "data", "poster", "background", "action", "formaction", "ping"}
VOID = {"meta", "link", "img", "br", "rect", "path"}


class Page(HTMLParser):
    """Every tag with its attributes, the text of each element kind, and what was left open."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.content: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.content.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(
            " ".join(data for tag, data in self.content if tag not in ("style", "script")).split()
        )


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Page:
    """Edit run.json, write the report again, and read it."""
    path = folder / "run.json"
    run = json.loads(path.read_text(encoding="utf-8"))
    edit(run)
    path.write_text(json.dumps(run), encoding="utf-8")
    return Page(write_report(folder))


@pytest.fixture(scope="module")
def page(drawn_run: Path) -> Page:
    return Page(write_report(drawn_run))


def test_it_is_well_formed_and_small(page: Page, drawn_run: Path) -> None:
    assert page.open == []
    assert (drawn_run / "report.html").stat().st_size < 5_000_000
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in page.all("a") if a["href"].startswith("#")} <= set(ids)


def test_nothing_is_fetched(page: Page) -> None:
    for tag, attributes in page.tags:
        for name in FETCHING & attributes.keys():
            assert attributes[name].startswith("data:"), (tag, attributes[name][:80])
        if tag == "link":
            assert attributes["href"].startswith("data:")
        assert tag not in ("iframe", "object", "embed", "base", "form")
    style = "".join(data for tag, data in page.content if tag == "style")
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_admits_only_the_pages_own_style_and_script(page: Page) -> None:
    (policy,) = (
        m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert "unsafe" not in policy
    assert "http" not in policy
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.source, flags=re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    inline = [a for _, a in page.tags if "style" in a or any(k.startswith("on") for k in a)]
    assert inline == []


def test_it_can_be_used_from_the_keyboard_and_read_aloud(page: Page) -> None:
    assert all(image["alt"] for image in page.all("img"))
    assert page.all("html")[0]["lang"] == "en"
    assert page.all("a")[0]["href"] == "#findings"
    for tag, attributes in page.tags:
        if "data-enlarge" in attributes or "data-sort" in attributes or "data-copy" in attributes:
            assert tag == "button"


def test_findings_come_first_and_provenance_last(page: Page) -> None:
    sections = [a["id"] for a in page.all("section")]
    assert sections[0] == "findings"
    assert sections[-1] == "provenance"
    text = page.text
    found = text.index("31 of 144 heads")
    absent = text.index("Looked for and not found")
    assert found < absent < text.index("No group of heads") < text.index("Options (3)")
    assert "2 of 4 claims hold" in text
    assert "median rank 11.42 46.9" in text  # evidence, and by chance beside it
    assert "5.5, 6.9, 7.10" in text


def test_what_failed_and_what_was_skipped_is_said(page: Page) -> None:
    text = page.text
    assert "1 of 4 analyses failed" in text
    assert "DecompositionError. The scores of 3.1 are all equal." in text
    assert "Leave layer 3 out with --layers." in text
    assert "it needs the result of tails, which there is not" in text


def test_the_same_numbers_can_be_had_again(page: Page) -> None:
    text = page.text
    assert "attnlens run --plugins spectrum,cp,tails,gated -o cp.rank=4" in text
    assert "'it'\"'\"'s a test'" in text
    for fact in ("607a30d783dfa663", "9f2c1d0e77b3a1d6" * 4, "transformer-lens 4.3.0", "seed 0"):
        assert fact in text
    assert "rank = 4; restarts = 10; nonnegative = true; seed = null" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_the_command_is_what_a_shell_gets(bare_run: Path) -> None:
    words = ["attnlens", "a\u202eb'c\\", "\x1b[31m", "\udce9", "plain text", "\U000e0001", "東京"]
    page = change(bare_run, lambda run: run.update(command=words))
    (shown,) = re.findall(r'<code id="command">(.*?)</code>', page.source, flags=re.S)
    line = html.unescape(shown)
    assert all(c.isprintable() for c in line)
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"],
        capture_output=True,
        env={"LC_ALL": "C.UTF-8"},
        check=True,
    )
    got = said.stdout.decode("utf-8", "surrogateescape").split("\0")
    assert got == [*words, ""]


def test_a_python_call_stands_where_a_command_would(bare_run: Path) -> None:
    page = change(bare_run, lambda run: run.update(command=[], call="attnlens.run(model)"))
    assert '<code id="command">attnlens.run(model)</code>' in page.source
    assert page.source.count("data-copy=") == 1


def test_a_finding_has_a_short_heading_and_its_sentence_below(page: Page) -> None:
    headings = [data for tag, data in page.content if tag == "h3"]
    assert headings[:2] == ["Low rank heads", "Attention sink"]
    assert max(map(len, headings)) < 60
    texts = [data for tag, data in page.content if tag == "p"]
    assert any(text.startswith("31 of 144 heads") for text in texts)


def test_what_was_captured_is_told_and_not_dumped(bare_run: Path) -> None:
    store = {"where": "", "activations": {"z": "float16"}, "derived": ["pattern"],
             "statistics": ["pattern.entropy"], "weights": True, "prompts": 4,
             "longest": 32}  # fmt: skip
    twin = {**store, "where": "twins/000", "weights": False}
    plan = {"stores": [store, twin], "disk_bytes": 73400320, "free_disk": 69411418112}
    text = change(bare_run, lambda run: run.update(plan=plan)).text
    held = "4 x 32 tokens: z (float16); pattern from q_rot and k_rot; pattern.entropy"
    assert f"store {held}; weights twins/000 {held}" in text
    assert "disk_bytes 70 MiB" in text
    assert "69411418112" not in text


def test_long_rows_of_texts_are_folded_beyond_the_first(bare_run: Path) -> None:
    row = {"label": "c", "tokens": [" a"], "weights": [1.0]}
    content = json.dumps({"rows": [row] * 9, "signed": False})
    (bare_run / "cp/highlights/text.json").write_text(content, encoding="utf-8")
    source = Page(write_report(bare_run)).source
    first, _, rest = source.partition("<summary>6 more</summary>")
    assert (first.count('class="line"'), rest.count('class="line"')) == (3, 6)


def test_links_beside_the_report_lead_to_files(page: Page, drawn_run: Path) -> None:
    links = [a["href"] for a in page.all("a") if "download" in a]
    assert len(links) == 2 * 7 + 2
    assert all((drawn_run / unquote(href)).is_file() for href in links)


def test_numbers_are_right_aligned_and_sort_by_their_full_value(page: Page) -> None:
    heads = [a for a in page.all("th") if a.get("scope") == "col"]
    assert sum(a.get("class") == "num" for a in heads) == 4 + 2
    cells = [a for a in page.all("td") if a.get("class") == "num"]
    assert all(float(a["data-v"]) is not None for a in cells)
    assert "1.2 × 10⁻⁷" in page.text


def test_a_column_of_numbers_stands_in_line(bare_run: Path) -> None:
    table = "a,b,n,mixed\n12.5,-0.25,1,1e-9\n3.14159,0.125,20,5.0\nnan,,300,2.0\n"
    (bare_run / "cp/tables/fit.csv").write_text(table, encoding="utf-8")
    page = Page(write_report(bare_run))
    shown = [data for tag, data in page.content if tag == "td"][-12:]
    assert shown == ["12.50", "−0.2500", "1", "1\u00a0×\u00a010⁻⁹", "3.14", "0.1250", "20", "5",
                     "–", "–", "300", "2"]  # fmt: skip


def test_figures_take_the_smaller_file_once_large(drawn_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(drawn_run, folder)
    large = folder / "spectrum/figures/entropy.svg"
    padding = f"<!--{'x' * 400_000}--></svg>"
    padded = large.read_text(encoding="utf-8").replace("</svg>", padding)
    large.write_text(padded, encoding="utf-8")
    first = Page(write_report(folder)).all("img")[0]["src"]
    assert first.startswith("data:image/png;base64,")
    content = base64.b64decode(first.partition(",")[2])
    assert content == (folder / "spectrum/figures/entropy.png").read_bytes()


def test_many_figures_stay_within_the_budget(bare_run: Path) -> None:
    def many(run: dict[str, Any]) -> None:
        svg = bare_run / "f.svg"
        svg.write_text("<svg>" + "x" * 110_000 + "</svg>")
        (bare_run / "f.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50_000)
        entry = {"name": "f", "title": "f", "alt": "f", "png": "f.png", "svg": "f.svg"}
        run["analyses"][0]["figures"] = [entry] * 50

    page = change(bare_run, many)
    assert len(page.all("img")) == 50
    assert (bare_run / "report.html").stat().st_size < 5_000_000


def test_every_string_is_literal(bare_run: Path) -> None:
    def evil(value: Any) -> Any:
        if isinstance(value, dict):
            keep = ("schema", "status", "started", "png", "svg", "csv", "json")
            names = {k: k if k in known else EVIL for k in value}
            return {names[k]: v if k in keep else evil(v) for k, v in value.items()}
        if isinstance(value, list):
            return [evil(v) for v in value]
        return EVIL if isinstance(value, str) else value

    run = json.loads((bare_run / "run.json").read_text(encoding="utf-8"))
    known = set(run) | {"windows", "config"}
    for part in (run["model"], run["analyses"][0], run["findings"][0], run["analyses"][2]["error"]):
        known |= set(part)
    known |= {"name", "title", "alt", "png", "svg", "csv", "json"}
    (bare_run / "run.json").write_text(json.dumps(evil(run)), encoding="utf-8")
    table = bare_run / "cp/tables/fit.csv"
    quoted = EVIL.replace('"', '""')
    table.write_text(f'"{quoted}",x\n"{quoted}",1\n', encoding="utf-8")
    lines = {"rows": [{"label": EVIL, "tokens": [EVIL, "b"], "weights": [1, -1]}], "signed": True}
    (bare_run / "cp/highlights/text.json").write_text(json.dumps(lines), encoding="utf-8")
    page = Page(write_report(bare_run))
    assert len(page.all("script")) == 1
    assert len(page.all("img")) == 0
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    shown = page.text.count("<script>alert(1)</script>")
    assert shown > 40
    titles = [data for tag, data in page.content if tag == "title"]
    assert titles == [EVIL + " · attnlens report"]


def test_control_characters_and_reordering_marks_are_shown(bare_run: Path) -> None:
    page = change(bare_run, lambda run: run["model"].update(name="a\x00b\ud800c\u202ed\x1b[31m"))
    assert "aU+0000bU+D800cU+202EdU+001B[31m" in page.text


def test_tokens_keep_their_text_and_their_shade(page: Page) -> None:
    spans = [a for a in page.all("span") if "title" in a]
    assert {"p10"} <= {a.get("class", "") for a in spans}
    assert any(a.get("class", "").startswith("m") for a in spans)
    shown = [d for tag, d in page.content if tag == "span"]
    assert " beginning" in shown
    assert " <script>" in shown
    assert " 東京" in shown


def test_missing_and_damaged_files_are_told_in_their_place(bare_run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.svg").write_text("<svg>secret</svg>")
    (bare_run / "spectrum/tables/heads.csv").unlink()
    (bare_run / "cp/tables/fit.csv").write_text("")
    (bare_run / "cp/highlights/text.json").write_text('{"rows": [{"label": "a"')
    figures = bare_run / "cp" / "figures"
    figures.mkdir()
    (figures / "clusters.svg").write_text("not a drawing")

    def edit(run: dict[str, Any]) -> None:
        run["analyses"][0]["figures"][0].update(svg="../secret.svg", png=None)

    page = change(bare_run, edit)
    text = page.text
    assert "../secret.svg lies outside the run's folder" in text
    assert "the file spectrum/figures/depth.svg is not there" in text
    assert "cp/figures/clusters.svg is not a SVG file" in text
    assert "the file spectrum/tables/heads.csv is not there" in text
    assert "cp/tables/fit.csv is empty" in text
    assert "cp/highlights/text.json cannot be read" in text
    assert "secret</svg>" not in page.source


def test_a_run_with_next_to_nothing_is_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": "attnlens-run/1"}', encoding="utf-8")
    page = Page(write_report(tmp_path))
    assert "No analysis of this run makes claims" in page.text
    assert "unnamed model" in page.text


def test_long_tables_are_cut_and_say_so(bare_run: Path) -> None:
    rows = "\n".join(f"{i},x" for i in range(2000))
    (bare_run / "cp/tables/fit.csv").write_text(f"n,word\n{rows}\n", encoding="utf-8")
    assert "The first 500 of 2000 rows" in Page(write_report(bare_run)).text


def test_a_report_is_the_same_every_time(drawn_run: Path) -> None:
    first = write_report(drawn_run).read_bytes()
    assert write_report(drawn_run).read_bytes() == first
    assert not list(drawn_run.glob("*.tmp"))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no run\.json"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match="cannot be read"):
        write_report(tmp_path)
    for other in ('{"schema": "attnlens-run/99"}', "[]", '{"a": 1}'):
        (tmp_path / "run.json").write_text(other, encoding="utf-8")
        with pytest.raises(StoreVersionError, match="attnlens-run/1"):
            write_report(tmp_path)


def test_a_report_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    folder = build_run(tmp_path / "run", draw=False)
    (folder / "report.html").mkdir()
    with pytest.raises(OutputError, match=r"report\.html cannot be written"):
        write_report(folder)
    assert not list(folder.glob("*.tmp"))
