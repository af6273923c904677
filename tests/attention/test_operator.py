"""Attention from queries and keys against the dense float64 matrix, over shapes and masks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.attention import Attention, fused
from attnlens.errors import NonFiniteError, UsageError
from tests.attention.oracle import Case, entropy


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    want = want.double()
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 40))
    prompts = draw(st.integers(1, 2))
    kv_heads = draw(st.integers(1, 2))
    upto = st.lists(st.integers(0, n), min_size=prompts, max_size=prompts)
    return Case(
        prompts=prompts,
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        n=n,
        d=draw(st.sampled_from([1, 3, 8])),
        spread=draw(st.sampled_from([0.0, 0.3, 2.0, 30.0])),
        scale=draw(st.sampled_from([0.4, -1.0])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        seed=draw(st.integers(0, 1000)),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 1, 3, 100])),
        soft_cap=draw(st.sampled_from([None, None, 5.0])),
        alibi=draw(st.sampled_from([False, False, True])),
        prefix=draw(st.one_of(st.none(), st.none(), upto)),
        lengths=draw(st.one_of(st.none(), upto)),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_everything_exact_agrees_with_the_dense_matrix(case: Case) -> None:
    a, p, seen, tol = case.attention, case.pattern, case.visible, case.tolerance
    n = case.n
    x = torch.randn(*p.shape[:-1], 3, dtype=case.dtype)
    inside = seen.any(-1)[:, None, :, None]
    close(a.to_dense(), p, tol)
    close(a @ x, p @ torch.where(inside, x, 0.0).double(), 10 * tol)
    close(a.T @ x, p.mT @ torch.where(inside, x, 0.0).double(), 10 * tol)
    close(a.entropy(), entropy(p), 10 * tol)
    close(a.max(), p.amax(-1), tol)
    close(a.frobenius2(), (p**2).sum((-1, -2)), 10 * tol)
    close(a.received(), p.sum(-2) / seen.sum(-2).clamp_min(1)[:, None], 10 * tol)
    for temperature in (0.5, 1.0, 3.0):
        close(a.row_logsumexp(temperature), (case.scores / temperature).logsumexp(-1), 10 * tol)
    sums, counts = a.by_offset()
    diagonals = [torch.diagonal(p, -int(o), -2, -1).sum(-1) for o in a.offsets]
    close(sums, torch.stack(diagonals, -1), 10 * tol)
    cells = [torch.diagonal(seen, -int(o), -2, -1).sum(-1) for o in a.offsets]
    assert (counts.expand(case.prompts, 1, -1)[:, 0] == torch.stack(cells, -1)).all()
    assert (a.visible().expand(case.prompts, 1, n)[:, 0] == seen.sum(-1)).all()
    rows, cols = torch.randint(n, (2, 20))
    close(a.entries(rows, cols), p[..., rows, cols], tol)
    close(a.top_keys(3).weights, p.topk(min(3, n), -1)[0], tol)


@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from([0.5, 0.99, 1.0, 1.01, 2.0, 5.0, math.inf]))
def test_renyi(case: Case, alpha: float) -> None:
    p = case.pattern
    if alpha == 1:
        want = entropy(p)
    elif math.isinf(alpha):
        want = -p.amax(-1).log()
    else:
        want = (p**alpha).sum(-1).log() / (1 - alpha)
    want = torch.where(p.amax(-1) > 0, want, 0.0)
    tolerance = max(1e-9, case.tolerance) / min(1.0, abs(1 - alpha) or 1.0)
    close(case.attention.renyi(alpha), want, 20 * tolerance)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_both_backings_agree(case: Case) -> None:
    a = case.attention
    causal = case.causal and case.prefix is None
    p = case.pattern
    b = Attention.from_pattern(p, causal=causal, lengths=case.lengths)
    tol = 10 * case.tolerance
    tokens = torch.randint(4, (case.prompts, case.n))
    for method, given_ in (
        ("entropy", ()),
        ("max", ()),
        ("frobenius2", ()),
        ("previous_token", ()),
        ("sink", ()),
        ("duplicate", (tokens,)),
        ("induction", (tokens,)),
    ):
        got, want = getattr(a, method)(*given_), getattr(b, method)(*given_)
        torch.testing.assert_close(got.double(), want.double(), rtol=tol, atol=tol, equal_nan=True)
    close(a.singular_values(), torch.linalg.svdvals(p), max(1e-9, tol) * case.n)


@pytest.mark.parametrize("n", [513, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [True, False])
def test_several_kernel_blocks(n: int, dtype: torch.dtype, causal: bool) -> None:
    """Long enough that the kernels split queries and keys, with values wider than the heads."""
    case = Case(1, 2, 1, n=n, d=16, dtype=dtype, causal=causal, lengths=[n - 40])
    a, p = case.attention, case.pattern
    # Columns laid out in memory one after the other, as matrix factorisations return them.
    x = torch.randn(1, 2, 40, n, dtype=dtype).mT
    x[:, :, n - 40 :] = math.nan
    real = torch.where(torch.arange(n)[:, None] < n - 40, x, 0.0).double()
    close(a @ x, p @ real, case.tolerance)
    close(a.T @ x, p.mT @ real, 10 * case.tolerance)
    close(a.entropy(), entropy(p), 3 * case.tolerance)
    close(a.max(), p.amax(-1), case.tolerance)


@pytest.mark.parametrize("size", [2.0**10, 2.0**20, 2.0**50, 2.0**83])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_any_size(size: float, dtype: torch.dtype) -> None:
    """Whole numbers as queries and keys, so that the scores are exact whatever their size."""
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-3, 4, (1, 2, 12, 4), generator=g).to(dtype)
    k = torch.randint(-3, 4, (1, 2, 12, 4), generator=g).to(dtype) * size
    a = Attention.from_qk(q, k, scale=1.0)
    s = (q.double() @ k.double().mT).masked_fill(torch.ones(12, 12).triu(1).bool(), -1e300)
    p = s.softmax(-1)
    for got, want in (
        (a.to_dense(), p),
        (a.entropy(), entropy(p)),
        (a.max(), p.amax(-1)),
        (a.renyi(2.0), -(p**2).sum(-1).log()),
        (a.T @ torch.ones(12, dtype=dtype), p.sum(-2)),
    ):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_fully_masked_prompts_are_zero() -> None:
    a = Case(lengths=[0, 9]).attention
    for value in (a.to_dense(), a.entropy(), a.max(), a.renyi(0.0), a.renyi(math.inf)):
        assert (value[0] == 0).all() and (value[1] > 0).any()
    assert (a.row_logsumexp()[0] == -math.inf).all()
    assert a.previous_token()[0].isnan().all()
    assert (a.top_keys(2).keys[0] == -1).all()


def test_padding_is_never_read() -> None:
    case = Case(lengths=[9, 4])
    want = case.attention
    case.q[1, :, 4:] = math.nan
    case.k[1, :, 4:] = math.inf
    got = case.attention
    assert torch.equal(got.to_dense(), want.to_dense())
    x = torch.ones(9, 2, dtype=torch.float64)
    assert torch.equal(got @ x, want @ x)


def test_permuting_positions_with_the_mask() -> None:
    """Attn(PX, P M P^T) = P Attn(X, M); with the causal mask left as it is it must fail."""
    case = Case(causal=False, n=12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    moved = Attention.from_qk(case.q[:, :, order], case.k[:, :, order], scale=0.4, causal=False)
    close(moved.to_dense(), case.pattern[..., order, :][..., order], 1e-13)
    causal = Attention.from_qk(case.q[:, :, order], case.k[:, :, order], scale=0.4)
    want = Case(n=12).pattern[..., order, :][..., order]
    assert (causal.to_dense() - want).abs().max() > 0.1


def test_row_shift_changes_nothing_and_doubling_does() -> None:
    case = Case()
    shifted = torch.cat((case.q, torch.randn(2, 4, 9, 1, dtype=torch.float64)), -1)
    keys = torch.cat((case.k, torch.full((2, 2, 9, 1), 7.0, dtype=torch.float64)), -1)
    close(Attention.from_qk(shifted, keys, scale=0.4).to_dense(), case.pattern, 1e-14)
    doubled = Attention.from_qk(case.q, case.k, scale=0.8).to_dense()
    assert (doubled - case.pattern).abs().max() > 0.05


def test_the_blocked_fallback_agrees_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused.supported("cpu", torch.float32) and fused.supported("cpu", torch.float64)
    case = Case(n=150, lengths=[150, 90], causal=False)
    kernel = case.attention
    monkeypatch.setattr(fused, "supported", lambda device, dtype: False)
    blocked = case.attention
    x = torch.randn(150, 7, dtype=torch.float64)
    for got, want in (
        (blocked.entropy(), kernel.entropy()),
        (blocked @ x, kernel @ x),
        (blocked.T @ x, kernel.T @ x),
        (blocked.received(), kernel.received()),
        (blocked.frobenius2(), kernel.frobenius2()),
    ):
        close(got, want, 1e-12)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return q, q[..., 0]

    monkeypatch.setattr(fused, "_call", wrong)
    assert not fused.supported.__wrapped__("cpu", torch.float32)


def test_numpy_and_labelled_arrays_in_any_order() -> None:
    case = Case()
    want = case.attention.entropy()
    q = xr.DataArray(case.q.numpy(), dims=("prompt", "head", "pos", "d_head"))
    k = xr.DataArray(case.k.numpy(), dims=("prompt", "kv_head", "pos", "d_head"))
    q, k = (x.transpose("prompt", "pos", ..., "d_head") for x in (q, k))
    close(Attention.from_qk(q, k, scale=0.4).entropy(), want, 1e-14)
    close(Attention.from_qk(case.q.numpy(), case.k.numpy(), scale=0.4).entropy(), want, 1e-14)
    one = Attention.from_qk(case.q[0, 0], case.k[0, 0], scale=0.4)
    close(one.entropy(), want[0, 0], 1e-14)
    half = Attention.from_qk(case.q.bfloat16(), case.k.bfloat16(), scale=0.4)
    assert half.dtype == torch.float32


def test_select() -> None:
    case = Case(lengths=[9, 5], alibi=True)
    a, p = case.attention, case.pattern
    close(a.select(1).to_dense(), p[1], 1e-12)
    close(a.select((slice(None), slice(1, 3))).to_dense(), p[:, 1:3], 1e-12)
    close(a.select((..., [3])).to_dense(), p[:, 3:], 1e-12)
    close(a.select((0, 2)).entropy(), entropy(p[0, 2:3]), 1e-12)
    assert a.select((slice(None), 0)).lengths.tolist() == [9, 5]
    b = Attention.from_pattern(p).select((1, slice(2, 4)))
    close(b.to_dense(), p[1, 2:4], 1e-12)
    for bad in (2, (0, 0, 0), "a"):
        with pytest.raises(UsageError, match="does not select"):
            a.select(bad)


def test_one_number_serves_all_prompts() -> None:
    for case in (Case(), Case(1, 4, 4)):
        q, k = (case.q, case.k) if case.q.shape[0] > 1 else (case.q[0], case.k[0])
        for given_ in ("prefix", "lengths"):
            wanted = Attention.from_qk(q, k, scale=0.3, **{given_: torch.tensor(3)}).to_dense()
            for one in (3, np.int64(3), [3], np.array([3])):
                got = Attention.from_qk(q, k, scale=0.3, **{given_: one}).to_dense()
                assert torch.equal(got, wanted)
            with pytest.raises(UsageError, match="found -1 to -1"):
                Attention.from_qk(q, k, scale=0.3, **{given_: -1})
        p = Attention.from_qk(q, k, scale=0.3, lengths=3).to_dense()
        assert torch.equal(Attention.from_pattern(p, lengths=3).to_dense(), p)


def test_numbers_that_are_not_whole_are_refused_as_such() -> None:
    a = Case().attention
    for call in (
        lambda: a.energy([2.5]),
        lambda: a.energy(["2"]),
        lambda: a.svd(2.5),
        lambda: a.svd(2, n_iter=2.5),
        lambda: a.singular_values(2.5),
        lambda: a.top_keys(2.0),
        lambda: Attention.from_pattern(a.to_dense(), window=2.5),
        lambda: Attention.from_qk(Case().q, Case().k, scale=1.0, window="2"),
    ):
        with pytest.raises(UsageError, match=r"whole number, not '?2"):
            call()
    with pytest.raises(UsageError, match="ks must be a sequence, not 5"):
        a.energy(5)
    assert torch.equal(a.top_keys(np.int64(2)).keys, a.top_keys(2).keys)


def test_vectors_without_positions_are_refused() -> None:
    with pytest.raises(UsageError, match="q has shape"):
        Attention.from_qk(torch.ones(4), torch.ones(4), scale=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_pattern_is_finite_or_refused(value: float) -> None:
    p = Case().pattern.clone()
    p[1, 2, 7, 3] = value
    with pytest.raises(NonFiniteError, match=r"\[1, 2, 7, 3\]"):
        Attention.from_pattern(p)
    assert Attention.from_pattern(p, lengths=[9, 7]).entropy().isfinite().all()


def test_what_makes_no_sense_is_refused() -> None:
    case = Case()
    q, k = case.q, case.k
    for given_, message in (
        ({"window": 0}, "window"),
        ({"soft_cap": 0.0}, "soft cap"),
        ({"scale": math.nan}, "scale"),
        ({"alibi": np.ones(3)}, "slope"),
        ({"lengths": [1, 10]}, "between 0 and the 9"),
        ({"lengths": [1.0, 2.0]}, "whole numbers"),
    ):
        with pytest.raises(UsageError, match=message):
            Attention.from_qk(q, k, **{"scale": 1.0, **given_})
    with pytest.raises(UsageError, match="q has shape"):
        Attention.from_qk(q, k[:, :, 1:], scale=1.0)
    with pytest.raises(UsageError, match="q has shape"):
        Attention.from_qk(q[:, :3], k, scale=1.0)
    broken = q.clone()
    broken[1, 2, 3, 4] = math.nan
    with pytest.raises(NonFiniteError, match=r"\[1, 2, 3, 4\]"):
        Attention.from_qk(broken, k, scale=1.0)
    a = case.attention
    for call in (
        lambda: a.renyi(-1.0),
        lambda: a.row_logsumexp(0.0),
        lambda: a.top_keys(0),
        lambda: a.entries([0], [9]),
        lambda: a.entries([0.5], [0]),
        lambda: a @ torch.ones(8),
        lambda: a @ torch.ones(3, 9, 1),
        lambda: a.duplicate(torch.zeros(2, 8, dtype=torch.int64)),
        lambda: a.svd(0),
        lambda: a.energy([-1]),
    ):
        with pytest.raises(UsageError):
            call()
