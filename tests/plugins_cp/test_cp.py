"""cp on stores whose structure is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attnlens_plugins.cp import CP

import attnlens

from .planted import D_MODEL, HEADS, LAYERS, attention, chance, groups, planted, typed

FAST: dict[str, Any] = {"n_restarts": 4, "n_splits": 2}


def held(analysis: CP, result: Any) -> dict[str, attnlens.Finding]:
    return {f.claim: f for f in analysis.findings(result) if f.holds}


def same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = np.ravel(a), np.ravel(b)
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())


@pytest.fixture(scope="module")
def found() -> tuple[CP, Any]:
    analysis = CP(rank="1..5", **FAST)
    store = planted(noise=0.05, twins=[chance(k) for k in range(3)])
    return analysis, analysis.compute(store)


def test_planted_rank_is_chosen(found: tuple[CP, Any]) -> None:
    _, result = found
    assert result.attrs["rank"] == 3
    assert result.attrs["stable"] == 1
    assert result.attrs["error"] < 0.2
    assert "Rank 3" in result.attrs["reason"]


def test_planted_groups_are_clusters(found: tuple[CP, Any]) -> None:
    analysis, result = found
    assert same_partition(result["cluster"].values, groups())
    claim = held(analysis, result)["head-clusters"]
    assert claim.evidence["clusters"] == 3
    assert claim.evidence["silhouette"] > 0.95


def test_planted_heads_are_redundant(found: tuple[CP, Any]) -> None:
    analysis, result = found
    claim = held(analysis, result)["redundant-heads"]
    assert len(claim.evidence["heads"]) == LAYERS * HEADS
    assert int(result["head_rank"]) == 3
    assert result["head_rank_twin"].values.min() > 3


def test_factors_are_those_planted() -> None:
    result = CP(rank=3, scale="none").compute(planted())
    loadings = result["loadings"].values
    for c in range(3):
        strongest = loadings[..., c]
        own = groups() == groups()[np.unravel_index(np.abs(strongest).argmax(), strongest.shape)]
        assert np.abs(strongest[~own]).max() < 1e-4
        assert np.abs(strongest[own]).min() > 0.05
    assert np.allclose(np.linalg.norm(loadings.reshape(-1, 3), axis=0), 1)
    assert result.attrs["error"] < 1e-4
    assert np.allclose(result["explained"], 1, atol=1e-6)


def test_scaling_the_model_scales_the_weights() -> None:
    one = CP(rank=3, scale="none").compute(planted())
    store = planted()
    z, w_o = store["z"].values, store.weights["W_O"].values
    two = CP(rank=3, scale="none").compute(
        attnlens.Store.from_arrays(z=10 * z, weights={"W_O": w_o})
    )
    np.testing.assert_allclose(two["weights"], 10 * one["weights"], rtol=1e-4)


@pytest.mark.parametrize("tensor", ["result", "second_moment"])
def test_gauge_changes_leave_it_unchanged(tensor: str) -> None:
    analysis = CP(rank=3, tensor=tensor, scale="none")
    plain, changed = (analysis.compute(planted(gauge=g)) for g in (False, True))
    np.testing.assert_allclose(changed["weights"], plain["weights"], rtol=1e-4)
    np.testing.assert_allclose(np.abs(changed["loadings"]), np.abs(plain["loadings"]), atol=1e-3)


def test_gauge_changes_z() -> None:
    analysis = CP(rank=3, tensor="z")
    plain, changed = (analysis.compute(planted(gauge=g)) for g in (False, True))
    assert not np.allclose(changed["weights"], plain["weights"], rtol=0.01)
    assert any("arbitrary" in note for note in plain.attrs["notes"])


def test_permuting_heads_permutes_loadings() -> None:
    order = [3, 0, 5, 1, 4, 2]
    analysis = CP(rank=3)
    plain = analysis.compute(planted(noise=0.2))
    moved = analysis.compute(planted(noise=0.2, order=order))
    np.testing.assert_allclose(
        np.abs(moved["loadings"].values), np.abs(plain["loadings"].values[:, order]), atol=1e-3
    )
    assert same_partition(moved["group"].values, plain["group"].values[:, order])
    np.testing.assert_allclose(
        moved["rebuild_error"].values, plain["rebuild_error"].values[:, order], atol=1e-6
    )


def test_same_seed_same_bytes() -> None:
    results = [CP(rank="1..3", **FAST).compute(planted(noise=0.3)) for _ in range(2)]
    assert results[0].drop_attrs().equals(results[1].drop_attrs())


def test_duplicated_heads_are_counted_once() -> None:
    rng = np.random.default_rng(0)
    z = rng.standard_normal((4, 1, 10, 3, 4))
    w_o = rng.standard_normal((1, 3, 4, 16))
    twice = [0, 1, 2, 0, 1]
    scale = np.array([1, 1, 1, -3.0, 0.01])
    store = attnlens.Store.from_arrays(
        z=z[:, :, :, twice], weights={"W_O": w_o[:, twice] * scale[:, None, None]}
    )
    result = CP(rank=2).compute(store)
    assert int(result["head_rank"]) == 3
    error = result["rebuild_error"].values[0]
    assert error[[0, 1, 3, 4]].max() < 1e-4
    assert error[2] > 0.5


def test_known_types_of_heads() -> None:
    kinds = ["previous", "sink", "duplicate", "induction", "uniform", "uniform"]
    twins = [typed(["uniform"] * len(kinds), seed=k) for k in range(1, 4)]
    analysis = CP(rank=1)
    result = analysis.compute(typed(kinds, twins=twins))
    claims = held(analysis, result)
    for claim, head in (
        ("previous-token-heads", "0.0"),
        ("sink-heads", "0.1"),
        ("duplicate-token-heads", "0.2"),
        ("induction-heads", "0.3"),
    ):
        assert head in claims[claim].evidence["heads"], claim
    assert claims["previous-token-heads"].evidence["heads"] == ["0.0"]
    assert claims["induction-heads"].evidence["heads"] == ["0.3"]
    assert result["previous_token"].values[0, 0] == pytest.approx(1)
    # All rows but the first, which has no choice.
    assert result["sink"].values[0, 1] == pytest.approx(1)
    assert result["induction"].values[0, 3] > 0.95


def test_chance_yields_no_claim() -> None:
    analysis = CP(rank="1..5", **FAST)
    for seed in range(2):
        twins = [chance(100 + 10 * seed + k) for k in range(3)]
        z, w_o = chance(seed)["z"].values, chance(seed).weights["W_O"].values
        store = attnlens.Store.from_arrays(z=z, weights={"W_O": w_o}, twins=twins)
        result = analysis.compute(store)
        assert not held(analysis, result)
        assert (result["cluster"] == -1).all()


def test_patterns_are_decomposed_without_negative_numbers() -> None:
    kinds = ["previous", "uniform", "previous", "uniform", "previous", "uniform"]
    one = np.stack([attention(k, 12) for k in kinds])
    rng = np.random.default_rng(0)
    pattern = one * rng.uniform(0.8, 1.2, (6, 1, *one.shape))
    pattern = (pattern / pattern.sum(-1, keepdims=True))[:, :, :]
    store = attnlens.Store.from_arrays(pattern=pattern, weights={"W_O": np.ones((1, 6, 2, 4))})
    result = CP(tensor="pattern", rank=2, n_restarts=4).compute(store)
    assert (result["loadings"] >= 0).all()
    assert (result["factor_query_pos"] >= 0).all() and (result["factor_key_pos"] >= 0).all()
    assert result["key_pos"].values[0] == 1  # the first position was left out
    assert same_partition(result["group"].values, np.array([0, 1, 0, 1, 0, 1]))


@pytest.mark.parametrize("tensor", ["qk", "ov"])
def test_weights_alone(tensor: str) -> None:
    rng = np.random.default_rng(1)
    weights = {
        "W_Q": rng.standard_normal((2, 4, 12, 3)),
        "W_K": rng.standard_normal((2, 2, 12, 3)),
        "W_V": rng.standard_normal((2, 2, 12, 3)),
        "W_O": rng.standard_normal((2, 4, 3, 12)),
    }
    store = attnlens.Store.from_arrays(
        z=np.zeros((1, 2, 3, 4, 3)), weights=weights, tokens=[[0, 1, 2]]
    )
    result = CP(tensor=tensor, rank=2).compute(store)
    # Query heads 0 and 1 share a key-value head.
    k, o = np.repeat(weights["W_K"], 2, 1), weights["W_O"]
    product = (
        weights["W_Q"] @ np.swapaxes(k, -1, -2)
        if tensor == "qk"
        else np.repeat(weights["W_V"], 2, 1) @ o
    )
    np.testing.assert_allclose(
        result["norm"].values, np.linalg.norm(product, axis=(-2, -1)), rtol=1e-5
    )
    np.testing.assert_allclose(result["explained"].sum() / 8, 1 - result.attrs["error"] ** 2)


def test_layers_alone_and_jointly() -> None:
    each = CP(rank=3, layers="each").compute(planted())
    assert each["weights"].dims == ("part", "component")
    assert each["factor_d_model"].sizes == {"part": LAYERS, "d_model": D_MODEL, "component": 3}
    assert each.attrs["error"] < 1e-4
    joint = CP(rank=3, layers="joint").compute(planted())
    assert joint["loadings"].sizes == {"layer": LAYERS, "head": HEADS, "component": 3}
    assert any("Head numbers" in note for note in joint.attrs["notes"])


def test_pooled_tokens() -> None:
    result = CP(rank=2, tokens="pooled").compute(planted())
    assert result["prompt_loadings"].dims == ("prompt", "component")


def test_tokens_are_limited_by_the_seed() -> None:
    result = CP(rank=2, max_tokens=40).compute(planted())
    assert result.sizes["token"] <= 40
    assert result.attrs["tokens_left_out"] == 8 * 11 - result.sizes["token"]
    assert (result["token_pos"] > 0).all()


def test_words_are_the_directions_in_the_vocabulary() -> None:
    store = planted()
    result = CP(rank=3, vocabulary=4).compute(store)
    u = store.weights["W_U"].values
    logits = (u - u.mean(1, keepdims=True)).T @ result["factor_d_model"].values
    for c in range(3):
        best = np.argsort(-logits[:, c])[:4]
        words = result["words_d_model"].isel(component=c).sel(end="top").values
        assert list(words) == [f" w{i}" for i in best]


def test_centring_takes_the_mean_of_each_head_away() -> None:
    store = planted(noise=0.1)
    shift = np.random.default_rng(3).standard_normal((LAYERS, HEADS, D_MODEL))
    moved = attnlens.Store.from_arrays(
        result=store["result"].values + shift[:, None], weights={"W_O": store.weights["W_O"].values}
    )
    analysis = CP(rank=3, center=True)
    plain, other = analysis.compute(store), analysis.compute(moved)
    np.testing.assert_allclose(other["weights"], plain["weights"], rtol=1e-4)
    np.testing.assert_allclose(other["rebuild_error"], plain["rebuild_error"], rtol=1e-4)


def test_signs_are_fixed_in_the_tensors_own_space() -> None:
    result = CP(rank=3).compute(planted(noise=0.2))
    for values in (result["loadings"].values.reshape(-1, 3), result["token_loadings"].values):
        assert (values[np.abs(values).argmax(0), np.arange(3)] > 0).all()
