"""Tokens look the same whatever the tokenizer, and every character of them is seen."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens import figures
from attnlens.errors import AnalysisError
from attnlens.figures import tokens as tokens_module
from attnlens.figures.tokens import drawable


@pytest.mark.parametrize("spelling", [" the", "Ġthe", "▁the", "\u00a0the"])
def test_a_leading_space_looks_the_same_for_every_tokenizer(spelling: str) -> None:
    assert figures.show_token(spelling) == "·the"


@pytest.mark.parametrize("spelling", ["\n", "Ċ", "<0x0A>", b"\n", "\u2028"])
def test_a_newline_looks_the_same_for_every_tokenizer(spelling: str | bytes) -> None:
    assert figures.show_token(spelling) == "⏎"


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("", "∅"),
        ("\t", "⇥"),
        ("ĠĠĠ", "···"),
        ("ĊĊ", "⏎⏎"),
        ("<0xE6>", "<0xE6>"),
        (b"\xe6", "<0xE6>"),
        ("東京".encode(), "東京"),
        ("naïve", "naïve"),
        ("😀", "😀"),
        ("עברית", "עברית"),
        ("\x07", "U+0007"),
        ("\ud800", "U+D800"),
        ("a\u202eb", "aU+202Eb"),
        ("Ċirku", "Ċirku"),  # a Maltese word, not a newline
        ("<script>", "<script>"),
    ],
)
def test_odd_tokens_are_literal(token: str | bytes, shown: str) -> None:
    assert figures.visible_token(token) == shown


def test_long_tokens_are_cut_and_say_so() -> None:
    assert figures.show_token("a" * 100, 10) == "a" * 9 + "…"
    assert figures.visible_token("a" * 100) == "a" * 100


@given(st.text())
def test_every_token_is_printable_on_one_line(text: str) -> None:
    shown = figures.visible_token(text)
    assert shown
    assert "\n" not in shown
    assert all(c.isprintable() or c in "\u200c\u200d" for c in shown)


@given(st.text(alphabet="$\\ab_^{}", max_size=12))
def test_matplotlib_never_reads_a_token_as_mathematics(text: str) -> None:
    figure = figures.new_figure()
    label = figure.text(0.5, 0.5, figures.show_token(text, None))
    assert label._preprocess_math(label.get_text()) == (figures.visible_token(text), False)


def test_a_token_axis_labels_each_position() -> None:
    ax = figures.new_figure().subplots()
    figures.token_axis(ax, ["Ġa", "$x$", "\n"], "y")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["·a", r"\$x\$", "⏎"]
    assert list(ax.get_yticks()) == [0, 1, 2]


def test_one_token_too_many_is_an_error_that_names_both_lengths() -> None:
    ax = figures.new_figure().subplots()
    with pytest.raises(AnalysisError, match=r"78 tokens .* 77 positions"):
        figures.token_axis(ax, ["a"] * 78, length=77)
    with pytest.raises(AnalysisError, match=r"78 tokens .* 77 positions"):
        figures.token_loadings(figures.new_figure(), [[0.0] * 77], ["a"] * 78)


def test_what_no_font_has_becomes_its_code_point(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset(map(ord, "é"))
    monkeypatch.setattr(tokens_module, "_drawable_points", lambda: known)
    assert drawable("é东x京") == "éU+4E1CxU+4EAC"
    assert drawable("东京") == "U+4E1C U+4EAC"
    assert drawable("👩\u200d💻") == "U+1F469 U+1F4BB"


def test_scripts_without_a_font_cost_one_warning_in_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens_module._say_once.cache_clear()
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG, logger="attnlens"):
        warnings.simplefilter("error")
        for i in range(3):
            figure = figures.new_figure()
            figures.token_loadings(figure, [[1.0, 2.0, 3.0]], ["東京", "😀", "עברית"])
            _, svg = figures.save_figure(figure, tmp_path, f"f{i}")
    assert len(caplog.records) <= 1
    text = svg.read_text(encoding="utf-8")
    assert all(token in text for token in ("東京", "😀", "עברית"))
