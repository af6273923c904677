"""Tucker against tensorly and the definition of the normal form."""

from __future__ import annotations

import numpy as np
import pytest
import tensorly as tl
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.decomposition import tucker
from attnlens.errors import DecompositionError

from .planted import planted, relative_error


def decaying(shape, seed=0):
    """A tensor whose unfoldings' singular values fall off slowly."""
    rng = np.random.default_rng(seed)
    tensor, _ = planted(shape, 12, 0.2, seed)
    for k, n in enumerate(shape):
        mix = np.linalg.qr(rng.standard_normal((n, n)))[0] * np.arange(1, n + 1) ** -0.5
        tensor = np.moveaxis(np.tensordot(mix, tensor, (1, k)), 0, k)
    return tensor


@pytest.mark.parametrize("ranks", [(3, 4, 5), 4, (2, 10, 3), (1, 1, 1)])
def test_no_worse_than_tensorly(ranks):
    tensor = decaying((8, 12, 10))
    fit = tucker(tensor, ranks)
    asked = [ranks] * 3 if isinstance(ranks, int) else list(ranks)
    truth = tl.decomposition.tucker(tensor, asked, n_iter_max=200, tol=1e-9)
    assert fit.ranks == tuple(asked)
    assert fit.error <= relative_error(tensor, tl.tucker_to_tensor(truth)) + 1e-5
    assert fit.error == pytest.approx(
        relative_error(tensor, tl.tucker_to_tensor(fit.tucker_tensor))
    )


def test_iteration_improves_on_the_hosvd():
    tensor = decaying((8, 12, 10))
    assert tucker(tensor, 3).error < tucker(tensor, 3, n_sweeps=0).error


@pytest.mark.parametrize("ranks", [(3, 4, 5), None, 0.9, {"mode_1": 4}])
def test_the_core_is_in_normal_form(ranks):
    fit = tucker(decaying((8, 12, 10)), ranks)
    for k, factor in enumerate(fit.factors):
        flat = np.moveaxis(fit.core, k, 0).reshape(fit.core.shape[k], -1)
        inner = flat @ flat.T
        if factor is None:
            continue
        scale = np.trace(inner)
        np.testing.assert_allclose(factor.T @ factor, np.eye(factor.shape[1]), atol=1e-10)
        np.testing.assert_allclose(inner - np.diag(np.diag(inner)), 0, atol=1e-10 * scale)
        assert (np.diff(np.diag(inner)) <= 1e-10 * scale).all()
        assert (factor[np.abs(factor).argmax(0), range(factor.shape[1])] > 0).all()


def test_planted_multilinear_ranks_by_energy():
    tensor, _ = planted((12, 20, 16), 3)
    fit = tucker(tensor, 1 - 1e-9)
    assert fit.ranks == (3, 3, 3)
    assert fit.error < 1e-4
    share = fit.spectra["mode_0"]
    assert share.sum() == pytest.approx(1)
    truth = np.linalg.svd(tensor.reshape(12, -1), compute_uv=False) ** 2
    np.testing.assert_allclose(share, truth / truth.sum(), atol=1e-12)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
def test_energy_share_takes_the_fewest_directions(share):
    tensor = decaying((8, 12, 10))
    fit = tucker(tensor, share)
    for k, rank in enumerate(fit.ranks):
        energy = np.linalg.svd(np.moveaxis(tensor, k, 0).reshape(tensor.shape[k], -1))[1] ** 2
        curve = np.cumsum(energy) / energy.sum()
        assert curve[rank - 1] >= share
        assert rank == 1 or curve[rank - 2] < share


def test_duplicated_heads_count_once():
    rng = np.random.default_rng(0)
    distinct = rng.standard_normal((4, 20, 16))
    tensor = distinct[[0, 1, 2, 3, 0, 1, 2, 3]] * rng.uniform(0.5, 2, (8, 1, 1))
    assert tucker(tensor, 0.999999999).ranks[0] == 4


@pytest.mark.parametrize("ranks", [None, "all"])
def test_all_directions_reproduce_the_tensor(ranks):
    tensor = decaying((8, 12, 10))
    fit = tucker(tensor, ranks)
    assert fit.error < 1e-12
    assert fit.ranks == (8, 12, 10)
    # A mode longer than all the others together has no more directions than they do.
    assert tucker(np.random.default_rng(0).standard_normal((50, 2, 3)), ranks).ranks == (6, 2, 3)


def test_partial_tucker_leaves_modes_whole():
    tensor = xr.DataArray(decaying((8, 12, 10)), dims=("head", "pos", "d_model"))
    fit = tucker(tensor, {"head": 3, "d_model": 0.9})
    assert fit.factors[1] is None
    assert fit.dataset["core"].dims == ("head_component", "pos", "d_model_component")
    assert fit.ranks[:2] == (3, 12)
    model = tl.tucker_to_tensor(fit.tucker_tensor)
    assert relative_error(tensor.values, model) == pytest.approx(fit.error)
    alone = tucker(tensor, {"head": 3})
    tail = np.linalg.svd(tensor.values.reshape(8, -1), compute_uv=False) ** 2
    assert alone.error**2 == pytest.approx(tail[3:].sum() / tail.sum())


def test_modes_may_be_given_by_number():
    tensor = decaying((8, 12, 10))
    by_number, by_name = tucker(tensor, {1: 4, -1: 2}), tucker(tensor, {"mode_1": 4, "mode_2": 2})
    np.testing.assert_array_equal(by_number.core, by_name.core)
    with pytest.raises(DecompositionError, match="twice"):
        tucker(tensor, {1: 4, "mode_1": 4})


def test_it_goes_on_until_the_error_settles():
    for seed in range(6):
        tensor = np.random.default_rng(seed).standard_normal((10, 12, 14))
        fit = tucker(tensor, 2)
        assert fit.converged and not fit.notes
        more = tucker(tensor, 2, n_sweeps=fit.n_sweeps - 1)
        assert not more.converged and more.error > fit.error
        assert f"raise n_sweeps ({fit.n_sweeps - 1})" in more.notes[0]


def test_interactions_are_ranked_with_their_share():
    tensor = xr.DataArray(decaying((8, 12, 10)), dims=("head", "pos", "d_model"))
    fit = tucker(tensor, None)
    found = fit.interactions(5)
    energy = np.linalg.norm(tensor) ** 2
    assert [abs(i.value) for i in found] == sorted((abs(i.value) for i in found), reverse=True)
    assert abs(found[0].value) == np.abs(fit.core).max()
    for item in found:
        assert item.share == pytest.approx(item.value**2 / energy)
        assert fit.core[tuple(item.index.values())] == item.value
    assert sum(i.share for i in fit.interactions(10**6)) == pytest.approx(1)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2), st.integers(0, 10**6), st.sampled_from([1e-30, 1.0, 1e30]))
def test_permuting_and_scaling(mode, seed, scale):
    tensor = decaying((6, 8, 7))
    order = np.random.default_rng(seed).permutation(tensor.shape[mode])
    a, b = tucker(tensor, (3, 4, 2)), tucker(scale * np.take(tensor, order, mode), (3, 4, 2))
    np.testing.assert_allclose(b.core / scale, a.core, atol=1e-4 * np.abs(a.core).max())
    np.testing.assert_allclose(b.factors[mode], a.factors[mode][order], atol=1e-4)


def test_same_bytes_and_every_kind_of_input():
    tensor = decaying((6, 8, 7))
    a = tucker(tensor, 3)
    for other in (tensor, torch.from_numpy(tensor), xr.DataArray(tensor)):
        b = tucker(other, 3)
        assert a.core.tobytes() == b.core.tobytes()
    half = tucker(torch.from_numpy(tensor).half(), 3)
    assert half.error == pytest.approx(a.error, abs=1e-3)
    assert half.core.dtype == np.float64
    assert tucker((100 * tensor).astype(int), 3).error == pytest.approx(a.error, abs=0.02)


def test_a_rank_above_what_the_tensor_has_keeps_its_shape():
    fit = tucker(np.ones((3, 4, 5)), 2)
    assert fit.ranks == (2, 2, 2)
    assert fit.error < 1e-12
    np.testing.assert_allclose(fit.factors[1].T @ fit.factors[1], np.eye(2), atol=1e-12)
    capped = tucker(np.random.default_rng(0).standard_normal((12, 5, 7)), 6)
    assert capped.ranks == (6, 5, 6)
    assert "capped" in capped.notes[0]


def test_the_dataset_survives_a_store(tmp_path):
    tensor = xr.DataArray(decaying((4, 6, 5)), dims=("head", "pos", "d_model"))
    data = tucker(tensor, 0.9).dataset
    data.to_zarr(tmp_path / "fit.zarr", consolidated=False, zarr_format=3)
    again = xr.open_zarr(tmp_path / "fit.zarr", consolidated=False)
    np.testing.assert_array_equal(again["core"], data["core"])
    assert again.attrs["ranks"] == data.attrs["ranks"]
