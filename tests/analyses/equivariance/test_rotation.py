"""Which norms let the residual stream be rotated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attnlens_plugins.equivariance.rotation import Rotation, keeping_ones

import attnlens
from tests import modelzoo


def run(model, tokens):
    found = Rotation(model, 0, pre_norm="ln1_w" in model.weights())
    found.run(tokens)
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_rms_norms_commute(family, zoo, tokens):
    found = run(zoo(family), tokens)
    assert (found.error <= found.tolerance).all()
    assert found.logits_change <= found.allowed < 1e-3


@pytest.mark.parametrize("family", ["gpt2", "neox", "bloom"])
def test_layer_norms_do_not_but_for_what_keeps_the_mean(family, zoo, tokens):
    found = run(zoo(family), tokens)
    assert (found.error > 0.01).all() and found.logits_change > 0.05
    assert (found.norm_error > 0.1).all()
    assert (found.kept_error <= found.tolerance).all()
    assert found.kept_change <= found.allowed


def test_norms_that_write_do_not(zoo, tokens):
    found = run(zoo("gemma2"), tokens)
    assert (found.error > 0.1).all() and (found.kept_error > 0.1).all()
    assert all(name.endswith("_post") for name in found.worst)
    found = run(zoo("bert"), tokens)
    assert (found.error > 0.1).all() and (found.kept_error > 0.1).all()


def test_gemma_2_without_gains_would_be_symmetric(tokens):
    """It is the post-norms' gains that break it, and nothing else."""
    built = modelzoo.build("gemma2")
    for name, parameter in built.named_parameters():
        if "post_" in name and name.endswith("layernorm.weight"):
            parameter.data.fill_(0.4)
    found = run(attnlens.load_model(built), tokens)
    assert (found.error <= found.tolerance).all()
    assert found.logits_change <= found.allowed


def test_the_model_is_left_as_it_was(zoo, tokens):
    model = zoo("gpt2")
    before = model.forward(tokens)
    run(model, tokens)
    assert torch.equal(model.forward(tokens), before)
    assert not model.bridge.blocks[0].ln1._forward_hooks


def test_rotations_that_keep_the_ones():
    for n in (2, 5, 16):
        r = keeping_ones(n, np.random.default_rng(n))
        np.testing.assert_allclose(r @ r.T, np.eye(n), atol=1e-12)
        np.testing.assert_allclose(np.ones(n) @ r, np.ones(n), atol=1e-12)
    assert np.abs(r - np.eye(16)).max() > 0.1


def test_what_acts_on_the_stream_in_its_basis_is_caught_in_its_layer(tokens):
    built = modelzoo.build("llama")
    built.model.layers[0].register_forward_hook(lambda layer, args, out: out.relu() + 0.1 * out)
    found = run(attnlens.load_model(built), tokens)
    assert (found.error > found.tolerance).tolist() == [True, False]
    assert found.logits_change > 0.01 > found.allowed


def test_a_vector_added_by_a_norm_is_caught(tokens):
    built = modelzoo.build("llama")
    added = 0.3 * torch.sin(torch.arange(16.0))
    built.model.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + added,))
    found = run(attnlens.load_model(built), tokens)
    assert found.logits_change > 1e-3 > found.allowed
