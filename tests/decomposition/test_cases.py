"""Input that breaks other tools: handled, or refused with a reason."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import xarray as xr

from attnlens.decomposition import cp, factor_match, tucker
from attnlens.errors import DecompositionError

from .planted import planted

X = np.random.default_rng(0).standard_normal((12, 5, 7))


def test_zeros():
    for nonnegative in (False, True):
        fit = cp(np.zeros((3, 4, 5)), 2, nonnegative=nonnegative)
        assert (fit.weights == 0).all()
        assert fit.error == 0
        assert "zero" in fit.notes[0]
        np.testing.assert_allclose(np.linalg.norm(fit.factors[1], axis=0), 1)
        fit.dataset  # noqa: B018
    assert "zero" in tucker(np.zeros((3, 4, 5)), 2).notes[0]


@pytest.mark.parametrize("nonnegative", [False, True])
def test_constant_tensors_have_one_component_and_say_so(nonnegative):
    fit = cp(np.ones((3, 4, 5)), 2, nonnegative=nonnegative)
    assert fit.error < 1e-12
    assert fit.weights == pytest.approx([np.sqrt(60), 0], abs=1e-9)
    assert "weight 0" in fit.notes[0]
    again = cp(np.ones((3, 4, 5)), 2, nonnegative=nonnegative)
    np.testing.assert_array_equal(fit.factors[0], again.factors[0])


def test_rank_above_a_dimension():
    fit = cp(X, 9)
    assert fit.weights.shape == (9,)
    assert "5 of 'mode_1'" in fit.notes[0]
    assert np.isfinite(fit.error)


def test_rank_above_what_the_tensor_can_hold():
    fit = cp(np.random.default_rng(0).standard_normal((2, 2, 3)), 6, n_restarts=2)
    assert (fit.weights[4:] == 0).all()
    assert fit.factors[0].shape == (2, 6)
    assert np.isfinite(fit.factors[0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("call", [lambda t: cp(t, 2), lambda t: tucker(t, 2)])
def test_not_finite_input_is_refused_with_its_place(bad, call):
    tensor = xr.DataArray(X.copy(), dims=("head", "pos", "d_model"))
    tensor[3, 1, 2] = bad
    with pytest.raises(DecompositionError, match="head=3, pos=1, d_model=2"):
        call(tensor)


def test_negative_input_is_refused_when_factors_may_not_be():
    with pytest.raises(DecompositionError, match="negative"):
        cp(X, 2, nonnegative=True)


def test_wrong_numbers_of_ranks():
    with pytest.raises(DecompositionError, match="3 ranks needed, 2 given"):
        tucker(X, (2, 2))
    with pytest.raises(DecompositionError, match="Rank 20 is above the size 12"):
        tucker(X, (20, 5, 7))


@pytest.mark.parametrize("rank", [0, -1, 2.0, True, "two", [], [1, 0], [1.5], None])
def test_ranks_that_make_no_sense(rank):
    with pytest.raises(DecompositionError, match="rank="):
        cp(X, rank)


@pytest.mark.parametrize("ranks", [0, 1.5, "some", True, (1, 2, None, 3), {"no": 2}, {}, object()])
def test_tucker_ranks_that_make_no_sense(ranks):
    with pytest.raises(DecompositionError):
        tucker(X, ranks)


@pytest.mark.parametrize(
    "tensor",
    [
        X[0],
        X[0, 0, 0],
        np.zeros((2, 2, 2, 2, 2)),
        np.zeros((2, 0, 3)),
        X + 0j,
        X.astype(str),
        np.array([[[None]]]),
        torch.zeros(2, 2, 2).to_sparse(),
        [[1, 2], [3]],
    ],
)
def test_tensors_that_make_no_sense(tensor):
    with pytest.raises(DecompositionError):
        cp(tensor, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"n_restarts": 0},
        {"max_iter": 0},
        {"seed": -1},
        {"tol": -1.0},
        {"tol": float("nan")},
        {"polish_sweeps": -1},
        {"dims": ["a", "b"]},
        {"dims": ["a", "a", "b"]},
        {"init": [np.zeros((12, 3))]},
        {"init": [np.full((n, 2), np.nan) for n in X.shape]},
        {"init": "svd"},
        {"n_restarts": "a"},
        {"n_restarts": 1.5},
        {"seed": None},
        {"seed": 1.5},
        {"max_iter": 2.5},
        {"polish_sweeps": 0.5},
        {"nonnegative": "no"},
        {"tol": "1e-8"},
        {"memory": "1G"},
    ],
)
def test_options_that_make_no_sense(options):
    with pytest.raises(DecompositionError, match=next(iter(options))):
        cp(X, 2, **options)


@pytest.mark.parametrize(
    "options", [{"max_rank": 0}, {"max_rank": 2.5}, {"n_splits": 0}, {"n_splits": 1.5}]
)
def test_options_of_a_scan_that_make_no_sense(options):
    name, value = next(iter(options.items()))
    with pytest.raises(DecompositionError, match=f"^{name}={value}: a whole number of at least 1"):
        cp(X, "auto", **options)


@pytest.mark.parametrize("split", [True, 1.0, 3])
def test_splits_that_make_no_sense(split):
    with pytest.raises(DecompositionError, match=f"split={split} is not a mode"):
        cp(X, [1, 2], split=split)


@pytest.mark.parametrize("rank", [0, "0.9"])
def test_tucker_names_the_mode_of_a_rank_that_makes_no_sense(rank):
    tensor = xr.DataArray(X, dims=("head", "pos", "d_model"))
    with pytest.raises(DecompositionError, match="of mode 'head'"):
        tucker(tensor, (rank, 1, 1))


def test_factors_that_are_not_finite_are_not_matched():
    with pytest.raises(DecompositionError, match="the factor of mode 1 are not finite"):
        factor_match([np.ones((3, 1)), np.full((2, 1), np.nan)], [np.ones((3, 1)), np.ones((2, 1))])


@pytest.mark.parametrize("modes", [[3], [0.5], ["a"]])
def test_modes_that_there_are_not_are_not_matched(modes):
    factors = [np.ones((n, 1)) for n in X.shape]
    with pytest.raises(DecompositionError, match="modes="):
        factor_match(factors, factors, modes=modes)


def test_a_result_beyond_floating_point_is_refused():
    with pytest.raises(DecompositionError, match="above the largest float64"):
        cp(np.full((4, 5, 6), 1.7e308), 1)
    assert cp(np.full((4, 5, 6), 1e306), 1).weights[0] == pytest.approx(120**0.5 * 1e306)


@pytest.mark.parametrize(
    "name", ["component", "weights", "restart", "core", "factor_a", "a_component"]
)
def test_names_that_the_results_need_are_refused(name):
    for call in (cp, tucker):
        with pytest.raises(DecompositionError, match=f"called '{name}'"):
            call(X, 2, dims=["a", "b", name])
        labelled = xr.DataArray(
            X, dims=("a", "b", "c"), coords={name: ("b", np.arange(X.shape[1]))}
        )
        with pytest.raises(
            DecompositionError, match=f"coordinate of the tensor is called '{name}'"
        ):
            call(labelled, 2)


def test_what_is_printed_of_a_fit_is_short():
    assert len(repr(cp(X, 2))) < 400
    assert len(repr(tucker(X, 0.5))) < 400


def test_degenerate_tensor_is_flagged():
    a, b = np.random.default_rng(1).standard_normal((2, 10))
    tensor = sum(np.einsum("i,j,k", *t) for t in ((a, a, b), (a, b, a), (b, a, a)))
    fit = cp(tensor, 2, max_iter=500)
    assert fit.degeneracy.degenerate
    assert fit.degeneracy.min_cosine < -0.99
    assert any("Degenerate" in n for n in fit.notes)
    assert not cp(np.abs(tensor), 2, nonnegative=True).degeneracy.degenerate


def test_too_large_a_tensor_is_refused_before_it_is_read():
    huge = np.broadcast_to(np.float16(1), (12, 29010, 29010))
    start = time.perf_counter()
    for call in (cp, tucker):
        with pytest.raises(DecompositionError, match="GiB") as caught:
            call(huge, 2, memory=32 << 30)
        assert "slices" in caught.value.hint
        with pytest.raises(DecompositionError, match=r"of memory; 10 bytes may be used"):
            call(X, 2, memory=10)
    assert time.perf_counter() - start < 1


def test_a_tall_tensor_needs_no_large_svd():
    tensor, factors = planted((6, 12, 7000), 3, 0.1)
    start = time.perf_counter()
    assert factor_match(cp(tensor, 3), factors).min > 0.99
    assert cp(tensor, 3).converged
    assert time.perf_counter() - start < 20


def test_a_noise_tensor_has_no_stable_rank():
    scan = cp(
        np.random.default_rng(0).standard_normal((10, 24, 20)), "auto", max_rank=4, n_restarts=4
    )
    assert not scan.selection.stable
    assert scan.selection.confidence == 0
    assert "No rank is reproducible" in scan.selection.reason


def test_single_entries_and_thin_tensors():
    assert cp(np.full((1, 1, 1), -3.0), 1).weights == pytest.approx([3])
    fit = cp(np.random.default_rng(0).standard_normal((1, 6, 5)), 2)
    assert fit.error < 1
    assert cp(np.random.default_rng(0).standard_normal((1, 6, 5)), 5).error < 1e-6
