"""CP against planted tensors, tensorly and tensorly-viz."""

from __future__ import annotations

import numpy as np
import pytest
import tensorly as tl
import tlviz
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorly.decomposition import parafac

from attnlens.decomposition import cp, factor_match

from .planted import compose, planted, relative_error


@pytest.mark.parametrize("shape", [(12, 20, 16), (6, 7, 8, 9)])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_planted_components_are_recovered_exactly(shape, rank):
    tensor, factors = planted(shape, rank)
    fit = cp(tensor, rank)
    assert fit.converged
    assert fit.error < 1e-7
    assert factor_match(fit, factors).min > 0.999999
    assert fit.core_consistency == pytest.approx(100, abs=1e-3)
    assert not fit.degeneracy.degenerate


def test_three_groups_of_heads_are_recovered_with_and_without_noise():
    rng = np.random.default_rng(1)
    heads = np.kron(np.eye(3), np.ones((4, 1))) * rng.uniform(0.5, 2, (12, 1))
    factors = [heads, rng.standard_normal((30, 3)), rng.standard_normal((24, 3))]
    tensor = compose(factors)
    assert factor_match(cp(tensor, 3), factors).min > 0.9999
    white = rng.standard_normal(tensor.shape)
    noisy = tensor + 0.05 * np.linalg.norm(tensor) / np.linalg.norm(white) * white
    assert factor_match(cp(noisy, 3), factors).min > 0.999


def test_error_is_that_of_the_reconstruction_also_when_tiny():
    for noise in (0.0, 1e-9, 1e-5, 0.3):
        tensor, _ = planted((10, 14, 12), 3, noise)
        fit = cp(tensor, 3)
        truth = relative_error(tensor, tl.cp_to_tensor(fit.cp_tensor))
        assert fit.error == pytest.approx(truth, rel=1e-3, abs=1e-14)
        if noise:
            assert fit.error == pytest.approx(noise, rel=0.3)


@pytest.mark.parametrize("rank", [2, 4, 6])
def test_no_worse_than_tensorly_from_ten_random_starts(rank):
    tensor, _ = planted((12, 20, 16), 5, 0.5, seed=3)
    best = min(
        relative_error(
            tensor,
            tl.cp_to_tensor(parafac(tensor, rank, init="random", random_state=s, n_iter_max=300)),
        )
        for s in range(10)
    )
    assert cp(tensor, rank).error < best + 1e-5


@pytest.mark.parametrize("shape", [(9, 10, 11), (5, 6, 7, 8)])
@pytest.mark.parametrize("rank", [2, 4, 5])
def test_core_consistency_agrees_with_tensorly_viz(shape, rank):
    tensor, _ = planted(shape, 4, 0.3, seed=2)
    fit = cp(tensor, rank, n_restarts=4)
    truth = tlviz.model_evaluation.core_consistency(fit.cp_tensor, tensor)
    assert fit.core_consistency == pytest.approx(truth, rel=1e-6, abs=1e-6)


def test_the_reported_form():
    tensor, _ = planted((10, 14, 12), 4, 0.2)
    fit = cp(tensor, 4)
    assert (fit.weights > 0).all()
    assert (np.diff(fit.weights) <= 0).all()
    for factor in fit.factors:
        np.testing.assert_allclose(np.linalg.norm(factor, axis=0), 1, atol=1e-12)
    for factor in fit.factors[:-1]:
        peak = np.abs(factor).argmax(0)
        assert (factor[peak, range(4)] > 0).all()
    signs = fit.degeneracy
    product = np.prod([f.T @ f for f in fit.factors], axis=0)
    assert signs.min_cosine == pytest.approx(product[~np.eye(4, dtype=bool)].min())
    assert signs.energy == pytest.approx((fit.weights**2).sum() / np.linalg.norm(tensor) ** 2)


@settings(max_examples=6, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 2), st.booleans())
def test_permuting_a_mode_permutes_its_factor(random, mode, nonnegative):
    tensor, _ = planted((8, 12, 10), 3, 0.1, seed=5, nonnegative=nonnegative)
    order = list(range(tensor.shape[mode]))
    random.shuffle(order)
    a = cp(tensor, 3, n_restarts=4, nonnegative=nonnegative)
    b = cp(np.take(tensor, order, mode), 3, n_restarts=4, nonnegative=nonnegative)
    # Each fit stops within its tolerance of the optimum, from another side after the permutation.
    np.testing.assert_allclose(b.weights, a.weights, rtol=1e-4)
    for k, (x, y) in enumerate(zip(a.factors, b.factors, strict=True)):
        np.testing.assert_allclose(y, x[order] if k == mode else x, atol=1e-4)


@settings(max_examples=6, deadline=None)
@given(st.floats(1e-30, 1e30), st.booleans())
def test_scaling_the_tensor_scales_the_weights(scale, flip):
    tensor, _ = planted((8, 9, 10), 3, 0.1)
    a, b = (
        cp(tensor, 3, n_restarts=2),
        cp(-scale * tensor if flip else scale * tensor, 3, n_restarts=2),
    )
    np.testing.assert_allclose(b.weights, scale * a.weights, rtol=1e-6)
    np.testing.assert_allclose(b.factors[0], a.factors[0], atol=1e-5)
    np.testing.assert_allclose(b.factors[2], -a.factors[2] if flip else a.factors[2], atol=1e-5)
    assert b.error == pytest.approx(a.error)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_scales(scale):
    tensor, factors = planted((8, 9, 10), 2)
    tensor = tensor / np.abs(tensor).max() * scale
    fit = cp(tensor, 2, n_restarts=2)
    assert np.isfinite(fit.weights).all()
    assert fit.error < 1e-7
    assert factor_match(fit, factors).min > 0.9999


@pytest.mark.parametrize("nonnegative", [False, True])
def test_same_seed_same_bytes(nonnegative):
    tensor, _ = planted((8, 12, 10), 4, 0.5, nonnegative=nonnegative)
    a, b, c = (
        cp(tensor, 5, n_restarts=6, seed=s, nonnegative=nonnegative, max_iter=30) for s in (3, 3, 4)
    )
    assert a.weights.tobytes() == b.weights.tobytes()
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a.factors, b.factors, strict=True))
    assert a.restart_errors.tobytes() == b.restart_errors.tobytes()
    assert a.restart_errors.tobytes() != c.restart_errors.tobytes()


def test_numpy_torch_and_xarray_give_the_same():
    tensor, _ = planted((6, 7, 8), 2, 0.2)
    plain = cp(tensor, 2, n_restarts=2)
    for other in (
        torch.from_numpy(tensor).requires_grad_(),
        xr.DataArray(tensor),
        tensor[::1, :, :],
    ):
        fit = cp(other, 2, n_restarts=2)
        assert all(
            x.tobytes() == y.tobytes() for x, y in zip(plain.factors, fit.factors, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_and_single_precision_give_what_double_gives(dtype):
    tensor, factors = planted((8, 12, 10), 3)
    fit = cp(torch.from_numpy(tensor).to(dtype), 3, n_restarts=4)
    assert factor_match(fit, factors).min > 0.999
    assert fit.factors[0].dtype == np.float64
    assert fit.error < 1e-2


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint16, np.bool_, ">f4"])
def test_integers_booleans_and_foreign_byte_order(dtype):
    tensor = np.random.default_rng(0).integers(0, 2, (5, 6, 7)).astype(dtype)
    fit = cp(tensor, 2, n_restarts=2)
    reference = cp(tensor.astype(float), 2, n_restarts=2)
    np.testing.assert_array_equal(fit.weights, reference.weights)


def test_views_are_left_as_they_are():
    tensor, _ = planted((6, 7, 8), 2, 0.1)
    view = tensor[::-1].transpose(2, 0, 1)
    before = view.copy()
    view.flags.writeable = False
    fit = cp(view, 2, n_restarts=2)
    np.testing.assert_array_equal(view, before)
    assert relative_error(before, tl.cp_to_tensor(fit.cp_tensor)) == pytest.approx(fit.error)


def test_the_dataset_is_labelled_and_carries_the_diagnostics(tmp_path):
    tensor, _ = planted((4, 6, 5), 2, 0.1)
    array = xr.DataArray(
        tensor,
        dims=("head", "pos", "d_model"),
        coords={"head": list("abcd"), "cluster": ("head", [0, 0, 1, 1]), "seed": 3},
    )
    fit = cp(array, 2)
    data = fit.dataset
    assert data["factor_head"].dims == ("head", "component")
    assert list(data["head"].values) == list("abcd")
    assert list(data["cluster"].values) == [0, 0, 1, 1]
    assert data["weights"].dims == ("component",)
    for name in (
        "error",
        "converged",
        "n_sweeps",
        "core_consistency",
        "degenerate",
        "notes",
        "seed",
    ):
        assert name in data.attrs
    data.to_zarr(tmp_path / "fit.zarr", consolidated=False, zarr_format=3)
    again = xr.open_zarr(tmp_path / "fit.zarr", consolidated=False)
    np.testing.assert_array_equal(again["factor_pos"], data["factor_pos"])


def test_the_callers_tensorly_backend_is_untouched():
    tensor, _ = planted((4, 6, 5), 2)
    with tl.backend_context("pytorch"):
        fit = cp(torch.from_numpy(tensor), 2)
        assert isinstance(fit.cp_tensor.factors[0], np.ndarray)
        assert tl.get_backend() == "pytorch"
    assert tl.get_backend() == "numpy"


def test_a_warm_start_is_used_and_left_as_it_was():
    tensor, _ = planted((8, 12, 10), 3, 0.3)
    first = cp(tensor, 3)
    warm = first.cp_tensor
    copies = [warm.weights.copy(), *(f.copy() for f in warm.factors)]
    again = cp(tensor, 3, init=warm, n_restarts=1)
    assert again.n_sweeps < first.n_sweeps
    assert again.error == pytest.approx(first.error, abs=1e-7)
    for a, b in zip(copies, [warm.weights, *warm.factors], strict=True):
        np.testing.assert_array_equal(a, b)
    assert cp(tensor, 3, init=first, n_restarts=1).error == again.error


def test_stopping_early_is_said():
    tensor, _ = planted((8, 12, 10), 4, 1.0)
    fit = cp(tensor, 4, max_iter=1)
    assert not fit.converged
    assert any("Not converged" in n for n in fit.notes)
    assert fit.dataset.attrs["converged"] == 0


def test_fits_settle_on_the_whole_tensor():
    settled = 0
    for seed in range(6):
        tensor = np.random.default_rng(seed).standard_normal((10, 12, 14))
        fit = cp(tensor, 2)
        assert isinstance(fit.n_sweeps, int) and fit.n_sweeps <= 500
        if fit.converged:
            # Where it has settled, going on from there gains nothing.
            again = cp(tensor, 2, init=fit, n_restarts=1)
            assert abs(fit.error - again.error) < 1e-5
        settled += fit.converged
    assert settled == 6


@pytest.mark.parametrize("sweeps", [1, 2, 7, 20])
def test_sweeps_in_all_are_bounded_and_the_remedy_is_named(sweeps):
    tensor = np.random.default_rng(0).standard_normal((10, 12, 14))
    fit = cp(tensor, 3, max_iter=sweeps)
    assert not fit.converged and fit.n_sweeps <= sweeps
    assert any(f"raise max_iter ({sweeps})" in n for n in fit.notes)
    fit = cp(tensor, 3, polish_sweeps=2)
    assert not fit.converged
    assert any("raise polish_sweeps (2)" in n for n in fit.notes)


def test_a_poor_fit_is_said():
    fit = cp(np.random.default_rng(0).standard_normal((10, 20, 30)), 2)
    assert any("explains" in n for n in fit.notes)
    assert fit.explained < 0.19


def test_progress_is_told_stage_by_stage():
    told = []
    cp(planted((6, 7, 8), 2)[0], 2, progress=lambda *a: told.append(a))
    assert [s for s, done, total in told if done == total] == [
        "compress",
        "fit",
        "polish",
        "diagnose",
    ]


def test_an_interrupt_passes_through():
    def stop(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cp(planted((6, 7, 8), 2)[0], 2, progress=stop)


@pytest.mark.parametrize("rank", [2, 4])
def test_nonnegative_components_are_recovered(rank):
    tensor, factors = planted((10, 20, 16), rank, seed=1, nonnegative=True)
    fit = cp(tensor, rank, nonnegative=True)
    assert all((f >= 0).all() for f in fit.factors)
    assert factor_match(fit, factors).min > 0.9999
    assert fit.error < 1e-3


@pytest.mark.parametrize("rank", [2, 4, 6])
def test_nonnegative_no_worse_than_tensorly(rank):
    tensor, _ = planted((8, 20, 20), 4, 0.5, seed=2, nonnegative=True)
    truth = tl.decomposition.non_negative_parafac_hals(tensor, rank, n_iter_max=300)
    fit = cp(tensor, rank, nonnegative=True)
    assert fit.error < relative_error(tensor, tl.cp_to_tensor(truth)) + 1e-5
    assert fit.error == pytest.approx(relative_error(tensor, tl.cp_to_tensor(fit.cp_tensor)))


def test_nonnegative_in_four_modes():
    tensor, factors = planted((4, 6, 8, 9), 3, seed=2, nonnegative=True)
    fit = cp(tensor, 3, nonnegative=True)
    assert factor_match(fit, factors).min > 0.999
