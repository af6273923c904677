"""What the built-in analyses say: of figures, what is seen; of heads, sentences that read well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnlens_plugins.words import heads_that, span

import attnlens
from tests.modelzoo import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return attnlens.run(
        "demo",
        options={
            "cp": {"rank": "2..3", "n_restarts": 2, "n_splits": 1, "max_tokens": 64},
            "tucker": {"max_tokens": 64},
            "equivariance": {"prompts": 2, "length": 12, "shuffles": 1},
        },
        samples=4,
        length=16,
        twins=1,
        out=tmp_path_factory.mktemp("told") / "run",
    )


def test_an_alternative_text_says_what_is_seen(run: Any) -> None:
    assert not run.errors
    for entry in run.record["analyses"]:
        assert entry["figures"]
        for figure in entry["figures"]:
            name, text = f"{entry['name']}.{figure['name']}", figure["alt"]
            without_heads = re.sub(r"\d+\.\d+(?= \()", "", text)
            assert len(re.findall(r"\d+(?:\.\d+)?%?", without_heads)) >= 3, f"{name}: {text}"
            assert text.endswith("."), f"{name}: {text}"
            assert text != figure["title"]


def test_no_range_has_two_equal_ends(run: Any, tmp_path: Path) -> None:
    for finding in run.findings:
        same = re.findall(r"\b(\S+) to \1\b", finding.text)
        assert not same, finding.text


def test_what_could_not_be_measured_is_said_once(tmp_path: Path) -> None:
    from attnlens_plugins.equivariance import Equivariance

    # Positions are embedded in the residual stream, so that one prompt does not tell.
    model, tokens = tiny("gpt2", tmp_path / "gpt2"), np.arange(1, 9)[None]
    one = attnlens.run(model, [Equivariance], corpus=tokens, twins=0, out=tmp_path / "run")
    said = [f.text for f in one.findings]
    assert any("not measured" in text for text in said)
    assert len(said) == len(set(said))


def test_one_head_has_a_verb_in_the_singular() -> None:
    put = "put 51% of their attention on the first token"
    assert heads_that(2, 24, put) == f"2 of 24 heads {put}"
    assert heads_that(1, 24, put) == "1 of 24 heads puts 51% of its attention on the first token"
    assert heads_that(1, 8, "have scores of low rank") == "1 of 8 heads has scores of low rank"
    assert heads_that(1, 8, "are focused") == "1 of 8 heads is focused"


def test_a_span_of_one_value_is_that_value() -> None:
    assert span(0.512, 0.514, "{:.0%}") == "51%"
    assert span(0.1, 0.2, "{:.0%}") == "10% to 20%"
