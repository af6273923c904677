"""spectrum: closed forms, planted structure, and nothing claimed of random models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from attnlens_plugins.spectrum import Spectrum
from attnlens_plugins.spectrum.claims import MEASURES, WEIGHTS
from attnlens_plugins.spectrum.measures import (
    causal_uniform,
    collapse,
    effective_rank,
    energy,
    grid,
    score_rank,
    stable_rank,
    tail_exponent,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import attnlens
from attnlens.testing import compute, make_store
from tests.modelzoo import tiny


@pytest.mark.attnlens(analysis=Spectrum)
def test_it_keeps_what_analyses_promise(attnlens_check) -> None:
    attnlens_check()


SPECTRA = hnp.arrays(np.float64, st.integers(1, 20), elements=st.floats(0, 100))


@given(SPECTRA)
def test_ranks_are_between_one_and_the_number_of_values(values: np.ndarray) -> None:
    sigma = np.sort(values)[::-1]
    alive = (sigma > 0).sum()
    if alive == 0:
        assert effective_rank(sigma) == 0 == stable_rank(sigma)
        return
    if sigma[0] > 1e-100:
        assert 1 - 1e-9 <= stable_rank(sigma) <= alive + 1e-9
        assert 1 - 1e-9 <= effective_rank(sigma) <= alive + 1e-9
        assert stable_rank(sigma) <= effective_rank(sigma) ** 2 + 1e-9


@given(st.integers(1, 40), st.floats(0.1, 10))
def test_equal_values_give_full_rank(n: int, value: float) -> None:
    sigma = np.full(n, value)
    assert effective_rank(sigma) == pytest.approx(n)
    assert stable_rank(sigma) == pytest.approx(n)
    np.testing.assert_allclose(energy(sigma, 2), np.arange(1, n + 1) / n)


@given(st.integers(2, 60))
def test_causal_uniform_has_its_closed_forms(n: int) -> None:
    known = causal_uniform(n)
    matrix = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    sigma = np.linalg.svd(matrix, compute_uv=False)
    assert known["entropy"] == pytest.approx(sum(np.log(np.arange(1, n + 1))) / n)
    assert (sigma**2).sum() == pytest.approx((1 / np.arange(1, n + 1)).sum())
    assert known["stable_rank"] == pytest.approx((sigma**2).sum() / sigma[0] ** 2)
    assert known["sink"] == pytest.approx(matrix[1:, 0].mean())
    assert known["sink_share"] == pytest.approx((matrix[:, 0] ** 2).sum() / (matrix**2).sum())


def test_causal_uniform_of_512_has_nine_tenths_of_its_sigma_in_128() -> None:
    matrix = np.tril(np.ones((512, 512))) / np.arange(1, 513)[:, None]
    share = energy(np.linalg.svd(matrix, compute_uv=False), 1)[127]
    assert share == pytest.approx(0.89, abs=0.005)


@settings(max_examples=20)
@given(st.floats(1.5, 4.0), st.integers(0, 20))
def test_the_exponent_of_a_planted_tail_is_found(alpha: float, seed: int) -> None:
    uniform = np.random.default_rng(seed).uniform(size=1500)
    sample = (1 - uniform) ** (-1 / (alpha - 1))
    fitted, distance = tail_exponent(sample)
    assert fitted == pytest.approx(alpha, rel=0.2)
    assert distance < 0.08


def test_no_tail_is_fitted_where_there_is_none() -> None:
    for values in (np.ones(50), np.zeros(50), np.arange(1, 5.0), np.array([])):
        assert np.isnan(tail_exponent(values)).all()
    assert np.isnan(tail_exponent(np.full(20, np.nan))).all()


@given(st.integers(0, 1000))
def test_the_scores_rank_is_that_of_the_dense_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 1, 9, 2, 3))
    for head in range(2):
        dense = q[0, :, head] @ k[0, :, head].T
        expected = effective_rank(np.linalg.svd(dense, compute_uv=False)[:3])
        assert score_rank(q, k)[0, head] == pytest.approx(expected, rel=1e-6)


def test_collapse_is_zero_at_rank_one_and_one_for_orthogonal_tokens() -> None:
    same = np.tile(np.arange(1.0, 6), (1, 4, 1))
    mean_residual, rank_one = collapse(same)
    assert mean_residual[0] == pytest.approx(0, abs=1e-12)
    assert rank_one[0] == pytest.approx(0, abs=1e-6)
    multiples = same * np.array([1.0, -2, 3, 4])[None, :, None]
    mean_residual, rank_one = collapse(multiples)
    assert mean_residual[0] > 0.5
    assert rank_one[0] == pytest.approx(0, abs=1e-6)
    _, rank_one = collapse(np.eye(4)[None])
    assert rank_one[0] == pytest.approx(np.sqrt(3 / 4))


@given(st.integers(1, 5000))
def test_the_grid_rises_to_n(n: int) -> None:
    ks = grid(n)
    assert ks == sorted(set(ks))
    assert (ks[0], ks[-1]) == (1, n)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # sigma = (1, ..., 1)
        ("identity", {"effective_rank": 12, "stable_rank": 12, "entropy": 0, "gap": 0}),
        # sigma = (sqrt 2, 1, ..., 1, 0)
        ("previous-token", {"stable_rank": 12 / 2, "entropy": 0, "gap": 1 - 1 / np.sqrt(2)}),
        ("uniform", {k: v for k, v in causal_uniform(12).items() if k != "curve"}),
    ],
)
def test_closed_forms_come_out_of_the_whole_analysis(kind: str, expected: dict) -> None:
    result = compute(Spectrum(of="activations"), make_store(kind, dtype=np.float32))
    for name, value in expected.items():
        np.testing.assert_allclose(result[name].values, value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_constructed_heads_are_claimed_against_twins() -> None:
    sharp = compute(Spectrum(), make_store("identity", n_heads=6, length=24))
    made = {f.claim for f in Spectrum().findings(sharp) if f.holds}
    assert {"focused-heads", "high-rank-heads"} <= made


def test_a_sink_is_found() -> None:
    store = make_store("random", length=16, n_heads=4)
    pattern = store["pattern"].values.copy()
    sink = np.zeros((16, 16))
    sink[:, 0] = 1.0
    pattern[:, 1, 2] = 0.95 * sink + 0.05 * pattern[:, 1, 2]
    planted = attnlens.Store.from_arrays(
        pattern=pattern,
        twins=store.twins,
        tokens=store.tokens.values,
    )
    analysis = Spectrum(of="activations")
    result = compute(analysis, planted)
    finding = next(f for f in analysis.findings(result) if f.claim == "sink-heads")
    assert finding.holds
    assert finding.evidence["heads"] == ["1.2"]


def test_findings_state_the_threshold_of_each_layer() -> None:
    rank = xr.DataArray([[20.0, 3.0], [60.0, 61.0]], dims=("layer", "head"))
    twins = xr.DataArray(
        [[[3.0, 3.1], [30.0, 30.1]], [[3.0, 3.2], [30.0, 30.2]], [[3.1, 3.0], [30.1, 30.0]]],
        dims=("twin", "layer", "head"),
    )
    places = {"layer": [0, 1], "head": [0, 1]}
    result = xr.Dataset({"effective_rank": rank, "effective_rank_twin": twins}, coords=places)
    high = next(f for f in Spectrum().findings(result) if f.claim == "high-rank-heads")
    low = next(f for f in Spectrum().findings(result) if f.claim == "low-rank-heads")
    first, second = high.null["threshold"].values()
    assert 3.2 < first < 20 and 30.2 < second < 60
    assert high.evidence["heads"] == [
        f"{i}.{j}" for i, j in ((1, 1), (1, 0), (0, 0)) if rank[i, j] > (first, second)[i]
    ]
    for layer, threshold in enumerate((first, second)):
        least = float(rank[layer].where(rank[layer] > threshold).min())
        assert f"{least:.1f}" in high.text and f"(threshold {threshold:.1f})" in high.text
    assert "the lowest is 3.0" in low.text and "threshold" in low.null


@pytest.mark.parametrize(("last", "holds"), [(0.1, True), (0.7, False)])
def test_rank_collapse_can_be_claimed_with_the_usual_three_twins(last: float, holds: bool) -> None:
    twins = [[0.965, 0.910, 0.717], [0.963, 0.905, 0.703], [0.966, 0.919, 0.752]]
    result = xr.Dataset(
        {
            "rank_one_residual": ("layer", [0.9, 0.5, last]),
            "rank_one_residual_twin": (("twin", "layer"), twins),
        },
        coords={"layer": [0, 1, 2]},
    )
    found = next(f for f in Spectrum().findings(result) if f.claim == "rank-collapse")
    assert found.holds is holds
    assert 0.1 < found.null["threshold"] < 0.7


def test_no_finding_rounds_its_threshold_to_what_twins_have_at_most() -> None:
    store = make_store("random", length=16, n_heads=4)
    for finding in Spectrum(of="activations").findings(compute(Spectrum(of="activations"), store)):
        assert "100% to 100%" not in finding.text
        assert "threshold" in finding.text and "threshold" in finding.null


def test_a_prompt_of_one_token_says_nothing_about_attention() -> None:
    short = make_store("random", length=1)
    result = compute(Spectrum(), short)
    assert "sink" not in result and "effective_rank" not in result
    assert np.isfinite(result["qk_effective_rank"]).all()
    found = {f.claim: f for f in Spectrum().findings(result)}
    for claim in ("sink-heads", "focused-heads", "high-rank-heads", "rank-collapse"):
        assert not found[claim].holds and "a single token" in found[claim].text
    with pytest.raises(attnlens.Skip, match="a single token"):
        Spectrum().draw("sink_grid", result)
    with pytest.raises(attnlens.Skip, match="a single token"):
        compute(Spectrum(of="activations"), short)


def test_prompts_of_one_token_leave_the_means_of_the_others_alone(tmp_path: Path) -> None:
    folder = tiny("gpt2", tmp_path / "m")
    long = [1, 2, 3, 4, 5]
    alone, mixed = (
        attnlens.run(folder, [Spectrum], corpus=corpus, out=tmp_path / str(len(corpus)), twins=0)
        for corpus in ([long], [[7], long])
    )
    for name in ("sink", "gap", "entropy_share", "energy_sigma"):
        np.testing.assert_allclose(mixed["spectrum"][name], alone["spectrum"][name], rtol=1e-5)
    assert any("1 of 2" in note for note in mixed.record["analyses"][0]["notes"])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("seed", range(8))
def test_a_random_model_yields_no_claim(family: str, seed: int, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.modelzoo import config

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family)).eval()
    tokens = np.random.default_rng(seed).integers(0, 50, (6, 16))
    run = attnlens.run(model, [Spectrum], corpus=tokens, out=tmp_path, seed=seed)
    assert not run.errors
    assert [f.text for f in run.findings if f.holds] == []


def test_half_precision_gives_the_same_to_a_hundredth(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path / "m")
    tokens = np.random.default_rng(0).integers(0, 50, (4, 16))
    results = [
        attnlens.run(folder, [Spectrum], corpus=tokens, out=tmp_path / d, dtype=d, twins=0)
        for d in ("float32", "float16", "bfloat16")
    ]
    for other in results[1:]:
        assert not other.errors
        for name in (*MEASURES, *WEIGHTS):
            np.testing.assert_allclose(
                other["spectrum"][name],
                results[0]["spectrum"][name],
                rtol=1e-2,
                atol=1e-2,
                err_msg=name,
            )


def test_weights_alone_need_no_prompts() -> None:
    analysis = Spectrum(of="weights")
    assert set(analysis.requires) == {"weights", "twin"}
    store = make_store()
    result = compute(analysis, store)
    w = store.weights
    dense = w["W_Q"].values[1, 2].astype(float) @ w["W_K"].values[1, 2].astype(float).T
    expected = effective_rank(np.linalg.svd(dense, compute_uv=False)[:4])
    assert float(result["qk_effective_rank"][1, 2]) == pytest.approx(expected, rel=1e-6)


def test_a_change_of_basis_leaves_the_weights_ranks_alone() -> None:
    store = make_store()
    weights = {n: v.values.astype(np.float64) for n, v in store.weights.data_vars.items()}
    mix = np.random.default_rng(0).standard_normal((4, 4)) + 3 * np.eye(4)
    changed = weights | {
        "W_V": weights["W_V"] @ mix,
        "W_O": np.linalg.inv(mix) @ weights["W_O"],
        "W_Q": weights["W_Q"] @ mix,
        "W_K": weights["W_K"] @ np.linalg.inv(mix).T,
    }
    results = [
        compute(Spectrum(of="weights"), attnlens.Store.from_arrays(
            pattern=store["pattern"].values, weights=w, twins=store.twins))
        for w in (weights, changed)
    ]  # fmt: skip
    for name in ("qk_effective_rank", "ov_effective_rank", "ov_stable_rank"):
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-4)
