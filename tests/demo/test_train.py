"""The training script: what it feeds the model, what it measures, what it leaves."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlens.demo.rows import repeated_rows, text_rows
from attnlens.demo.scores import head_scores
from attnlens.demo.train import main


@given(st.integers(8, 80), st.integers(1, 10), st.integers(0, 10), st.integers(0, 100))
def test_repeated_rows_repeat_and_only_what_can_be_known_counts(
    length: int, shortest: int, more: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = repeated_rows(4, length, generator, (shortest, shortest + more))
    assert tokens.shape == labels.shape == (4, length)
    assert (tokens[:, 0] == 0).all() and (tokens[:, 1:] > 0).all() and tokens.max() < 512
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        period = label.count(-100) - 1
        assert shortest <= period <= min(shortest + more, length - 1) or period == length - 1
        assert label[1 + period :] == row[1 + period :] == row[1 : length - period]


@pytest.mark.parametrize("n", [9, 10, 40])
def test_text_rows_are_text(n: int) -> None:
    ids = torch.arange(100, 100 + n)
    tokens, labels = text_rows(ids, 200, 10, torch.Generator().manual_seed(0))
    assert tokens.shape == (200, 10) and (tokens == labels).all()
    assert (tokens[:, 0] == 0).all() and (tokens[:, 1:].diff(dim=1) == 1).all()
    # The whole text can be drawn, to both ends.
    assert tokens[:, 1].min() == 100 and tokens[:, -1].max() == 99 + n


class Heads(torch.nn.Module):
    """One layer of four ideal heads: the token before, induction, duplicate, uniform."""

    def forward(self, tokens: torch.Tensor, output_attentions: bool) -> Any:
        n = tokens.shape[1]
        period = (n - 1) // 2
        pattern = torch.zeros(len(tokens), 4, n, n)
        for query in range(n):
            pattern[:, 0, query, max(query - 1, 0)] = 1
            pattern[:, 1, query, query - period + 1 if query > period else 0] = 1
            pattern[:, 2, query, query - period if query > period else 0] = 1
            pattern[:, 3, query, : query + 1] = 1 / (query + 1)
        return SimpleNamespace(attentions=(pattern,))


def test_head_scores_of_ideal_heads() -> None:
    scores: Any = head_scores(Heads(), period=9, n_rows=2)  # type: ignore[arg-type]
    assert scores["previous-token"][0, :3].tolist() == pytest.approx([1, 0.5 / 9, 0.5 / 9])
    assert scores["induction"][0, :3].tolist() == [0, 1, 0]
    assert scores["duplicate-token"][0, :3].tolist() == [0, 0, 1]
    uniform = sum(1 / (query + 1) for query in range(10, 19)) / 9
    assert scores["induction"][0, 3] == pytest.approx(uniform)


def test_three_steps_with_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "text ü.txt"
    text.write_text("Es war einmal ein König, der hatte eine schöne Tochter.\n" * 1000)
    arguments = ["--steps", "3", "--every", "2", "--text", str(text), "--seed", "3"]
    with caplog.at_level(logging.INFO, "attnlens.demo"):
        main([*arguments, "--out", str(tmp_path / "a"), "--checkpoints", str(tmp_path / "c")])
    main([*arguments, "--out", str(tmp_path / "b")])
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"step0", "step2", "step3"}
    weights = [
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("c/step0", "c/step2", "c/step3", "a", "b")
    ]
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(weights[0][key], weights[1][key])
    assert not torch.equal(weights[1][key], weights[2][key])
    for name, tensor in weights[3].items():
        assert torch.equal(tensor, weights[2][name]) and torch.equal(tensor, weights[4][name])
    for folder in ("c/step0", "a"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert model.config.vocab_size == 512 >= len(tokenizer)
        card = (tmp_path / folder / "README.md").read_text(encoding="utf-8")
        assert "text ü.txt" in card and "induction" in card and str(tmp_path) not in card
    assert any(r.message.startswith("step 2") for r in caplog.records)


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--every", "0"], ["--text", "none.txt"]])
def test_wrong_options(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--out", str(tmp_path / "a"), *arguments])
    assert caught.value.code == 2


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(SystemExit, match="at least 5120 are needed"):
        main(["--out", str(tmp_path / "a"), "--text", str(tmp_path / "short.txt")])
