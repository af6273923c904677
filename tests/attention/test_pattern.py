"""Attention from patterns: closed forms, masks found out, tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray as xr

from attnlens.attention import Attention
from attnlens.errors import UsageError
from tests.attention.oracle import Case, entropy


def uniform(n: int) -> torch.Tensor:
    return torch.ones(1, n, n, dtype=torch.float64) / n


def causal_uniform(n: int) -> torch.Tensor:
    return torch.ones(1, n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]


def previous_token(n: int) -> torch.Tensor:
    p = torch.zeros(1, n, n, dtype=torch.float64)
    p[0, torch.arange(n), (torch.arange(n) - 1).clamp_min(0)] = 1
    return p


def sink(n: int) -> torch.Tensor:
    p = torch.zeros(1, n, n, dtype=torch.float64)
    p[..., 0] = 1
    return p


def test_uniform() -> None:
    a = Attention.from_pattern(uniform(70))
    assert not a.causal
    torch.testing.assert_close(a.entropy(), torch.full((1, 70), math.log(70)).double())
    torch.testing.assert_close(a.entropy_share(), torch.ones(1, 70).double())
    s = a.singular_values()[0]
    assert s[0] == pytest.approx(1) and s[1:].max() < 1e-12
    assert float(a.effective_rank().value) == pytest.approx(1)


def test_causal_uniform() -> None:
    n = 90
    a = Attention.from_pattern(causal_uniform(n))
    assert a.causal
    assert float(a.entropy().mean()) == pytest.approx(math.lgamma(n + 1) / n)
    harmonic = sum(1 / i for i in range(1, n + 1))
    assert float(a.frobenius2()) == pytest.approx(harmonic)
    assert a.renyi(2).allclose(a.entropy()) and a.renyi(0.5).allclose(a.entropy())
    assert a.entropy_share()[0, 0].isnan()
    torch.testing.assert_close(a.entropy_share()[0, 1:], torch.ones(n - 1).double())


def test_identity() -> None:
    a = Attention.from_pattern(torch.eye(20)[None])
    assert (a.entropy() == 0).all() and (a.renyi(2) == 0).all()
    torch.testing.assert_close(a.energy([0, 5, 20]).value[0], torch.tensor([0, 0.25, 1]).double())
    assert float(a.effective_rank().value) == pytest.approx(20)
    assert float(a.stable_rank()) == pytest.approx(20)


def test_sink() -> None:
    a = Attention.from_pattern(sink(16))
    assert float(a.sink()) == 1
    assert a.singular_values(2)[0].tolist() == pytest.approx([4, 0], abs=1e-12)
    assert a.received()[0].tolist() == [1.0] + [0.0] * 15
    p = 0.95 * sink(16) + 0.05 * uniform(16)
    assert float(Attention.from_pattern(p).sink()) == pytest.approx(0.95 + 0.05 / 16)


def test_previous_token() -> None:
    n = 12
    a = Attention.from_pattern(previous_token(n))
    assert float(a.previous_token()) == 1
    want = [math.sqrt(2)] + [1.0] * (n - 2) + [0.0]
    assert a.singular_values()[0].tolist() == pytest.approx(want, abs=1e-12)
    sums, counts = a.by_offset()
    assert sums[0].tolist() == [1.0, n - 1.0] + [0.0] * (n - 2)
    assert counts.tolist() == list(range(n, 0, -1))


def test_induction_and_duplicate_by_hand() -> None:
    # a b c a b: query 3 finds its token at 0, query 4 at 1.
    tokens = torch.tensor([7, 8, 9, 7, 8])
    p = torch.zeros(2, 5, 5)
    p[0, 3, 1] = p[0, 4, 2] = 1  # right after
    p[1, 3, 0] = p[1, 4, 1] = 1  # the same
    a = Attention.from_pattern(p)
    assert a.induction(tokens).tolist() == [1, 0]
    assert a.duplicate(tokens).tolist() == [0, 1]
    # a a: the position after the earlier copy is the query itself, and does not count.
    a = Attention.from_pattern(torch.eye(2)[None])
    assert a.induction(torch.tensor([5, 5])).tolist() == [0]
    assert a.duplicate(torch.tensor([5, 6])).isnan().all()


@pytest.mark.parametrize("vocabulary", [1, 3, 30])
@pytest.mark.parametrize("lengths", [None, [30, 17]])
def test_token_scores_by_definition(vocabulary: int, lengths: list[int] | None) -> None:
    case = Case(n=30, lengths=lengths)
    p = case.pattern
    tokens = torch.randint(vocabulary, (2, 30), generator=torch.Generator().manual_seed(3))
    same = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    after = torch.nn.functional.pad(tokens, (1, 0), value=-1)[:, :-1]
    follows = (tokens[:, :, None] == after[:, None, :]).tril(-1)
    real = torch.arange(30) < torch.tensor(lengths or [30, 30])[:, None]
    rows = (same.any(-1) & real)[:, None].double()
    for name, cells in (("duplicate", same), ("induction", follows)):
        want = ((p * cells[:, None]).sum(-1) * rows).sum(-1) / rows.sum(-1)
        for a in (case.attention, Attention.from_pattern(p, lengths=lengths)):
            torch.testing.assert_close(getattr(a, name)(tokens), want, rtol=1e-10, atol=1e-12)


def test_padding_may_hold_anything() -> None:
    p = torch.full((2, 1, 6, 6), math.nan)
    p[0] = causal_uniform(6)
    p[1, :, :4, :4] = causal_uniform(4)
    a = Attention.from_pattern(p, lengths=[6, 4])
    assert a.causal
    torch.testing.assert_close(
        a.entropy()[1, 0, :4], Attention.from_pattern(causal_uniform(4).float()).entropy()[0]
    )
    assert (a.entropy()[1, 0, 4:] == 0).all()
    assert a.visible()[1, 0].tolist() == [1, 2, 3, 4, 0, 0]
    assert a.received()[1, 0, 4:].tolist() == [0, 0]
    assert float(a.previous_token()[1, 0]) == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)


def test_windows_bear_on_what_is_visible() -> None:
    case = Case(n=10, window=3)
    p = case.pattern
    a, b = Attention.from_pattern(p, window=3), Attention.from_pattern(p)
    assert a.visible().tolist() == [1, 2] + [3] * 8
    assert b.visible().tolist() == list(range(1, 11))
    torch.testing.assert_close(a.received(), case.attention.received())
    torch.testing.assert_close(a.entropy(), entropy(p))


def test_causality_is_seen_where_it_is() -> None:
    p = causal_uniform(200)
    assert Attention.from_pattern(p).causal
    p[0, 3, 150] = 1e-8
    assert not Attention.from_pattern(p).causal
    assert Attention.from_pattern(p, causal=True).causal


def test_16_bit_patterns_are_widened_before_any_sum() -> None:
    p = uniform(3000)[:, :5].expand(1, 5, 3000)
    p = torch.cat((p, torch.zeros(1, 2995, 3000)), 1).half()
    assert float(Attention.from_pattern(p).entropy()[0, 0]) == pytest.approx(
        float(entropy(p.double())[0, 0]), rel=1e-12
    )


def test_inputs_are_left_alone_and_may_be_labelled() -> None:
    p = Case().pattern.numpy()
    p.flags.writeable = False
    labelled = xr.DataArray(p, dims=("prompt", "head", "query_pos", "key_pos"))
    labelled = labelled.transpose("key_pos", "head", "query_pos", "prompt")
    want = Attention.from_pattern(p.copy()).entropy()
    before = p.copy()
    assert torch.equal(Attention.from_pattern(labelled).entropy(), want)
    a = Attention.from_pattern(p)
    a.entropy(), a.max(), a.by_offset(), a.renyi(2.0), a.singular_values()
    assert np.array_equal(p, before)
    with pytest.raises(UsageError, match="as many queries as keys"):
        Attention.from_pattern(p[..., :3])
    with pytest.raises(UsageError, match="query_pos"):
        Attention.from_pattern(xr.DataArray(p, dims=("prompt", "head", "a", "b")))
