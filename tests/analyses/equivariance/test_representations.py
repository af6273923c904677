"""Invariants of representations: against closed forms, blind to rotations, honest when few."""

from __future__ import annotations

import numpy as np
import pytest
from attnlens_plugins.equivariance.groups import random_orthogonal
from attnlens_plugins.equivariance.pairs import compare, read_pairs, represent
from attnlens_plugins.equivariance.representations import (
    INVARIANTS,
    cka,
    gram_similarity,
    procrustes,
    rsa,
    with_null,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import orthogonal_procrustes
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr

import attnlens
from tests import modelzoo


def sides(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(2, n, d))


@given(st.integers(5, 20), st.integers(2, 30), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_rotations_and_scales_change_nothing(n, d, seed):
    x, y = sides(n, d, seed)
    r = random_orthogonal(d, np.random.default_rng(seed + 1))
    for name, function in INVARIANTS.items():
        assert function(x @ r, 3 * y) == pytest.approx(function(x, y), abs=1e-8), name
        assert function(x, 2 * x @ r) == pytest.approx(1, abs=1e-8), name


@given(st.integers(5, 20), st.integers(2, 12), st.integers(2, 12), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_against_their_definitions(n, d, e, seed):
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(n, d)), generator.normal(size=(n, e))
    a, b = x - x.mean(0), y - y.mean(0)
    plain = np.linalg.norm(a.T @ b) ** 2 / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
    assert cka(x, y, debiased=False) == pytest.approx(plain)
    assert rsa(x, y) == pytest.approx(spearmanr(pdist(x), pdist(y))[0])
    if d == e:
        _, scale = orthogonal_procrustes(a / np.linalg.norm(a), b / np.linalg.norm(b))
        assert procrustes(x, y) == pytest.approx(scale)
    k, other = x @ x.T, y @ y.T
    cosine = (k * other).sum() / np.linalg.norm(k) / np.linalg.norm(other)
    assert gram_similarity(x, y) == pytest.approx(cosine)


def test_the_debiased_cka_is_0_for_unrelated_rows_and_the_plain_one_is_not():
    found = [(cka(*sides(10, 200, s)), cka(*sides(10, 200, s), debiased=False)) for s in range(150)]
    debiased, plain = np.mean(found, axis=0)
    assert abs(debiased) < 0.04
    assert plain > 0.8


def test_nulls():
    x, noise = sides(30, 12)
    related = with_null(x, x + 0.5 * noise, shuffles=60, seed=0)
    for name, one in related.items():
        assert one["value"] > one["null_high"] > one["null_mean"], name
        assert one["p"] == pytest.approx(1 / 61)
    unrelated = [with_null(*sides(8, 20, s), shuffles=19, seed=s)["cka"]["p"] for s in range(40)]
    # p-values of nothing are even: few small ones.
    assert np.mean(np.array(unrelated) <= 0.05) < 0.2 and np.mean(unrelated) > 0.35


def test_what_does_not_vary_has_no_similarity():
    x = np.random.default_rng(0).normal(size=(6, 3))
    same = np.ones((6, 3))
    assert np.isnan(cka(x, same)) and np.isnan(procrustes(x, same)) and np.isnan(rsa(x, same))
    assert np.isnan(cka(x[:3], x[:3]))


def test_layers_of_two_models_are_met_at_equal_depth():
    x = np.random.default_rng(0).normal(size=(3, 8, 5))
    y = np.random.default_rng(1).normal(size=(5, 8, 9))
    y[2, :, :5], y[2, :, 5:] = x[1], 0.0
    found = compare(x, y, shuffles=20, seed=0)
    assert found["pairs_other_layer"].values.tolist() == [0, 2, 4]
    cka_values = found["pairs_value"].sel(invariant="cka").values
    assert cka_values[1] == pytest.approx(1) and (cka_values[[0, 2]] < 0.9).all()


def test_reading_pairs(tmp_path):
    path = tmp_path / "pairs ü.tsv"
    path.write_text("a b\tc d\n\n" + "e\tf\n" * 3, encoding="utf-8")
    assert read_pairs(path, single=False) == [("a b", "c d")] + [("e", "f")] * 3
    for text, wrong in (
        ("a\tb\n" * 3, "3 pairs"),
        ("a\tb\nc\n", "Line 2"),
        ("a\tb\tc\n", "3 texts"),
    ):
        path.write_text(text)
        with pytest.raises(attnlens.errors.UsageError, match=wrong):
            read_pairs(path, single=False)
    path.write_text("a\nb\nc\nd\te\n")
    assert read_pairs(path, single=True) == [("a", "a"), ("b", "b"), ("c", "c"), ("d", "e")]
    with pytest.raises(attnlens.errors.UsageError, match="cannot be read"):
        read_pairs(tmp_path / "none", single=False)


def test_representations_are_those_of_the_residual_stream(tmp_path):
    model = attnlens.load_model(str(modelzoo.tiny("gpt2", tmp_path / "m", tokenizer=True)))
    texts = ["God said", "the light was good"]
    found = represent(model, texts, "last")
    assert found.shape == (2, 2, 16)
    ids = model.tokenizer(texts[1])["input_ids"]
    weights = model.weights()
    want = weights["W_E"][ids[-1]] + weights["W_pos"][len(ids) - 1]
    np.testing.assert_allclose(found[0, 1], want, atol=1e-6)
    want = (weights["W_E"][ids] + weights["W_pos"][: len(ids)]).mean(0)
    np.testing.assert_allclose(represent(model, texts, "mean")[0, 1], want, atol=1e-6)
