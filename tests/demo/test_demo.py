"""The bundled model: what it is for, by plain Hugging Face attention."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnlens.demo import MODEL_FOLDER, TEXT_FILE


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(
        MODEL_FOLDER, dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


@pytest.fixture(scope="module")
def patterns(model: Any) -> dict[int, torch.Tensor]:
    """By period, the mean pattern [layer, head, query, key] on BOS, stretch, stretch."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for period in (20, 31):
        stretch = torch.randint(1, 512, (24, period), generator=generator)
        tokens = torch.cat([torch.zeros(24, 1, dtype=torch.long), stretch, stretch], dim=1)
        with torch.inference_mode():
            attentions = model(tokens, output_attentions=True).attentions
        found[period] = torch.stack(attentions).mean(1)
    return found


def looking_back(pattern: torch.Tensor, offset: int, first_query: int) -> torch.Tensor:
    """Mean weight [layer, head] that queries from `first_query` on give `offset` tokens back."""
    queries = range(first_query, pattern.shape[-1])
    return torch.stack([pattern[..., q, q - offset] for q in queries]).mean(0)


@pytest.mark.parametrize("period", [20, 31])
def test_there_is_a_previous_token_head(patterns: dict[int, torch.Tensor], period: int) -> None:
    assert looking_back(patterns[period], 1, 1).max() > 0.9


@pytest.mark.parametrize("period", [20, 31])
def test_there_is_an_induction_head_in_a_later_layer(
    patterns: dict[int, torch.Tensor], period: int
) -> None:
    previous = looking_back(patterns[period], 1, 1).flatten().argmax() // 8
    induction = looking_back(patterns[period], period - 1, period + 1)
    assert induction.max() > 0.5
    assert induction.flatten().argmax() // 8 > previous


def test_repetition_is_predicted(model: Any) -> None:
    generator = torch.Generator().manual_seed(8)
    stretch = torch.randint(1, 512, (16, 25), generator=generator)
    tokens = torch.cat([torch.zeros(16, 1, dtype=torch.long), stretch, stretch], dim=1)
    with torch.inference_mode():
        guess = model(tokens).logits.argmax(-1)
    right = (guess[:, 26:-1] == tokens[:, 27:]).float().mean()
    assert right > 0.9, right


def test_text_is_predicted_far_better_than_by_chance(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(TEXT_FILE.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    tokens = torch.tensor(ids[: 128 * 40]).reshape(40, 128)
    with torch.inference_mode():
        assert model(tokens, labels=tokens).loss < 3.5  # ln 512 = 6.24


def test_the_context_is_used_to_its_end(model: Any, tokenizer: Any) -> None:
    text = TEXT_FILE.read_text(encoding="utf-8")[:60_000]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    rows = torch.tensor(ids[: 255 * 40]).reshape(40, 255)
    tokens = torch.cat([torch.zeros(40, 1, dtype=torch.long), rows], dim=1)
    with torch.inference_mode():
        logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    ).mean(0)
    assert loss[200:].mean() < loss[60:120].mean() + 0.15


# --- the folder ---


def test_size_for_the_wheel() -> None:
    folder = MODEL_FOLDER.parent
    files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) <= 2_000_000
    assert TEXT_FILE.stat().st_size <= 300_000


def test_the_folder_is_whole_and_readable_by_all() -> None:
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert {p.name for p in MODEL_FOLDER.iterdir()} == names | {"tokenizer_config.json"}
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in MODEL_FOLDER.iterdir())


def test_weights_are_float16_and_finite() -> None:
    from safetensors.torch import load_file

    weights = load_file(MODEL_FOLDER / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float16}
    assert all(torch.isfinite(w).all() for w in weights.values())


def test_positions_are_rotary_and_there_is_one_head_per_key_head(model: Any) -> None:
    config = model.config
    assert config.model_type == "llama" and config.max_position_embeddings >= 256
    assert config.num_hidden_layers == 3
    assert config.num_attention_heads == config.num_key_value_heads == 8


@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_the_tokenizer_encodes_any_text(tokenizer: Any, text: str) -> None:
    text = text.replace("<s>", "").encode("utf-8", "replace").decode()
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0
    assert all(0 < i < 512 for i in ids[1:])
    assert tokenizer.decode(ids[1:]) == text


def test_the_tokenizer_makes_text_shorter(tokenizer: Any) -> None:
    text = TEXT_FILE.read_text(encoding="utf-8")
    assert len(tokenizer(text, verbose=False)["input_ids"]) < 0.45 * len(text)
    assert len(tokenizer) == 512


def test_the_text_is_readable_prose() -> None:
    text = TEXT_FILE.read_bytes().decode("ascii")
    assert text.startswith("Genesis 1\nIn the beginning God created the heaven and the earth.\n")
    assert "\r" not in text and text.endswith(".\n")


def rows_of(card: str, title: str) -> Iterator[list[str]]:
    section = card.split(f"## {title}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"[\d.]+", cells[-1]):
            yield cells


def test_the_card_names_scores_that_are_true(patterns: dict[int, torch.Tensor]) -> None:
    card = (MODEL_FOLDER / "README.md").read_text(encoding="utf-8")
    assert "public domain" in card and "bible-kjv-text" in card
    assert len(list(rows_of(card, "Losses"))) == 2
    offsets = {"previous-token": (1, 1), "induction": (30, 32), "duplicate-token": (31, 32)}
    named = {kind: (head, float(score)) for kind, head, score in rows_of(card, "Heads")}
    assert set(named) == set(offsets)
    for kind, (head, score) in named.items():
        layer, number = map(int, head.split("."))
        measured = looking_back(patterns[31], *offsets[kind])[layer, number]
        assert measured == pytest.approx(score, abs=0.05), kind


def test_paths_need_no_torch() -> None:
    import subprocess
    import sys

    script = "import sys, attnlens.demo; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.strip() == "False", said.stderr


def test_config_says_how_it_is_stored() -> None:
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert not any("/" in str(v) for v in config.values()), "a path of the training machine"
    assert Path(MODEL_FOLDER).name == "model"
