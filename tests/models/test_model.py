"""Running a model, hook names, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attnlens.activations import MASKED_SCORE
from attnlens.errors import CaptureError, MissingActivationError, OutOfMemoryError
from attnlens.models import Model, load_model
from attnlens.models.probe import masked_scores


def test_hook_names(loaded: Callable[[str], Model]) -> None:
    assert loaded("gpt2").hook_name("pattern", 1) == "blocks.1.attn.hook_pattern"
    assert loaded("gpt2").hook_name("q_rot", 0) == "blocks.0.attn.hook_q"
    assert loaded("llama").hook_name("q_rot", 0) == "blocks.0.attn.hook_rot_q"
    assert loaded("bert").hook_name("attn_out", 0) == "blocks.0.attn.o.hook_out"
    with pytest.raises(MissingActivationError, match="no single hook"):
        loaded("neox").hook_name("q_rot", 0)


def test_missing_activations_name_their_neighbours(loaded: Callable[[str], Model]) -> None:
    with pytest.raises(MissingActivationError, match="Did you mean pattern"):
        loaded("gpt2").hook_name("patern", 0)
    with pytest.raises(MissingActivationError, match="'scores' is not computed by Bert"):
        loaded("bert").hook_name("scores", 0)
    with pytest.raises(MissingActivationError, match=r"no layer 9(.|\n)*layers 0 to 1"):
        loaded("gpt2").hook_name("pattern", 9)
    with (
        pytest.raises(MissingActivationError, match="no layer 9"),
        loaded("gpt2").record(["pattern"], lambda *a: None, layers=[0, 9]),
    ):
        pass


def test_record_chosen_layers(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    seen: list[tuple[str, int]] = []
    model = loaded("neox")
    with model.record(
        ["q_rot", "z"], lambda name, layer, _: seen.append((name, layer)), layers=[1]
    ):
        model.forward(tokens)
        model.forward(tokens)
    assert seen == [("q_rot", 1), ("z", 1)] * 2


def test_tokens_are_checked(loaded: Callable[[str], Model]) -> None:
    model = loaded("gpt2")
    with pytest.raises(CaptureError, match=r"token 50 is outside(.|\n)*0 to 49"):
        model.forward(torch.tensor([[1, 50]]))
    with pytest.raises(CaptureError, match="token -1 is outside"):
        model.forward(torch.tensor([[1, -1]]))
    with pytest.raises(CaptureError, match="17 tokens are more than the 16"):
        model.forward(torch.ones(1, 17, dtype=torch.long))
    for wrong in (torch.ones(3, dtype=torch.long), torch.ones(1, 3), torch.ones(0, 3).long()):
        with pytest.raises(CaptureError, match=r"\[batch, pos\]"):
            model.forward(wrong)
    assert model.forward(np.ones((1, 3), dtype=np.int32)).shape == (1, 3, 50)


def test_forward_leaves_no_gradients(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    logits = loaded("llama").forward(tokens)
    assert not logits.requires_grad
    assert logits.is_inference()


def test_batch_and_alone_agree(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    model = loaded("gemma2")
    together = model.forward(tokens)
    alone = torch.cat([model.forward(row[None]) for row in tokens])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str, zoo: Callable[..., Path], tokens: Tensor) -> None:
    exact, half = load_model(zoo("llama")), load_model(zoo("llama"), dtype=dtype)
    assert half.facts.dtype == dtype
    assert half.available() == exact.available()
    seen: dict[str, list[Tensor]] = {"exact": [], "half": []}
    for key, model in (("exact", exact), ("half", half)):
        with model.record(["pattern"], lambda n, i, v, key=key: seen[key].append(v.float())):  # type: ignore[misc]
            model.forward(tokens)
    for a, b in zip(seen["exact"], seen["half"], strict=True):
        assert (a - b).abs().max() < 0.2
    assert half.weights()["W_Q"].dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_scores(dtype: torch.dtype) -> None:
    low = torch.finfo(dtype).min
    given = torch.tensor([1.0, low, -torch.inf, -5.0, low], dtype=dtype)
    given[4] += torch.tensor(-100.0, dtype=dtype)
    expected = [1.0, MASKED_SCORE, MASKED_SCORE, -5.0, MASKED_SCORE]
    assert masked_scores(given).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
)
def test_running_out_of_memory_is_one_message(
    error: Exception, zoo: Callable[..., Path], tokens: Tensor
) -> None:
    """A stand-in: the error is raised by a hook, as no test can fill a machine."""
    model = load_model(zoo("gpt2"))

    def fail(value: Tensor, hook: object) -> None:
        raise error

    with (
        pytest.raises(OutOfMemoryError, match=r"cpu ran out(.|\n)*float32") as caught,
        model.hooks([("blocks.0.attn.hook_pattern", fail)]),
    ):
        model.forward(tokens)
    assert "3x11" in str(caught.value)
    assert "batch size" in str(caught.value)


def test_other_errors_pass_through(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    def fail(value: Tensor, hook: object) -> None:
        raise RuntimeError("something else")

    model = loaded("gpt2")
    with (
        pytest.raises(RuntimeError, match="something else"),
        model.hooks([("blocks.0.attn.hook_pattern", fail)]),
    ):
        model.forward(tokens)


def test_memory_stays_flat(zoo: Callable[..., Path], tokens: Tensor) -> None:
    """A03: capturing again and again leaves nothing behind."""
    import gc

    model = load_model(zoo("gpt2"))

    def once() -> None:
        with model.record(["pattern", "z"], lambda *a: None):
            model.forward(tokens)

    def alive() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for _ in range(5):
        once()
    gc.collect()
    before = alive()
    gc.disable()
    try:
        for _ in range(50):
            once()
        assert alive() <= before + 5
    finally:
        gc.enable()
