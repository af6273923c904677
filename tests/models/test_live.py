"""Live models: what is the user's stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlens.errors import OptionError, UnsupportedModelError
from attnlens.models import Model, load_model
from tests.modelzoo import FAMILIES, build, config

NATIVE = {
    "d_model": 16,
    "d_head": 4,
    "n_heads": 4,
    "n_layers": 2,
    "n_ctx": 16,
    "d_vocab": 50,
    "act_fn": "gelu",
    "normalization_type": "LN",
}


def native(**changes: Any) -> Any:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_native(TransformerBridgeConfig(**(NATIVE | changes)))


def patterns(model: Model, tokens: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    with model.record(["pattern"], lambda name, layer, value: kept.append(value.clone())):
        model.forward(tokens)
    return kept


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_live_model_and_bridge_are_one_model(
    family: str, loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    named = loaded(family)
    live = load_model(build(family))
    bridge = load_model(live.bridge)
    for other in (live, bridge):
        assert other.facts.weights_hash == named.facts.weights_hash
        assert other.facts.n_params == named.facts.n_params
        assert other.available() == named.available()
        for a, b in zip(patterns(other, tokens), patterns(named, tokens), strict=True):
            assert torch.equal(a, b)


def test_a_live_model_computes_the_same_afterwards(tokens: Tensor) -> None:
    hf = build("llama")
    with torch.inference_mode():
        before = hf(tokens).logits
    model = load_model(hf)
    with torch.inference_mode():
        after = hf(tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert load_model(hf) is model
    assert load_model(model) is model


def test_sdpa_is_switched_to_eager_and_said(tokens: Tensor) -> None:
    from transformers import GPT2LMHeadModel

    hf = GPT2LMHeadModel(config("gpt2")).eval()
    assert hf.config._attn_implementation == "sdpa"
    model = load_model(hf)
    assert any("sdpa to eager" in note for note in model.notes)
    assert len(patterns(model, tokens)) == 2


def test_training_mode_is_kept_and_capture_has_no_dropout(tokens: Tensor) -> None:
    hf = build("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)
    hf.train()
    hf.transformer.h[1].eval()
    modes = {module: module.training for module in hf.modules()}
    model = load_model(hf)
    first, second = model.forward(tokens), model.forward(tokens)
    assert torch.equal(first, second)
    assert {module: module.training for module in modes} == modes
    assert hf.training
    assert not hf.transformer.h[1].training


def test_hooks_of_the_user_stay_and_are_not_fired_by_loading(tokens: Tensor) -> None:
    bridge = load_model(build("gpt2")).bridge
    fired: list[str] = []
    bridge.add_hook("blocks.0.attn.hook_pattern", lambda x, hook: fired.append("mine"))
    model = load_model(bridge)
    assert fired == []
    patterns(model, tokens)
    assert fired == ["mine"]
    bridge(tokens)
    assert fired == ["mine"] * 2


def test_a_hook_that_ablates_does_not_confuse_the_probe() -> None:
    bridge = load_model(build("gpt2")).bridge
    bridge.add_hook("blocks.0.attn.hook_pattern", lambda x, hook: x * 0 + 0.25)
    assert "scores" in load_model(bridge).available()


def test_hooks_are_removed_when_something_fails(
    loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    model = loaded("gpt2")

    def fail(name: str, layer: int, value: Tensor) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), model.record(["pattern"], fail):
        model.forward(tokens)
    assert not any(point._forward_hooks for point in model.bridge.hook_dict.values())
    model.forward(tokens)


def test_parameters_stay_where_and_what_they_are(tokens: Tensor) -> None:
    hf = build("llama").to(torch.float64)
    before = {name: (p.data_ptr(), p.dtype, p.device) for name, p in hf.named_parameters()}
    model = load_model(hf)
    model.forward(tokens)
    model.weights()
    after = {
        name.replace("._original_component", ""): (p.data_ptr(), p.dtype, p.device)
        for name, p in hf.named_parameters()
    }
    assert after == before
    assert model.facts.dtype == "float64"


def test_native_bridge(tokens: Tensor) -> None:
    """On TransformerLens' own models the scores' hook gives the pattern."""
    model = load_model(native())
    assert model.facts.architecture == "TransformerLensNative"
    assert model.tokenizer is None
    assert "scores" not in model.available()
    assert {"pattern", "q_rot", "z", "attn_out"} <= model.available()
    for value in patterns(model, tokens):
        torch.testing.assert_close(value.sum(-1), torch.ones(3, 4, 11))


def test_scores_that_are_the_pattern_are_seen_even_where_attention_is_uniform() -> None:
    """Softmax of a uniform pattern is that pattern again."""
    hf = build("bert")
    with torch.no_grad():
        for layer in hf.bert.encoder.layer:
            layer.attention.self.query.weight.zero_()
            layer.attention.self.query.bias.zero_()
    assert "scores" not in load_model(hf).available()


def test_compatibility_mode_is_left_on_and_recorded(tokens: Tensor) -> None:
    raw = load_model(build("gpt2"))
    expected = patterns(raw, tokens)
    raw.bridge.enable_compatibility_mode()
    model = load_model(raw.bridge)
    assert model.facts.mode == "compatibility"
    assert "scores" in model.available()
    for a, b in zip(patterns(model, tokens), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["BertModel", "GPT2Model"])
def test_a_live_model_without_a_head(name: str, tokens: Tensor) -> None:
    import transformers

    hf = getattr(transformers, name)(config("bert" if "Bert" in name else "gpt2")).eval()
    model = load_model(hf)
    assert not model.has_head
    assert "W_U" not in model.weights()
    assert model.facts.causal == (name == "GPT2Model")
    assert len(patterns(model, tokens)) == 2


def test_bert_as_a_decoder_is_seen_to_be_causal() -> None:
    from transformers import BertLMHeadModel

    model = load_model(BertLMHeadModel(config("bert", is_decoder=True)).eval())
    assert model.facts.causal
    assert "q_rot" in model.available()


def test_describing_a_live_model_leaves_it_alone() -> None:
    from transformers import BertModel

    from attnlens.models import describe_model, load_tokenizer

    for hf in (build("gpt2"), BertModel(config("bert"))):
        kinds = {name: type(module) for name, module in hf.named_modules()}
        facts = describe_model(hf)
        assert {name: type(module) for name, module in hf.named_modules()} == kinds
        assert (facts.source, facts.n_layers, facts.weights_hash) == ("memory", 2, None)
        assert load_tokenizer(hf) is None
        model = load_model(hf)
        assert describe_model(hf) == describe_model(model) == model.facts
        again = describe_model(model.bridge)
        assert (again.n_params, again.windows) == (model.facts.n_params, model.facts.windows)
    with pytest.raises(OptionError, match="loaded already"):
        describe_model(hf, dtype="float16")


def test_options_for_a_live_model_are_refused() -> None:
    hf = build("gpt2")
    for options in ({"dtype": "float16"}, {"device": "cpu"}, {"revision": "main"}):
        with pytest.raises(OptionError, match="loaded already"):
            load_model(hf, **options)
    with pytest.raises(OptionError, match="int is no model"):
        load_model(3)


def test_a_model_inside_a_bridge_is_refused() -> None:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf = build("gpt2")
    bridge = build_bridge_from_module(hf, "GPT2LMHeadModel", hf_config=hf.config)
    with pytest.raises(UnsupportedModelError, match="bridge"):
        load_model(hf)
    assert load_model(bridge).facts.n_layers == 2


def test_encoder_decoder_is_refused() -> None:
    import transformers as hf

    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=50, d_model=16, d_kv=4, num_layers=1, num_heads=4, d_ff=32)
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_model(t5)


def test_packed_weights_of_a_live_model_are_refused() -> None:
    hf = build("llama")
    attention = hf.model.layers[0].self_attn
    del attention.q_proj.weight
    attention.q_proj.register_buffer("weight", torch.zeros(16, 16, dtype=torch.int8))
    with pytest.raises(UnsupportedModelError, match=r"quantised.*q_proj.weight is int8"):
        load_model(hf)


def test_twins(loaded: Callable[[str], Model], zoo: Callable[..., Path], tokens: Tensor) -> None:
    for family in ("gpt2", "neox", "gemma2", "bert"):
        model = loaded(family)
        torch.manual_seed(7)
        state = torch.get_rng_state()
        one, again, other = model.twin(1), model.twin(1), model.twin(2)
        assert torch.equal(torch.get_rng_state(), state)
        hashes = [m.facts.weights_hash for m in (one, again, other, model)]
        assert hashes[0] == hashes[1]
        assert len(set(hashes)) == 3
        assert torch.equal(one.forward(tokens), again.forward(tokens))
        assert one.available() == model.available()
        assert one.facts.config == model.facts.config
        assert one.facts.n_params == model.facts.n_params
    live = load_model(build("llama"))
    assert live.twin(1).facts.weights_hash == loaded("llama").twin(1).facts.weights_hash
    small = load_model(zoo("llama"), dtype="bfloat16").twin(0)
    assert small.facts.dtype == "bfloat16"
    assert next(small.bridge.original_model.parameters()).dtype == torch.bfloat16


def test_twins_of_a_native_bridge() -> None:
    model = load_model(native())
    hashes = [model.twin(seed).facts.weights_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_patterns_are_freed_after_each_layer(tokens: Tensor) -> None:
    model = load_model(build("gpt2"))
    kept: list[bool] = []
    hook = ("blocks.1.hook_resid_pre", lambda x, hook: kept.append(held(model, 0)))
    with model.hooks([hook]):
        model.forward(tokens)
    assert kept == [False]
    model.bridge(tokens)
    assert held(model, 0)
    model.clear(0)
    assert not held(model, 0)
    assert held(model, 1)


def held(model: Model, layer: int) -> bool:
    return model.bridge.blocks[layer].attn._pattern is not None
