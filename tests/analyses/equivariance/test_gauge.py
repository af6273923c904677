"""Gauge symmetry on live weights: unmoved inside the group, moved outside, undone always."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attnlens_plugins.equivariance import certificate, gauge
from attnlens_plugins.equivariance.groups import random_invertible
from attnlens_plugins.equivariance.live import each_attention

import attnlens
from tests import modelzoo

#: Dimensions of the redundant space of one layer: queries and keys, values and outputs.
DIMS = {
    "gpt2": (4 * 16, 4 * 16),
    "llama": (2 * 4, 2 * 16),
    "mistral": (2 * 4, 2 * 16),
    "neox": (4 * (2 + 4), 4 * 16),
    "gemma2": (2 * 8, 2 * 64),
    "qwen3": (0, 2 * 64),
    "bert": (4 * 16, 4 * 16),
    "bloom": (4 * 16, 4 * 16),
}


def state(model):
    return {k: v.clone() for k, v in model.bridge.original_model.state_dict().items()}


def run(model, tokens):
    return certificate.gauges(model, tokens, model.weights(), 0)


@pytest.mark.parametrize("family", DIMS)
def test_inside_nothing_moves_and_outside_everything_does(family, zoo, tokens):
    model = zoo(family)
    found = run(model, tokens)
    for kind in ("qk", "vo"):
        assert (found.error[kind] <= found.tolerance[kind]).all()
        assert (found.tolerance[kind] < 1e-3).all()
        assert (found.outside[kind] > 100 * found.tolerance[kind]).all()
    assert found.logits["inside"] <= found.logits["allowed"] < 1e-3
    assert found.logits["outside"] > 0.05
    assert found.dims["qk"].tolist() == [DIMS[family][0]] * 2
    assert found.dims["vo"].tolist() == [DIMS[family][1]] * 2


def test_weights_return_bit_for_bit_also_after_an_error(model, tokens, monkeypatch):
    before, logits = state(model), model.forward(tokens)
    run(model, tokens)
    assert torch.equal(model.forward(tokens), logits)
    call_again = attnlens_again = gauge.Call.again

    def failing(self, *args, **kwargs):
        attnlens_again(self, *args, **kwargs)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(gauge.Call, "again", failing)
    with pytest.raises(RuntimeError, match="middle"):
        run(model, tokens)
    monkeypatch.setattr(gauge.Call, "again", call_again)
    after = state(model)
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(model.forward(tokens), logits)


def test_equal_gains_leave_rotations(tokens):
    built = modelzoo.build("qwen3")
    for layer in built.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(1.3)
        layer.self_attn.k_norm.weight.data.fill_(0.8)
    found = run(attnlens.load_model(built), tokens)
    assert found.words["qk"] == ["SO(2)^4"] * 2
    assert found.dims["qk"].tolist() == [2 * 4] * 2
    assert (found.error["qk"] <= found.tolerance["qk"]).all()
    assert (found.error["qk"] > 0).any()


def _errors(model, tokens, change):
    """Change of every head when `change` makes one layer's maps."""
    found = {}

    def visit(call):
        weights = model.head_weights(call.layer)
        kind, values = change(call, weights)
        moved, _ = gauge.measure(call, kind, values, weights)
        found[call.layer] = moved

    each_attention(model, tokens, visit)
    return np.stack([found[layer] for layer in sorted(found)])


def _identity(model):
    d = model.facts.d_head
    return [(np.eye(d), np.eye(d)) for _ in range(model.facts.n_kv_heads)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "gemma2", "qwen3", "bert"])
def test_a_gauge_on_one_side_only_fails_in_that_head(family, zoo, tokens):
    model = zoo(family)
    n = random_invertible(model.facts.d_head, np.random.default_rng(3))
    maps = _identity(model)
    maps[1] = (n, np.eye(model.facts.d_head))
    per = model.facts.n_heads // model.facts.n_kv_heads
    touched = np.arange(per, 2 * per)
    for kind, turn in (("qk", gauge.turn_query_key), ("vo", gauge.turn_value_output)):
        errors = _errors(model, tokens, lambda c, w, k=kind, t=turn: (k, t(w, maps)))
        others = np.delete(errors, touched, axis=1)
        assert (errors[:, touched] > 0.01).all()
        assert (others < 1e-5).all()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_map_that_mixes_pairs_fails_under_rotary(family, zoo, tokens):
    model = zoo(family)
    m = random_invertible(model.facts.d_head, np.random.default_rng(4))
    maps = _identity(model)
    maps[0] = (m, np.linalg.inv(m).T)
    errors = _errors(model, tokens, lambda c, w: ("qk", gauge.turn_query_key(w, maps)))
    assert (errors[:, :2] > 0.01).all() and (errors[:, 2:] < 1e-5).all()


def test_partial_rotary_mixes_nothing_across(zoo, tokens):
    """NeoX: a map of the unrotated dimensions is free; one across the border is not."""
    model = zoo("neox")
    inner = np.eye(4)
    inner[2:, 2:] = random_invertible(2, np.random.default_rng(5))
    across = np.eye(4)
    across[np.ix_((0, 2), (0, 2))] = random_invertible(2, np.random.default_rng(6))
    for m, moves in ((inner, False), (across, True)):
        maps = [(m, np.linalg.inv(m).T)] * 4
        errors = _errors(model, tokens, lambda c, w, x=maps: ("qk", gauge.turn_query_key(w, x)))
        assert ((errors > 0.01) if moves else (errors < 1e-5)).all()


def test_a_bias_left_behind_fails(zoo, tokens):
    model = zoo("gpt2")
    m = random_invertible(4, np.random.default_rng(7))
    maps = [(m, np.linalg.inv(m).T)] * 4

    def forgets(call, weights):
        values = gauge.turn_query_key(weights, maps)
        return "qk", {name: v for name, v in values.items() if name != "b_Q"}

    assert (_errors(model, tokens, forgets) > 0.001).all()


def test_a_model_that_clips_queries_is_caught_and_the_head_is_named(zoo, tokens):
    """Sabotage: head 3 of layer 0 clips its queries, so that its basis matters."""
    model = zoo("gpt2")

    def clip(q, hook):
        broken = q.clone()
        broken[:, :, 3] = q[:, :, 3].clamp(-0.5, 0.5)
        return broken

    with model.hooks([(model.hook_name("q", 0), clip)]):
        found = run(model, tokens)
    beyond = found.error["qk"] > found.tolerance["qk"]
    assert np.argwhere(beyond).tolist() == [[0, 3]]
    assert found.logits["inside"] > found.logits["allowed"]


def test_what_moves_and_what_does_not(zoo, tokens):
    moved = run(zoo("gpt2"), tokens).moved
    assert moved["pattern"] < 1e-5 and moved["result"] < 1e-4
    assert min(moved[name] for name in "qkvz") > 0.1


def test_half_precision_raises_no_false_alarm(tokens):
    model = attnlens.load_model(modelzoo.build("llama").to(torch.bfloat16))
    found = run(model, tokens)
    for kind in ("qk", "vo"):
        assert (found.error[kind] <= found.tolerance[kind]).all()
    assert found.logits["inside"] <= found.logits["allowed"]


def test_what_acts_behind_a_heads_output_is_caught_and_the_head_is_named(tokens):
    built = modelzoo.build("llama")

    def broken(o_proj, args):
        z = args[0].clone()
        z[..., 8:12] = z[..., 8:12].relu()
        return (z,)

    built.model.layers[1].self_attn.o_proj.register_forward_pre_hook(broken)
    found = run(attnlens.load_model(built), tokens)
    assert np.argwhere(found.error["vo"] > found.tolerance["vo"]).tolist() == [[1, 2]]
    assert (found.output_error > found.output_tolerance).tolist() == [False, True]


def test_sinks_and_gains_of_a_head_go_along_with_it(tokens):
    import transformers as hf

    small = {
        "vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 16,
        "max_position_embeddings": 32,
    }  # fmt: skip
    configs = (
        hf.GptOssConfig(**small, head_dim=4, num_local_experts=2, num_experts_per_tok=1),
        hf.Olmo2Config(**small),
    )
    for config in configs:
        built = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        modelzoo.randomise(built)
        found = run(attnlens.load_model(built), tokens)
        assert (found.heads.error <= found.heads.tolerance).all()
        assert (found.heads.output_error <= found.heads.output_tolerance).all()
        assert all(rotary.pairs == ((0, 2), (1, 3)) for rotary in found.rotary)


def test_neighbours_that_turn_together_are_found(tokens):
    import transformers as hf

    config = hf.GPTJConfig(
        vocab_size=50, n_layer=2, n_head=4, n_embd=32, rotary_dim=4, n_positions=32
    )
    built = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    modelzoo.randomise(built)
    found = run(attnlens.load_model(built), tokens)
    assert all(rotary.pairs == ((0, 1), (2, 3)) for rotary in found.rotary)
    assert found.dims["qk"].tolist() == [4 * (4 + 16)] * 2
    assert (found.error["qk"] <= found.tolerance["qk"]).all()
    assert (found.outside["qk"] > 100 * found.tolerance["qk"]).all()
