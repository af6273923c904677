"""Rank selection, matching and alignment."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tlviz
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.decomposition import align, cp, factor_match, match_null
from attnlens.errors import DecompositionError

from .planted import compose, planted


@pytest.mark.parametrize(("rank", "noise"), [(2, 1.0), (4, 0.5), (5, 0.1)])
def test_split_half_finds_the_planted_rank(rank, noise):
    tensor, _ = planted((24, 128, 32), rank, noise, seed=rank)
    scan = cp(tensor, "auto", max_rank=6, split=1, n_restarts=4, n_splits=1)
    choice = scan.selection
    assert choice.chosen == rank
    assert choice.stable
    assert choice.confidence == 1
    assert choice.ranks == tuple(range(1, 7))
    assert f"Rank {rank}" in choice.reason
    assert scan.cp_tensor.factors[0].shape == (24, rank)
    curves = scan.dataset
    assert curves["scan_stability"].sel(rank=rank) > 0.7
    assert (np.diff(curves["scan_error"]) < 1e-6).all()


def test_nonnegative_rank():
    tensor, _ = planted((12, 60, 30), 3, nonnegative=True)
    tensor = tensor * np.random.default_rng(0).uniform(0.8, 1.2, tensor.shape)
    scan = cp(tensor, range(2, 6), split="mode_1", nonnegative=True, n_restarts=4, n_splits=1)
    assert scan.selection.chosen == 3
    chance = scan.selection.chance
    assert 0 < chance[1] < scan.selection.stability[1]
    assert "by chance" in scan.selection.reason
    np.testing.assert_array_equal(scan.curves["chance"], chance)


def test_an_exact_tensor_is_not_given_more_components_than_it_has():
    tensor, _ = planted((12, 40, 16), 3)
    scan = cp(tensor, "auto", max_rank=6, split=1, n_restarts=4, n_splits=1)
    assert scan.selection.chosen == 3
    assert cp(np.ones((4, 8, 5)), "auto", max_rank=3, n_splits=1).selection.chosen == 1


def test_a_scan_without_a_split_selects_nothing():
    scan = cp(planted((6, 7, 8), 2)[0], [3, 1, 1, 2], n_restarts=2)
    assert list(scan) == [1, 2, 3]
    assert len(scan) == 3
    assert scan.selection is None
    assert "stability" not in scan.curves
    with pytest.raises(DecompositionError, match="No rank was selected"):
        scan.best  # noqa: B018


def test_a_fit_does_not_depend_on_the_other_ranks_of_a_scan():
    tensor, _ = planted((10, 14, 12), 3, 0.2)
    scan = cp(tensor, [2, 3, 4])
    assert factor_match(scan[3], cp(tensor, 3)).min > 0.9999


@pytest.mark.parametrize("split", ["no", 7, -4])
def test_an_unknown_mode_to_split(split):
    with pytest.raises(DecompositionError, match="split="):
        cp(planted((6, 7, 8), 2)[0], [1, 2], split=split)


def test_too_short_a_mode_to_split():
    tensor = xr.DataArray(planted((6, 7, 3), 2)[0], dims=("head", "pos", "prompt"))
    with pytest.raises(DecompositionError, match="'prompt' has 3 entries"):
        cp(tensor, "auto", max_rank=2, n_restarts=2)


@pytest.mark.parametrize("weigh", [False, True])
def test_factor_match_agrees_with_tensorly_viz(weigh):
    tensor, _ = planted((8, 9, 10), 4, 1.0)
    a, b = cp(tensor, 3, n_restarts=2), cp(tensor + 0.5 * planted((8, 9, 10), 3, seed=7)[0], 3)
    match = factor_match(a, b, consider_weights=weigh)
    truth, order = tlviz.factor_tools.factor_match_score(
        a.cp_tensor, b.cp_tensor, consider_weights=weigh, return_permutation=True
    )
    assert match.mean == pytest.approx(truth)
    np.testing.assert_array_equal(match.pairs[:, 1], order)
    assert match.min == match.scores.min()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 3))
def test_match_undoes_order_sign_and_scale(seed, rank, extra):
    rng = np.random.default_rng(seed)
    factors = [rng.standard_normal((n, rank)) for n in (9, 10, 11)]
    order = rng.permutation(rank + extra)
    other = [
        np.hstack([f * rng.choice([-2, 3], rank), rng.standard_normal((len(f), extra))])[:, order]
        for f in factors
    ]
    match = factor_match(factors, other)
    assert match.min == pytest.approx(1)
    np.testing.assert_array_equal(order[match.pairs[:, 1]], np.arange(rank))
    assert len(match.unmatched[1]) == extra
    assert len(match.unmatched[0]) == 0
    back = factor_match(other, factors)
    assert back.mean == pytest.approx(match.mean)
    assert len(back.unmatched[0]) == extra


def test_duplicate_columns_are_matched_in_order_and_in_time():
    # Equal up to rounding, which must not decide.
    rng = np.random.default_rng(0)
    factors = [1 + 1e-15 * rng.standard_normal((5, 8)) for _ in range(3)]
    start = time.perf_counter()
    match = factor_match(factors, factors)
    assert time.perf_counter() - start < 1
    np.testing.assert_array_equal(match.pairs, np.stack([range(8)] * 2, axis=1))


def test_zero_components_match_nothing():
    factors = [np.zeros((5, 2)), np.ones((6, 2))]
    assert factor_match(factors, factors).mean == 0


def test_modes_may_be_left_out():
    a = [np.eye(4)[:, :2], np.eye(5)[:, :2], np.eye(6)[:, :2]]
    b = [np.eye(4)[:, :2], np.ones((9, 2)), np.eye(6)[:, :2]]
    assert factor_match(a, b, modes=[0, 2]).min == 1
    for modes in (None, [], [1]):
        with pytest.raises(DecompositionError):
            factor_match(a, b, modes=modes)
    with pytest.raises(DecompositionError, match="modes"):
        factor_match(a, b[:2])


def test_the_null_knows_that_nonnegative_factors_always_match_somewhat():
    rng = np.random.default_rng(0)
    chances = []
    for _ in range(20):
        a, b = ([1 + rng.random((30, 2)) for _ in range(3)] for _ in range(2))
        match = factor_match(a, b)
        assert match.min > 0.8  # looks like agreement, and is none
        chances.append(match_null(a, b, n_draws=100).p_value(match))
    assert 0.3 < np.mean(chances) < 0.7
    near = [f + 0.01 * rng.random(f.shape) for f in a]
    null = match_null(a, near)
    assert null.p_value(factor_match(a, near)) < 0.01
    assert match_null(a, near).min.tobytes() == null.min.tobytes()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_align_gives_the_references_order_and_signs(seed):
    rng = np.random.default_rng(seed)
    factors = [rng.standard_normal((n, 3)) for n in (7, 8, 9)]
    order = rng.permutation(3)
    signs = rng.choice([-1, 1], (2, 3))
    flips = [signs[0], signs[1], signs[0] * signs[1]]  # the tensor stays as it is
    other = [(f * s)[:, order] for f, s in zip(factors, flips, strict=True)]
    back = align(other, factors)
    for f, b in zip(factors, back, strict=True):
        np.testing.assert_allclose(b, f)
    np.testing.assert_allclose(compose(back), compose(other))
