"""Between hook and store: finiteness, casts, copies."""

from __future__ import annotations

import pytest
import torch

from attnlens.activations import MASKED_SCORE
from attnlens.errors import CaptureError, NonFiniteError
from attnlens.recorder.taps import (
    Buffers,
    DoesNotFitError,
    check_fit,
    check_softmax,
    cut,
    largest_magnitude,
)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_is_named_with_its_place(bad: float, dtype: torch.dtype) -> None:
    value = torch.rand(3, 5, 4, 4).to(dtype)
    value[1, 2, 3, 0] = bad
    with pytest.raises(NonFiniteError) as caught:
        largest_magnitude("pattern", 7, value, prompts=[10, 20, 30], heads=[1, 2, 9, 11, 13])
    text = str(caught.value)
    for part in ("pattern", "layer 7", "head 9", "query_pos 3", "key_pos 0", "prompt 20"):
        assert part in text


def test_many_large_finite_numbers_are_finite() -> None:
    value = torch.full((2, 64, 4, 64), 60000.0, dtype=torch.float16)
    assert largest_magnitude("z", 0, value, prompts=[0, 1]) == 60000.0
    assert largest_magnitude("z", 0, -value, prompts=[0, 1]) == 60000.0


def test_what_is_kept_is_a_copy_as_large_as_what_was_asked_for() -> None:
    live, buffers = torch.rand(4, 16, 3, 8), Buffers()
    kept = buffers.copy(cut("z", live, heads=[1], positions=[-1]), "float32")
    assert kept.shape == (4, 1, 1, 8)
    assert torch.equal(kept[:, 0, 0], live[:, -1, 1])
    assert kept.untyped_storage().nbytes() == 4 * 8 * 4
    whole = buffers.copy(cut("z", live, heads=None, positions=None), "float32")
    before = whole.clone()
    live.zero_()
    assert torch.equal(whole, before)


def test_a_copy_is_not_overwritten_before_it_is_given_back() -> None:
    buffers = Buffers()
    first, second = (buffers.copy(torch.full((2, 3), x), "float16") for x in (1.0, 2.0))
    assert (first == 1).all() and (second == 2).all()
    buffers.release(first)
    third = buffers.copy(torch.full((2, 3), 3.0), "float16")
    assert third.data_ptr() == first.data_ptr()
    assert (second == 2).all() and (third == 3).all()
    assert buffers.copy(torch.ones(2, 3), "float32").dtype == torch.float32


@pytest.mark.parametrize("largest", [65505.0, 1e-5])
def test_half_precision_is_refused_where_it_loses(largest: float) -> None:
    with pytest.raises(DoesNotFitError):
        check_fit("z", "float16", largest)
    check_fit("z", "float32", largest)
    check_fit("z", "float16", 0.0)
    check_fit("pattern", "float16", 1e-5)


def test_scores_and_pattern_must_belong_together() -> None:
    scores = torch.randn(2, 3, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), MASKED_SCORE)
    pattern = scores.softmax(-1)
    check_softmax(0, scores, pattern, torch.float32)
    # A sink takes its share of every row.
    check_softmax(0, scores, pattern * torch.rand(2, 3, 5, 1), torch.float32)
    with pytest.raises(CaptureError, match="layer 0"):
        check_softmax(0, pattern, pattern, torch.float32)
