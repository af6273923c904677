"""A tensor that is only seen in slices decomposes like the whole."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from attnlens.decomposition import compress_slices, cp, factor_match, slices, slices_memory
from attnlens.errors import DecompositionError

from .planted import planted, relative_error


@pytest.fixture
def tight(monkeypatch):
    """Hold next to nothing, so that every mode is sketched."""
    monkeypatch.setattr(slices, "_HELD", 10)


def cut(tensor, mode, step):
    return [
        np.take(tensor, range(i, min(i + step, tensor.shape[mode])), mode)
        for i in range(0, tensor.shape[mode], step)
    ]


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("nonnegative", [False, True])
def test_it_agrees_with_the_whole_tensor(tight, mode, nonnegative):
    tensor, factors = planted((24, 60, 40), 3, 0.1, nonnegative=nonnegative)
    packed = compress_slices(cut(tensor, mode, 7), mode=mode, rank=3)
    fit = cp(packed, 3, nonnegative=nonnegative)
    whole = cp(tensor, 3, nonnegative=nonnegative)
    assert factor_match(fit, whole).min > 0.999
    np.testing.assert_allclose(fit.weights, whole.weights, rtol=1e-2)
    model = np.einsum("r,ir,jr,kr", fit.weights, *fit.factors)
    assert fit.error == pytest.approx(relative_error(tensor, model), rel=1e-3)
    assert factor_match(fit, factors).min > 0.99


def test_four_modes_and_names(tight):
    tensor, factors = planted((6, 20, 18, 16), 2)
    blocks = [
        xr.DataArray(b.astype(np.float32), dims=("layer", "head", "pos", "d_model"))
        for b in cut(tensor, 2, 5)
    ]
    fit = cp(compress_slices(lambda: iter(blocks), mode="pos", length=18, rank=2), 2)
    assert fit.dims == ("layer", "head", "pos", "d_model")
    assert factor_match(fit, factors).min > 0.99999


def test_rank_selection_on_compressed_tensors(tight):
    tensor, _ = planted((24, 80, 60), 3, 0.3)
    packed = compress_slices(cut(tensor, 1, 16), mode=1, rank=5)
    scan = cp(packed, "auto", max_rank=5, split=1, n_restarts=4)
    assert scan.selection.chosen == 3
    assert scan.selection.split == "mode_1"


def test_same_seed_same_bytes_and_any_scale(tight):
    tensor, _ = planted((12, 50, 40), 2, 0.3)
    first, second, tiny = (
        compress_slices(cut(scale * tensor, 0, 5), mode=0, rank=2) for scale in (1.0, 1.0, 1e-200)
    )
    assert first.core.numpy().tobytes() == second.core.numpy().tobytes()
    assert cp(tiny, 2).weights == pytest.approx(1e-200 * cp(first, 2).weights)


def test_few_directions_are_filled_not_divided_by_zero(tight):
    fit = cp(compress_slices([np.ones((5, 40, 50))] * 3, mode=0, rank=2), 2)
    assert fit.error < 1e-6
    assert np.isfinite(fit.factors[1]).all()


def test_memory_does_not_grow_with_the_sliced_mode_alone():
    small = slices_memory((144, 8192, 768), rank=12, mode=0)
    assert small < 0.5 * 2**30
    assert slices_memory((288, 8192, 768), rank=12, mode=0) < 2 * small
    assert slices_memory((144, 8192, 768), rank=12, mode=1, block=64) < 2**30


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        (iter([np.ones((1, 2, 3))]), {}, "only once"),
        ([], {}, "no slices"),
        ([np.ones((2, 3))], {}, "3 or 4 modes"),
        ([np.ones((1, 2, 3)), np.ones((1, 2, 4))], {}, "Slice 1 has shape"),
        ([np.ones((1, 2, 3)), np.full((1, 2, 3), np.nan)], {}, "Slice 1 is not finite at mode_0=0"),
        ([np.zeros((1, 2, 3))], {}, "zero"),
        ([np.ones((1, 2, 3))], {"mode": "pos"}, "pos"),
        ([np.ones((1, 2, 3))], {"mode": 3}, "mode=3"),
        ([np.ones((1, 2, 3))], {"rank": 0}, "rank=0"),
        ([np.ones((1, 2, 3))], {"length": 2}, "announced"),
    ],
)
def test_slices_that_make_no_sense(blocks, options, message):
    with pytest.raises(DecompositionError, match=message):
        compress_slices(blocks, **{"mode": 0, "rank": 2, **options})
