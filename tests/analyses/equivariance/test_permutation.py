"""Attn(P X, P M P^T) = P Attn(X, M), and what breaks it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attnlens_plugins.equivariance import certificate
from attnlens_plugins.equivariance.live import each_attention
from attnlens_plugins.equivariance.permutation import Permutation, reaction, shuffles

import attnlens
from tests import modelzoo
from tests.analyses.equivariance.conftest import TOKENS


def test_holds_with_positions_and_mask_permuted(model, tokens):
    found = certificate.permutations(model, tokens, 2, 0)
    assert (found["permutation_error"] <= found["permutation_tolerance"]).all()
    assert found["permutation_tolerance"].max() < 1e-4


def test_what_stays_behind_breaks_it(model, tokens):
    found = certificate.permutations(model, tokens, 2, 0)
    # Bloom's flattest slope is 2^-8: positions hardly matter to that head.
    assert (found["positions_broken"] > 100 * found["permutation_tolerance"]).all()
    if model.facts.causal:
        assert (found["mask_broken"] > 0.1).all()
    else:
        assert found["mask_broken"].isnull().all()
    score = found["positionality"]
    assert score.notnull().all() and (score >= 0).all() and (score <= 1).all()


def test_no_positions_leave_nothing_to_break(tokens):
    built = modelzoo.build("gpt2")
    built.transformer.wpe.weight.data.zero_()
    found = certificate.permutations(attnlens.load_model(built), tokens, 2, 0)
    # In layer 0 the stream holds no positions: what its mean keeps is noise of other prompts.
    assert (found["permutation_error"] <= found["permutation_tolerance"]).all()
    assert (found["mask_broken"] > 0.1).all()


def test_float64_to_1e_13(tokens):
    model = attnlens.load_model(modelzoo.build("gpt2").double())
    found = certificate.permutations(model, tokens, 2, 0)
    assert (found["permutation_error"] < 1e-13).all()
    assert (found["permutation_error"] <= found["permutation_tolerance"]).all()
    assert (found["permutation_tolerance"] < 1e-12).all()


def test_float64_with_a_softmax_in_float32(tokens):
    """Llama's softmax is float32 whatever its weights are: no false alarm."""
    model = attnlens.load_model(modelzoo.build("llama").double())
    found = certificate.permutations(model, tokens, 2, 0)
    assert (found["permutation_error"] <= found["permutation_tolerance"]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_raises_no_false_alarm(dtype, tokens):
    model = attnlens.load_model(modelzoo.build("llama").to(dtype))
    found = certificate.permutations(model, tokens, 2, 0)
    assert (found["permutation_error"] <= found["permutation_tolerance"]).all()


def test_no_false_alarm_in_a_thousand_seeds():
    """A40: float32, length 64."""
    model = attnlens.load_model(modelzoo.build("gpt2", n_positions=64, layers=1))
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 50, (1, 64))
    orders = [np.random.default_rng(seed).permutation(64) for seed in range(1000)]
    found = Permutation(model.facts, orders)

    def certify(call):
        found._certify(call, [torch.as_tensor(o) for o in orders])

    each_attention(model, tokens, certify)
    # The largest of a thousand errors in each head, against the tolerance of one.
    assert (found.error > 0).any()
    assert (found.error <= found.tolerance).all()


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "gemma2", "qwen3"])
def test_a_mask_left_unconjugated_fails_and_names_the_head(family, zoo, tokens):
    """Sabotage: one head of one layer masks by place, whatever the mask says."""
    model = zoo(family)

    def by_place(pattern, hook):
        n = pattern.shape[-1]
        cut = torch.ones(n, n, dtype=torch.bool).tril()
        broken = pattern.clone()
        broken[:, 2] = torch.where(cut, pattern[:, 2], 0.0)
        return broken

    with model.hooks([("blocks.1.attn.hook_pattern", by_place)]):
        found = certificate.permutations(model, tokens, 2, 0)
    beyond = (found["permutation_error"] > found["permutation_tolerance"]).values
    assert np.argwhere(beyond).tolist() == [[1, 2]]


def test_the_model_is_left_as_it_was(model, tokens):
    before = model.forward(tokens)
    points = {n: len(p.fwd_hooks) for n, p in model.bridge.hook_dict.items()}
    certificate.permutations(model, tokens, 2, 0)
    assert torch.equal(model.forward(tokens), before)
    assert points == {n: len(p.fwd_hooks) for n, p in model.bridge.hook_dict.items()}
    attention = model.bridge.blocks[0].attn
    assert not attention._forward_pre_hooks


def test_the_pass_itself_is_not_disturbed(model, tokens):
    before = model.forward(tokens)

    def disturb(call):
        call.again(torch.arange(call.n).flip(0), mask=False, positions=False)

    assert torch.equal(each_attention(model, tokens, disturb), before)


# -- positionality ------------------------------------------------------------------------------


def _patterns(kind: str, order: np.ndarray, content: np.ndarray) -> tuple:
    """Weights of a causal head before and after a shuffle whose positions stay in place."""
    n = len(order)
    mask = np.tril(np.ones((n, n), dtype=bool))

    def made(tokens):
        if kind == "content":
            scores = content[tokens[:, None], tokens[None, :]]
        else:
            scores = -2.0 * np.abs(np.arange(n)[:, None] - 1 - np.arange(n)[None, :])
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return torch.as_tensor(weights / weights.sum(1, keepdims=True))[None, None]

    return made(np.arange(n)), made(order), torch.as_tensor(order), torch.as_tensor(mask)


def test_a_content_head_is_0_and_a_positional_head_is_1():
    generator = np.random.default_rng(0)
    order = generator.permutation(24)
    scores = 2 * generator.normal(size=(24, 24))
    content, position = reaction(*_patterns("content", order, scores))[:, 0]
    assert content < 1e-12 < 0.2 < position
    content, position = reaction(*_patterns("position", order, scores))[:, 0]
    assert position < 1e-12 < 0.2 < content


def test_attention_that_spreads_evenly_does_not_react():
    order = np.random.default_rng(1).permutation(16)
    n = len(order)
    even = torch.tril(torch.ones(n, n)) / torch.arange(1, n + 1)[:, None]
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    found = reaction(even[None, None], even[None, None], torch.as_tensor(order), visible)
    assert np.allclose(found, 0, atol=1e-7)


def test_shuffles_leave_shared_tokens_in_place():
    tokens = TOKENS.copy()
    tokens[:, 0], tokens[:, -1] = 0, 7
    for order in shuffles(tokens, 5, 0):
        assert order[0] == 0 and order[-1] == 13
        assert sorted(order) == list(range(14))
        assert (order != np.arange(14)).any()


def test_one_prompt_keeps_its_first_token_and_has_no_embedded_positions(zoo):
    model = zoo("gpt2")
    found = certificate.permutations(model, TOKENS[:1], 1, 0)
    assert found["positionality"].isnull().all()
    assert found["permutation_error"].notnull().all()
    assert zoo("llama").facts.positions == "rotary"
    found = certificate.permutations(zoo("llama"), TOKENS[:1], 1, 0)
    assert found["positionality"].notnull().all()


def test_positions_mixed_behind_a_heads_output_are_caught_in_that_head(tokens):
    built = modelzoo.build("llama")

    def broken(o_proj, args):
        z = args[0].clone()
        z[..., 8:12] = z[..., 8:12].cumsum(1)
        return (z,)

    built.model.layers[1].self_attn.o_proj.register_forward_pre_hook(broken)
    found = certificate.permutations(attnlens.load_model(built), tokens, 2, 0)
    beyond = found["permutation_error"] > found["permutation_tolerance"]
    assert np.argwhere(beyond.values).tolist() == [[1, 2]]


def test_what_is_not_finite_is_refused_with_its_place(tokens):
    built = modelzoo.build("llama")
    built.model.layers[1].self_attn.q_proj.weight.data[5, 0] = float("nan")
    model = attnlens.load_model(built)
    with pytest.raises(attnlens.errors.NonFiniteError, match=r"head 1\.1"):
        certificate.permutations(model, tokens, 1, 0)
    built = modelzoo.build("llama")
    built.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    model = attnlens.load_model(built)
    with pytest.raises(attnlens.errors.NonFiniteError, match=r"layers\.1\.mlp\.up_proj"):
        certificate.permutations(model, tokens, 1, 0)
