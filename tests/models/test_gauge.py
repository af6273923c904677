"""Weights of a live model: read exactly, replaced, and back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnlens import load_model
from attnlens.errors import UnsupportedModelError, UsageError
from tests import modelzoo

TOKENS = torch.arange(16).reshape(2, 8)


@pytest.fixture(scope="module", params=modelzoo.FAMILIES)
def model(request):
    return load_model(modelzoo.build(request.param))


def state(model):
    return {k: v.clone() for k, v in model.bridge.original_model.state_dict().items()}


def test_reads_what_weights_gives(model):
    everything = model.weights()
    for layer in range(2):
        mine = model.head_weights(layer)
        assert {"W_Q", "W_K", "W_V", "W_O"} <= mine.keys()
        for name, value in mine.items():
            np.testing.assert_array_equal(value, everything[name][layer].astype(np.float64))


def test_replaced_weights_act_and_return(model):
    before, logits = state(model), model.forward(TOKENS)
    own = model.head_weights(1)
    with model.replaced_weights({("W_O", 1): 0 * own["W_O"], ("W_V", 0): own["W_V"] * 1.5}):
        np.testing.assert_array_equal(model.head_weights(1)["W_O"], 0 * own["W_O"])
        moved = model.forward(TOKENS)
    assert (moved - logits).abs().max() > 1e-3
    assert torch.equal(model.forward(TOKENS), logits)
    after = state(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_the_order_of_heads_and_dimensions_is_that_of_the_activations(model):
    """z W_O of one head alone is what is left when the other heads' W_O is zero."""
    own = model.head_weights(0)
    only = own["W_O"].copy()
    only[np.arange(4) != 2] = 0
    seen = {}
    with (
        model.replaced_weights({("W_O", 0): only}),
        model.record(
            ["z", "attn_out"], lambda name, _, v: seen.update({name: v.clone()}), layers=[0]
        ),
    ):
        model.forward(TOKENS)
    bias = torch.as_tensor(own.get("b_O", np.zeros(16)), dtype=torch.float32)
    want = seen["z"][:, :, 2] @ torch.as_tensor(own["W_O"][2], dtype=torch.float32) + bias
    torch.testing.assert_close(seen["attn_out"], want, rtol=1e-4, atol=1e-5)


def test_restored_after_an_error(model):
    before = state(model)
    own = model.head_weights(0)
    with pytest.raises(KeyError), model.replaced_weights({("W_Q", 0): own["W_Q"] + 1}):
        raise KeyError("inside")
    with (
        pytest.raises(UsageError, match="shape"),
        model.replaced_weights({("W_Q", 0): own["W_Q"] + 1, ("W_K", 0): own["W_K"][:1]}),
    ):
        pass
    with (
        pytest.raises(UsageError, match="W_X"),
        model.replaced_weights({("W_Q", 0): own["W_Q"] + 1, ("W_X", 0): own["W_K"]}),
    ):
        pass
    after = state(model)
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_refused_where_the_model_does_not_read_it():
    model = load_model(modelzoo.build("gpt2", seed=3))
    own = model.head_weights(0)
    kept = model.forward(TOKENS)
    attention = type(model.bridge.blocks[0].attn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "W_Q", property(lambda self: torch.zeros(4, 16, 4)), raising=False)
        with (
            pytest.raises(UnsupportedModelError, match="does not read it"),
            model.replaced_weights({("W_Q", 0): own["W_Q"] + 1}),
        ):
            pass
    assert torch.equal(model.forward(TOKENS), kept)
