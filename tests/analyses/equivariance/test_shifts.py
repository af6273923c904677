"""Softmax: what it does not see, and what acts between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attnlens_plugins.equivariance import certificate

import attnlens
from tests import modelzoo

#: Dimensions of a head on which the key bias is null, by derivation.
NULL = {
    "gpt2": 4, "llama": 0, "mistral": 0, "neox": 2, "gemma2": 0, "qwen3": 0, "bert": 4, "bloom": 4,
}  # fmt: skip


@pytest.mark.parametrize("family", NULL)
def test_rows_shift_freely_and_scale_matters(family, zoo, tokens):
    found = certificate.shifts(zoo(family), tokens, 0)
    assert (found["shift_error"] <= found["shift_tolerance"]).all()
    assert (found["shift_tolerance"] < 1e-4).all()
    assert (found["scale_change"] > 0.02).all()


@pytest.mark.parametrize("family", NULL)
def test_the_key_bias_is_null_where_nothing_acts_on_it(family, zoo, tokens):
    found = certificate.shifts(zoo(family), tokens, 0)
    assert found["key_bias_null_dims"].values.tolist() == [NULL[family]] * 2
    if NULL[family]:
        assert (found["key_bias_error"] <= found["key_bias_tolerance"]).all()
    else:
        assert found["key_bias_error"].isnull().all()
    if NULL[family] < zoo(family).facts.d_head:
        assert (found["key_bias_change"] > 0.01).all()


def test_b_k_itself_is_null_in_gpt2(zoo, tokens):
    model = zoo("gpt2")
    logits = model.forward(tokens)
    own = model.head_weights(0)["b_K"]
    with model.replaced_weights({("b_K", 0): own + 3.0}):
        moved = model.forward(tokens)
    assert (moved - logits).abs().max() < 1e-5


def test_sabotage_is_seen_and_located(zoo, tokens):
    """A head whose scores are clamped is not shift-invariant."""
    model = zoo("llama")

    def clamp(scores, hook):
        broken = scores.clone()
        cut = scores[:, 1].clamp(max=0.5)
        broken[:, 1] = torch.where(scores[:, 1] > -1e30, cut, scores[:, 1])
        return broken

    name = model.bridge.blocks[1].attn.hook_attn_scores
    # After our own hook, as if the model clamped what it got.
    softmax = model.bridge.blocks[1].attn._masked_softmax

    def clamped(scores, *args, **kwargs):
        return softmax(clamp(scores, name), *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.bridge.blocks[1].attn, "_masked_softmax", clamped)
        found = certificate.shifts(model, tokens, 0)
    beyond = (found["shift_error"] > found["shift_tolerance"]).values
    assert np.argwhere(beyond).tolist() == [[1, 1]]


def test_sinks_break_shift_invariance(tokens):
    hf = pytest.importorskip("transformers")
    config = hf.GptOssConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=32, sliding_window=8, pad_token_id=None,
        layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default",
        "rope_theta": 10000.0},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = hf.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
        modelzoo.randomise(built)
    model = attnlens.load_model(built)
    assert model.facts.sinks
    found = certificate.shifts(model, tokens, 0)
    assert (found["shift_error"] > 0.01).all()
    assert (found["key_bias_null_dims"] == 0).all()
    order = certificate.permutations(model, tokens, 1, 0)
    assert (order["permutation_error"] <= order["permutation_tolerance"]).all()
