"""Forward passes without attention matrices, against plain Hugging Face with eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnlens.errors import CaptureError, UnsupportedModelError
from attnlens.models import Model, load_model
from attnlens.models.lazyscores import LazyMask, LazyScores, LeanError, Rule
from tests.modelzoo import build

#: Families whose attention TransformerLens rebuilds, or that Hugging Face computes itself (BERT).
LEAN = ("gpt2", "llama", "mistral", "qwen3", "neox", "gemma2", "bert")

#: The module whose input is z, in Hugging Face's own model.
OUTPUTS = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "neox": "gpt_neox.layers.{}.attention.dense",
    "bert": "bert.encoder.layer.{}.attention.output.dense",
}

#: Longer than the windows of Mistral (2) and Gemma 2 (4), and no other dimension of the models.
N = 13


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    yield {family: load_model(build(family)) for family in (*LEAN, "bloom")}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(1, 50, (2, N), generator=torch.Generator().manual_seed(3))


class Sizes(TorchDispatchMode):
    """Notes operations whose result has two dimensions of N."""

    def __init__(self) -> None:
        super().__init__()
        self.square: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, Tensor) and list(value.shape).count(N) > 1:
                self.square.append(str(func))
        return out


def plain(family: str, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits and z of Hugging Face's model with the same weights."""
    model = build(family)
    path = OUTPUTS.get(family, "model.layers.{}.self_attn.o_proj")
    z: list[Tensor] = []
    for layer in range(2):
        model.get_submodule(path.format(layer)).register_forward_pre_hook(
            lambda module, inputs: z.append(inputs[0])
        )
    with torch.inference_mode():
        return model(tokens).logits, z


def run(model: Model, tokens: Tensor, *names: str) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
    kept: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, layer: int, value: Tensor) -> None:
        kept[name, layer] = value.clone()

    with model.record(names, keep):
        logits = model.forward(tokens)
    return logits, kept


@pytest.mark.parametrize("family", LEAN)
def test_logits_and_z_are_hugging_faces(
    family: str, models: dict[str, Model], tokens: Tensor
) -> None:
    reference, z = plain(family, tokens)
    assert models[family].lean_problem() is None
    with models[family].lean():
        logits, kept = run(models[family], tokens, "z")
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-5)
    for layer in range(2):
        mine = kept["z", layer].flatten(2)
        torch.testing.assert_close(mine, z[layer].view_as(mine), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", LEAN)
def test_every_other_hook_fires_as_ever(
    family: str, models: dict[str, Model], tokens: Tensor
) -> None:
    names = sorted(models[family].available() - {"scores", "pattern"})
    assert {"q", "k", "v", "z", "q_rot", "k_rot"} <= set(names)
    _, eager = run(models[family], tokens, *names)
    with models[family].lean():
        _, lean = run(models[family], tokens, *names)
    assert lean.keys() == eager.keys()
    for key, value in eager.items():
        torch.testing.assert_close(lean[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", LEAN)
def test_no_matrix_of_all_queries_and_keys(
    family: str, models: dict[str, Model], tokens: Tensor
) -> None:
    model = models[family]
    with Sizes() as eager:
        model.forward(tokens)
    assert eager.square
    with model.lean(), Sizes() as lean:
        model.forward(tokens)
    assert lean.square == []


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_half_precision(family: str, tokens: Tensor) -> None:
    model = load_model(build(family).to(torch.bfloat16))
    exact = plain(family, tokens)[0]
    with model.lean():
        lean = model.forward(tokens).float()
    eager = model.forward(tokens).float()
    assert lean.dtype == torch.float32
    # No further from the exact logits than eager attention is, but for the last rounding.
    assert (lean - exact).abs().max() <= 2 * (eager - exact).abs().max() + 0.02


def test_everything_is_put_back(models: dict[str, Model], tokens: Tensor) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    model = models["llama"]
    before = model.forward(tokens)
    eager = MASKS["eager"]
    own = {i: dict(block.attn.__dict__) for i, block in enumerate(model.bridge.blocks)}
    with pytest.raises(ZeroDivisionError), model.lean():
        assert MASKS["eager"] is not eager
        with model.hooks([("blocks.1.attn.hook_z", lambda value, hook: 1 / 0)]):
            model.forward(tokens)
    assert MASKS["eager"] is eager
    for i, block in enumerate(model.bridge.blocks):
        assert block.attn.__dict__.keys() == own[i].keys()
        assert block.attn.forward.__func__ is type(block.attn).forward
    assert torch.equal(model.forward(tokens), before)
    assert len(run(model, tokens, "pattern")[1]) == 2


@pytest.mark.parametrize("family", LEAN)
def test_hooks_inside_norms_fire_and_their_edits_count(
    family: str, models: dict[str, Model], tokens: Tensor
) -> None:
    model = models[family]
    double = [("blocks.1.ln1.hook_normalized", lambda value, hook: 2 * value)]
    plain = model.forward(tokens)
    with model.hooks(double):
        eager = model.forward(tokens)
    with model.lean(), model.hooks(double):
        lean = model.forward(tokens)
    assert not torch.allclose(eager, plain, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lean, eager, rtol=1e-4, atol=1e-5)


def test_other_models_stay_eager_meanwhile(models: dict[str, Model], tokens: Tensor) -> None:
    expected = run(models["gpt2"], tokens, "pattern")[1]
    with models["llama"].lean():
        found = run(models["gpt2"], tokens, "pattern")[1]
    for key, value in expected.items():
        assert torch.equal(found[key], value)


def test_what_cannot_run_lean_says_why(models: dict[str, Model], tokens: Tensor) -> None:
    problem = models["bloom"].lean_problem()
    assert problem is not None and "matrix" in problem
    with pytest.raises(UnsupportedModelError, match="cannot run lean"):
        models["bloom"].lean()
    reference, _ = plain_bloom(tokens)
    torch.testing.assert_close(models["bloom"].forward(tokens), reference, rtol=1e-4, atol=1e-5)


def plain_bloom(tokens: Tensor) -> tuple[Tensor, None]:
    with torch.inference_mode():
        return build("bloom")(tokens).logits, None


def test_hooks_on_patterns_are_no_company(models: dict[str, Model], tokens: Tensor) -> None:
    model = models["llama"]
    with model.hooks([("blocks.0.attn.hook_pattern", lambda value, hook: value * 0)]):
        problem = model.lean_problem()
        assert problem is not None and "blocks.0.attn.hook_pattern" in problem
    assert model.lean_problem() is None


def test_a_mask_that_is_not_what_the_facts_say(tokens: Tensor) -> None:
    import dataclasses

    model = load_model(build("mistral"))
    model.facts = dataclasses.replace(model.facts, windows=(3, 3))
    problem = model.lean_problem()
    assert problem is not None and "mask" in problem


def test_a_matrix_made_elsewhere_is_noticed(tokens: Tensor) -> None:
    model = load_model(build("gpt2"))

    def wasteful(module: Any, inputs: Any, output: Any) -> None:
        torch.zeros(inputs[0].shape[1], inputs[0].shape[1])

    model.bridge.blocks[0].mlp.register_forward_hook(wasteful)
    problem = model.lean_problem()
    assert problem is not None and "makes a matrix" in problem


def test_padding_is_refused(models: dict[str, Model], tokens: Tensor) -> None:
    model = models["llama"]
    mask = torch.ones_like(tokens)
    mask[:, 0] = 0
    with pytest.raises(CaptureError, match="padding"), model.lean(), torch.inference_mode():
        model.bridge(tokens, attention_mask=mask, use_cache=False)


def causal(n: int) -> LazyMask:
    return LazyMask(lambda p, h, query, key: key <= query, n, torch.device("cpu"))


def scores(n: int = 40, **rule: Any) -> LazyScores:
    q, k = torch.randn(2, 1, 3, n, 8, generator=torch.Generator().manual_seed(0))
    return LazyScores(q, k, Rule(**({"causal": True} | rule)))


def test_a_long_prompt_goes_through_blocks_of_rows() -> None:
    n, window = 300, 17
    lazy = scores(n, window=window)
    v = torch.randn(1, 3, n, 8, generator=torch.Generator().manual_seed(1))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    mask = LazyMask(lambda p, h, a, b: (b <= a) & (a - b < window), n, torch.device("cpu"))
    for cap in (None, 1.5):
        raw = lazy.q.double() @ lazy.k.double().mT * 0.7
        bent = raw if cap is None else cap * torch.tanh(raw / cap)
        hidden = (j > i) | (i - j >= window)
        wanted = bent.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
        made = lazy * 0.7
        made = made if cap is None else torch.tanh(made / cap) * cap
        found = torch.matmul(torch.softmax(made + mask, dim=-1), v)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_steps_in_a_wrong_order_are_refused() -> None:
    v = torch.randn(1, 3, 40, 8)
    with pytest.raises(LeanError, match="before the softmax"):
        (scores() + causal(40)) @ v
    with pytest.raises(LeanError, match="not masked"):
        torch.softmax(scores(), dim=-1)
    with pytest.raises(LeanError, match="scaled or bent"):
        (scores() + causal(40)) * 2.0
    with pytest.raises(LeanError, match="softmax is taken after"):
        (scores() + causal(40)).softmax().softmax()
    with pytest.raises(LeanError, match="exp of its scores"):
        torch.exp(scores())
    with pytest.raises(LeanError, match="softmax of its scores"):
        torch.softmax(scores() + causal(40), dim=-2)
    with pytest.raises(LeanError, match="Tensor is added"):
        scores() + torch.zeros(40, 40)


def test_division_without_tanh_is_a_scale() -> None:
    v = torch.randn(1, 3, 40, 8, generator=torch.Generator().manual_seed(1))
    divided = torch.softmax(scores() / 2.0 + causal(40), dim=-1) @ v
    scaled = torch.softmax(scores() * 0.5 + causal(40), dim=-1) @ v
    torch.testing.assert_close(divided, scaled)
