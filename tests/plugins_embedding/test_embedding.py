"""embedding: checked before, seeded, and honest about its maps."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from attnlens_plugins.embedding import Embedding, drawing, maps, scores, vectors

import attnlens
from tests.plugins_cp.planted import attention, planted, typed

KINDS = ["previous"] * 4 + ["uniform"] * 4 + ["sink"] * 4


def store_of(kinds: list[str], *, seed: int = 0, noise: float = 0.05) -> attnlens.Store:
    """Make a store of two layers whose heads attend like `kinds`, more or less."""
    rng = np.random.default_rng(seed)
    one = np.stack([attention(k, 12) for k in kinds])
    pattern = one * (1 - noise) + noise * attention("uniform", 12) * rng.random((len(kinds), 1, 1))
    pattern /= pattern.sum(-1, keepdims=True)
    shaped = pattern.reshape(2, -1, 12, 12)[None].repeat(2, 0)
    return attnlens.Store.from_arrays(pattern=shaped)


def test_same_seed_same_picture() -> None:
    one, two = (Embedding().compute(store_of(KINDS)) for _ in range(2))
    np.testing.assert_array_equal(one["tsne"], two["tsne"])
    assert np.isfinite(one["tsne"]).all()


def test_groups_of_heads_are_neighbours() -> None:
    result = Embedding().compute(store_of(KINDS))
    kinds = np.repeat([0, 1, 2], 4)
    for space in ("pca", "tsne"):
        assert scores.purity(result[space].values, kinds) > scores.chance_purity(kinds) + 0.2
    assert (result["trustworthiness"] > 0.7).all()
    assert (result["trustworthiness"] <= 1).all()


def test_perplexity_is_fitted_and_said() -> None:
    with pytest.warns(UserWarning, match=r"Perplexity 3\.67: 12 heads"):
        result = Embedding().compute(store_of(KINDS))
    assert "Perplexity 3.67" in result.attrs["notes"][0]
    assert maps.fitted_perplexity(30, 1000) == 30
    assert maps.fitted_neighbors(15, 12) == 11
    assert maps.fitted_neighbors(15, 4) == 3


@pytest.mark.parametrize("n", [1, 2, 3])
def test_too_few_points_are_skipped(n: int) -> None:
    with pytest.raises(attnlens.Skip, match=f"{n} heads"):
        maps.check(np.random.default_rng(0).random((n, 3)), "heads")


def test_constant_points_are_skipped_before_tsne() -> None:
    for values in (np.ones((30, 5)), np.zeros((30, 5)), np.full((8, 2), 1e9) + 1e-7):
        with pytest.raises(attnlens.Skip, match="same"):
            maps.check(values, "heads")
    few = np.repeat(np.eye(3), 10, axis=0)
    with pytest.raises(attnlens.Skip, match="only 3 of 30"):
        maps.check(few, "heads")
    with pytest.raises(attnlens.Skip, match="same"):
        Embedding().compute(store_of(["uniform"] * 12, noise=0.0))


def test_identical_points_among_others_have_places() -> None:
    values = np.vstack([np.random.default_rng(0).random((6, 4)), np.ones((6, 4))])
    maps.check(values, "heads")
    assert np.isfinite(maps.tsne(values, perplexity=3, seed=0)).all()


def test_a_skip_costs_no_other_analysis(tmp_path: Any) -> None:
    run = attnlens.analyze(
        store_of(["uniform"] * 12, noise=0.0), [Embedding()], out=tmp_path / "run"
    )
    entry = run.record["analyses"][0]
    assert entry["status"] in ("skipped", "failed")


def test_umap_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys; import attnlens; from attnlens_plugins.embedding import Embedding;"
        "Embedding(); Embedding(method='umap');"
        "assert not {'umap', 'numba', 'sklearn', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_umap_places_few_points_twice_alike() -> None:
    values = np.random.default_rng(0).standard_normal((6, 4))
    one, _ = maps.umap(values, neighbors=5, seed=0)
    two, _ = maps.umap(values, neighbors=5, seed=0)
    np.testing.assert_array_equal(one, two)
    assert np.isfinite(one).all()


def test_umap_of_far_clusters_is_finite_or_says_so() -> None:
    rng = np.random.default_rng(0)
    far = np.vstack([rng.random((12, 3)), 1e6 + rng.random((12, 3)), [[1e9, 0, 0]]])
    places, notes = maps.umap(far, neighbors=5, seed=0)
    assert np.isfinite(places).all() or any("without a place" in n for n in notes)


def test_pca_is_the_svd() -> None:
    values = np.random.default_rng(0).standard_normal((20, 5))
    places, share = maps.pca(values)
    centred = values - values.mean(0)
    sigma = np.linalg.svd(centred, compute_uv=False)
    np.testing.assert_allclose(np.linalg.norm(places, axis=0), sigma[:2])
    np.testing.assert_allclose(share, sigma[:2] ** 2 / (sigma**2).sum())
    assert (places[np.abs(places).argmax(0), [0, 1]] > 0).all()


def test_purity_counts_neighbours() -> None:
    line = np.arange(6.0)[:, None]
    assert scores.purity(line, np.array([0, 0, 0, 1, 1, 1])) == pytest.approx(5 / 6)
    assert np.isnan(scores.purity(line, np.zeros(6)))
    assert scores.chance_purity(np.array([0, 0, 0, 1, 1, 1])) == pytest.approx(0.4)


def test_outputs_lie_at_distances_of_their_cosines() -> None:
    store = planted()
    points = vectors.of_outputs(store, most=10_000, seed=0)
    result = store["result"].values[:, :, 1:]
    rows = np.moveaxis(result, (1, 3), (0, 1)).reshape(12, -1)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    squared = ((points.values[:, None] - points.values[None]) ** 2).sum(-1)
    np.testing.assert_allclose(squared, 2 - 2 * rows @ rows.T, atol=1e-5)


def test_of_cp(tmp_path: Any) -> None:
    run = attnlens.analyze(
        store_with_attention(planted(noise=0.3)),
        [Embedding(of="features", color="cluster"), "cp"],
        options={"cp": {"rank": 5, "n_restarts": 2, "n_splits": 1}},
        out=tmp_path / "run",
    )
    assert not run.errors
    result = run["embedding"]
    assert result.sizes["point"] == 5
    assert "label_cluster" in result
    assert {"embedding.maps", "embedding.trust"} <= set(run.figures)
    points = vectors.of_loadings(run["cp"])
    assert points.values.shape == (12, 5)
    np.testing.assert_allclose(np.linalg.norm(points.values, axis=1), 1)


def store_with_attention(store: Any) -> attnlens.Store:
    """Add what cp and embedding read beside ``result``."""
    rng = np.random.default_rng(0)

    def one(twin: bool = False) -> attnlens.Store:
        pattern = rng.random((8, 2, 6, 12, 12)) * np.tril(np.ones((12, 12)))
        pattern /= pattern.sum(-1, keepdims=True)
        repeated = attnlens.Store.from_arrays(pattern=pattern, period=5)
        written = rng.standard_normal(store["result"].shape) if twin else store["result"].values
        return attnlens.Store.from_arrays(
            tokens=store.tokens.values,
            result=written,
            pattern=pattern,
            weights={"W_O": store.weights["W_O"].values},
            corpora={"repeated-random": repeated},
            twins=() if twin else (one(twin=True),),
        )

    return one()


def test_no_claim_without_twins_or_structure() -> None:
    analysis = Embedding()
    twins = [store_of(KINDS, seed=k) for k in range(1, 4)]
    store = attnlens.Store.from_arrays(pattern=store_of(KINDS)["pattern"].values, twins=twins)
    assert not [f for f in analysis.findings(analysis.compute(store)) if f.holds]
    layered = ["previous"] * 6 + ["sink"] * 6
    mixed = ["previous", "sink"] * 6
    store = attnlens.Store.from_arrays(
        pattern=store_of(layered)["pattern"].values,
        twins=[store_of(mixed, seed=k) for k in range(1, 4)],
    )
    assert [f for f in analysis.findings(analysis.compute(store)) if f.holds]


@pytest.mark.parametrize(("of", "rank"), [("loadings", 1), ("features", 3)])
def test_too_few_components_are_said_to_be_cps(of: str, rank: int, tmp_path: Any) -> None:
    run = attnlens.analyze(
        store_with_attention(planted(noise=0.3)),
        [Embedding(of=of), "cp"],
        options={"cp": {"rank": rank, "n_restarts": 2, "n_splits": 1}},
        out=tmp_path / "run",
    )
    (entry,) = [a for a in run.record["analyses"] if a["name"] == "embedding"]
    assert entry["status"] == "skipped"
    assert f"cp's rank is {rank}" in entry["notes"][0] and "-o cp.rank=4" in entry["notes"][0]


def test_no_perplexity_is_under_one() -> None:
    with pytest.raises(attnlens.errors.OptionError, match="perplexity"):
        Embedding(perplexity=0.5)


def test_names_on_a_map_do_not_lie_over_each_other() -> None:
    places = np.array([[0.0, 0.0], [1e-3, 0.0], [10.0, 0.0], [0.0, 10.0], [np.nan, 0.0]])
    assert drawing._readable(places) == [0, 2, 3]


def test_heads_of_known_types_are_marked() -> None:
    kinds = ["previous", "sink", "duplicate", "induction", "uniform", "uniform"]
    twins = [typed(["uniform"] * 6, seed=k) for k in range(3)]
    result = Embedding().compute(typed(kinds, twins=twins))
    labels = [str(v) for v in result["label_type"].values[:4]]
    # The most special type comes first, and none is hidden.
    assert [v.split(" and ")[0] for v in labels] == [
        "previous token",
        "sink",
        "duplicate token",
        "induction",
    ]
    assert labels[2] == "duplicate token and sink"
