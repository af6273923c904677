"""attnlens.capture against plain Hugging Face attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from attnlens.activations import MASKED_SCORE
from attnlens.errors import (
    CaptureError,
    MissingActivationError,
    NeedError,
    NonFiniteError,
    OutOfMemoryError,
)
from attnlens.models import load_model
from attnlens.recorder import capture
from attnlens.store import open_store

GRID = ("gpt2", "llama", "mistral", "neox", "gemma2", "qwen3", "bert")


def plain(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Attention as Hugging Face gives it, ``[prompt, layer, head, query_pos, key_pos]``."""
    auto = (
        transformers.AutoModelForMaskedLM
        if "bert" in folder.name
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        out = model(torch.as_tensor(tokens), output_attentions=True, use_cache=False)
    return np.stack([a.numpy() for a in out.attentions], axis=1)


@pytest.mark.parametrize("family", GRID)
def test_patterns_are_those_of_plain_hugging_face(
    family: str, folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    store = capture(
        folder(family), tokens, out=tmp_path / "s.attn", dtypes={"pattern": "float32"}, batch_size=2
    )
    expected = plain(folder(family), tokens)
    np.testing.assert_allclose(store["pattern"].values, expected, atol=1e-5)
    assert store["pattern"].dims == ("prompt", "layer", "head", "query_pos", "key_pos")
    np.testing.assert_array_equal(store.tokens.values, tokens)
    half = capture(folder(family), tokens, out=tmp_path / "half.attn")
    np.testing.assert_allclose(half["pattern"].values, expected, atol=2.5e-4)


def test_grouped_queries_keep_their_own_heads(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    store = capture(
        folder("llama"), tokens, activations=["q", "k", "v", "z"], out=tmp_path / "s.attn"
    )
    assert store["q"].sizes["head"] == store["z"].sizes["head"] == 4
    assert store["k"].sizes["kv_head"] == store["v"].sizes["kv_head"] == 2
    # z is the pattern's average of the values that head // group gives.
    pattern = plain(folder("llama"), tokens)
    values = np.repeat(store["v"].values, 2, axis=3)
    expected = np.einsum("plhqk,plkhd->plqhd", pattern, values)
    np.testing.assert_allclose(store["z"].values, expected, atol=3e-3)


def test_chosen_heads_bring_the_key_value_heads_that_they_read(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"activations": ["q", "v", "pattern"], "batch_size": 2}
    whole = capture(folder("llama"), tokens, out=tmp_path / "whole.attn", **options)
    part = capture(
        folder("llama"),
        tokens,
        out=tmp_path / "part.attn",
        layers=[1],
        heads=[2, 3],
        positions=[0, -1],
        **options,
    )
    assert part["v"].coords["kv_head"].values.tolist() == [1]
    assert part["q"].coords["head"].values.tolist() == [2, 3]
    assert part["q"].coords["pos"].values.tolist() == [0, 8]
    assert part["q"].coords["layer"].values.tolist() == [1]
    np.testing.assert_array_equal(
        part["q"].values, whole["q"].values[:, 1:, [0, 8]][:, :, :, [2, 3]]
    )
    np.testing.assert_array_equal(part["v"].values, whole["v"].values[:, 1:, [0, 8]][:, :, :, [1]])
    np.testing.assert_array_equal(
        part["pattern"].values, whole["pattern"].values[:, 1:, [2, 3]][:, :, :, [0, 8]]
    )


def test_a_slice_does_not_keep_the_whole_tensor(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    ids = np.ones((64, 9), dtype=int)
    store = capture(
        folder("gpt2"), ids, activations=["z"], positions="last", out=tmp_path / "s.attn"
    )
    assert store["z"].shape == (64, 2, 1, 4, 4)
    raw = 64 * 2 * 4 * 4 * 2
    written = sum(f.stat().st_size for f in tmp_path.glob("s.attn/units/*/z/c*"))
    # One shard per layer with its index; repeated prompts compress well below the raw size.
    assert written < raw + 2048


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_scores_are_what_the_pattern_is_the_softmax_of(
    family: str, folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    store = capture(
        folder(family), tokens, activations=["scores", "pattern"], out=tmp_path / "s.attn"
    )
    scores = torch.from_numpy(store["scores"].values)
    assert torch.isfinite(scores).all()
    above = torch.ones(9, 9).triu(1).bool()
    assert (scores[..., above] == MASKED_SCORE).all()
    np.testing.assert_allclose(scores.softmax(-1), store["pattern"].values, atol=3e-4)


def test_scores_that_are_the_pattern_are_refused(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    with pytest.raises(MissingActivationError, match="scores"):
        capture(folder("bert"), tokens, activations=["scores"], out=tmp_path / "s.attn")
    assert not (tmp_path / "s.attn" / "manifest.json").exists()


def test_prompts_of_several_lengths_are_the_same_alone_and_together(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    ids = [[3, 4, 5], [7], [9, 8, 7], [3, 4], [7, 7, 7]]
    options: dict[str, Any] = {
        "activations": ["z"],
        "statistics": ["pattern.entropy", "pattern.received"],
        "dtypes": {"z": "float32"},
    }
    together = capture(folder("gpt2"), ids, out=tmp_path / "all.attn", **options)
    assert together.lengths.values.tolist() == [3, 1, 3, 2, 3]
    for number, prompt in enumerate(ids):
        alone = capture(folder("gpt2"), [prompt], out=tmp_path / f"{number}.attn", **options)
        n = len(prompt)
        np.testing.assert_allclose(
            together["z"].values[number, :, :n], alone["z"].values[0], atol=1e-6
        )
        assert np.isnan(together["z"].values[number, :, n:]).all()
        np.testing.assert_allclose(
            together["pattern.entropy"].values[number],
            alone["pattern.entropy"].values[0],
            atol=1e-6,
        )


def test_one_layer_needs_no_other(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    ran: list[int] = []
    for layer, block in enumerate(model.bridge.blocks):
        block.register_forward_hook(lambda *_, layer=layer: ran.append(layer))  # type: ignore[misc]
    store = capture(model, tokens, activations=["pattern"], layers=[0], out=tmp_path / "s.attn")
    assert store["pattern"].sizes["layer"] == 1
    numbers = {"prompt", "layer", "head", "pos", "query_pos", "key_pos"}
    held = {p.name for p in (tmp_path / "s.attn" / "units" / "000000").iterdir()}
    assert held == {"pattern", "prompt_id", "tokens", "zarr.json", *numbers}
    assert 1 not in ran


def test_result_is_derived_from_z_and_weights(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    store = capture(
        folder("llama"),
        tokens,
        activations=["result", "attn_out"],
        dtypes={"z": "float32", "attn_out": "float32"},
        out=tmp_path / "s.attn",
    )
    assert "result" not in store.manifest.activations
    np.testing.assert_allclose(
        store["result"].sum("head").values, store["attn_out"].values, atol=1e-4
    )


def test_the_model_is_left_as_it_was_found(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder("gpt2"))
    model = load_model(hf)
    hf.train()
    hf.transformer.h[0].eval()
    seen: list[int] = []
    model.bridge.add_hook("blocks.0.attn.hook_pattern", lambda x, hook: seen.append(1))
    modes = [m.training for m in hf.modules()]
    random = torch.get_rng_state()
    numpy_random = np.random.get_state()[1].copy()
    device = next(hf.parameters()).device
    capture(model, tokens, out=tmp_path / "s.attn", batch_size=5)
    assert [m.training for m in hf.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert np.array_equal(np.random.get_state()[1], numpy_random)
    assert next(hf.parameters()).device == device
    assert hf.transformer.wte.weight.requires_grad
    assert not any(
        getattr(block.attn, "_pattern", None) is not None for block in model.bridge.blocks
    )
    # The user's own hook saw our pass, and sees the next one.
    assert len(seen) == 1
    model.bridge(torch.as_tensor(tokens))
    assert len(seen) == 2


def test_dropout_is_off_while_capturing(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        folder("gpt2"), attn_pdrop=0.5, resid_pdrop=0.5
    )
    model = load_model(hf)
    hf.train()
    store = capture(model, tokens, out=tmp_path / "s.attn", dtypes={"pattern": "float32"})
    np.testing.assert_allclose(store["pattern"].values, plain(folder("gpt2"), tokens), atol=1e-5)


def test_nan_from_a_hook_of_the_users_is_caught_with_its_place(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))

    def spoil(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
        spoilt = pattern.clone()
        spoilt[1, 2, 3, 0] = torch.nan
        return spoilt

    model.bridge.add_hook("blocks.1.attn.hook_pattern", spoil)
    with pytest.raises(NonFiniteError) as caught:
        capture(model, tokens, statistics=["pattern.max"], activations=[], out=tmp_path / "s.attn")
    for part in ("pattern", "layer 1", "head 2", "query_pos 3", "prompt 1"):
        assert part in str(caught.value)
    assert list((tmp_path / "s.attn" / "units").iterdir()) == []


def test_a_hook_that_never_fires_is_an_error_that_names_it(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    model = load_model(folder("bert"))
    # Somebody switches to a fused kernel behind our back: it has no weights to show.
    model.bridge.original_model.config._attn_implementation = "sdpa"
    with pytest.raises(MissingActivationError, match=r"blocks\.1\.attn\.hook_pattern"):
        capture(model, tokens, out=tmp_path / "s.attn")
    assert list((tmp_path / "s.attn" / "units").iterdir()) == []


def test_an_unknown_activation_names_the_nearest(folder: Callable[..., Path]) -> None:
    with pytest.raises(NeedError, match="Did you mean 'pattern'"):
        capture(folder("gpt2"), [[1]], activations=["patern"])
    with pytest.raises(NeedError, match="no activation"):
        capture(folder("gpt2"), [[1]], activations=["pattern.entropy"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_close_to_single_precision(
    dtype: torch.dtype, folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    store = capture(
        folder("llama"),
        tokens,
        activations=["pattern", "z", "q_rot", "scores"],
        statistics=["pattern.entropy", "z.second_moment"],
        dtype=dtype,
        out=tmp_path / "s.attn",
    )
    expected = plain(folder("llama"), tokens)
    np.testing.assert_allclose(store["pattern"].values, expected, atol=5e-2)
    assert str(dtype).endswith(store.manifest.model["dtype"])
    assert store["pattern"].dtype == np.float32
    rows = -np.where(expected > 0, expected * np.log(np.maximum(expected, 1e-30)), 0).sum(-1)
    np.testing.assert_allclose(store["pattern.entropy"].values, rows.mean(-1), atol=2e-2)


def test_values_that_float16_cannot_hold_are_stored_as_float32(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    passes = 0

    def grow(z: torch.Tensor, hook: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return z * (1e7 if passes == 3 else 1.0)

    # The third batch is the first that does not fit: what was written before goes.
    model.bridge.add_hook("blocks.0.attn.hook_z", grow)
    store = capture(
        model, tokens, activations=["z", "pattern"], batch_size=1, out=tmp_path / "s.attn"
    )
    assert store.manifest.activations["z"].dtype == "float32"
    assert store.manifest.activations["pattern"].dtype == "float16"
    assert np.isfinite(store["z"].values).all()


def test_capture_without_a_folder_lies_in_a_temporary_one(
    folder: Callable[..., Path], tokens: np.ndarray
) -> None:
    store = capture(folder("gpt2"), tokens, statistics=["pattern.max"], activations=[])
    assert store.path is not None and store.path.exists()
    assert store["pattern.max"].sizes == {"prompt": 5, "layer": 2, "head": 4}
    assert store.model.facts.n_heads == 4


def test_text_goes_through_the_tokenizer(folder: Callable[..., Path], tmp_path: Path) -> None:
    store = capture(
        folder("llama", tokenizer=True), ["the light", "In the beginning"], out=tmp_path / "s.attn"
    )
    assert "".join(store.token_strings(1)).strip().endswith("beginning")
    assert store.vocabulary is not None


def test_the_manifest_says_where_it_all_came_from(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    capture(folder("gpt2"), tokens, weights=True, seed=3, out=tmp_path / "s.attn")
    manifest = json.loads((tmp_path / "s.attn" / "manifest.json").read_text())
    assert manifest["seed"] == 3
    assert manifest["model"]["weights_hash"]
    assert {"attnlens", "torch", "transformer-lens", "python"} <= set(manifest["versions"])
    assert "W_O" in manifest["weights"]
    assert open_store(tmp_path / "s.attn").weights["W_O"].sizes["head"] == 4


def test_scores_that_do_not_belong_to_the_pattern_are_an_error(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    model.bridge.add_hook("blocks.1.attn.hook_pattern", lambda p, hook: p.flip(1))
    with pytest.raises(CaptureError, match="layer 1"):
        capture(model, tokens, activations=["scores", "pattern"], out=tmp_path / "s.attn")


def test_running_out_of_memory_is_one_message_with_advice(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))

    def exhaust(value: torch.Tensor, hook: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.bridge.add_hook("blocks.1.attn.hook_q", exhaust)
    with pytest.raises(OutOfMemoryError, match="float32") as caught:
        capture(model, tokens, out=tmp_path / "s.attn")
    assert "batch" in str(caught.value)
    assert list((tmp_path / "s.attn" / "units").iterdir()) == []
