"""The kit's checks, closed forms, and the patterns themselves as an oracle."""

import numpy as np
import pytest
from attnlens_distance import Distance

import attnlens
from attnlens.testing import compute, make_store


@pytest.mark.attnlens(analysis=Distance)
def test_it_keeps_what_analyses_promise(attnlens_check):
    attnlens_check()


def of(store, **options):
    return compute(Distance(**options), store)


def two_sided(pattern, **more):
    """A store in which every query sees every key."""
    return attnlens.Store.from_arrays(pattern=pattern, **more)


def softmax(scores):
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def test_a_head_that_reads_each_token_itself_looks_nowhere_else():
    result = of(make_store("identity"))
    np.testing.assert_allclose(result["distance"], 0.0, atol=1e-6)
    np.testing.assert_allclose(result["self"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(result["near"], 1.0, rtol=1e-6)


def test_a_previous_token_head_looks_one_token_back():
    length = 12
    result = of(make_store("previous-token", length=length))
    # The first row has no token before it and reads itself.
    np.testing.assert_allclose(result["distance"], (length - 1) / length, rtol=1e-6)
    np.testing.assert_allclose(result["previous"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(result["self"], 1 / length, rtol=1e-6)


@pytest.mark.parametrize("lengths", [None, [3, 12, 7, 5]])
def test_evenly_spread_attention_has_the_distance_of_the_closed_form(lengths):
    result = of(make_store("uniform", length=12, lengths=lengths))
    np.testing.assert_allclose(result["distance"], result.attrs["even_distance"], rtol=1e-5)
    if lengths is None:
        np.testing.assert_allclose(result.attrs["even_distance"], 11 / 4)
        np.testing.assert_allclose(result["first"], np.mean(1 / np.arange(1, 13)), rtol=1e-5)


def test_evenly_spread_two_sided_attention_has_the_distance_of_the_closed_form():
    n = 9
    result = of(two_sided(np.full((2, 1, 3, n, n), 1 / n)))
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    np.testing.assert_allclose(result.attrs["even_distance"], apart.mean())
    np.testing.assert_allclose(result["distance"], apart.mean(), rtol=1e-5)
    np.testing.assert_allclose(result["asymmetry"], 0.0, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("causal", [True, False])
def test_distances_are_those_of_the_patterns(seed, causal):
    rng = np.random.default_rng(seed)
    n, near = 10, 3
    scores = 2 * rng.standard_normal((3, 2, 4, n, n))
    pattern = softmax(np.where(np.tri(n, dtype=bool), scores, -np.inf) if causal else scores)
    result = of(two_sided(pattern), near=near)
    offset = np.subtract.outer(np.arange(n), np.arange(n))

    def mean(weight):
        return (pattern * weight).sum(-1).mean(axis=(0, 3))

    close = {"rtol": 1e-4, "atol": 1e-6}
    np.testing.assert_allclose(result["distance"], mean(np.abs(offset)), **close)
    np.testing.assert_allclose(result["near"], mean(np.abs(offset) <= near), **close)
    np.testing.assert_allclose(result["self"], mean(offset == 0), **close)
    np.testing.assert_allclose(result["first"], pattern[..., 0].mean(axis=(0, 3)), **close)
    previous = (pattern * (offset == 1))[..., 1:, :].sum(-1).mean(axis=(0, 3))
    np.testing.assert_allclose(result["previous"], previous, **close)
    assert ("asymmetry" in result) is not causal
    if not causal:
        np.testing.assert_allclose(result["asymmetry"], mean(-np.sign(offset)), **close)


def test_turning_the_text_round_turns_the_asymmetry_round():
    rng = np.random.default_rng(5)
    pattern = softmax(2 * rng.standard_normal((2, 1, 3, 8, 8)))
    there = of(two_sided(pattern))
    back = of(two_sided(pattern[..., ::-1, ::-1].copy()))
    np.testing.assert_allclose(there["asymmetry"], -back["asymmetry"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(there["distance"], back["distance"], rtol=1e-5)


def test_previous_token_heads_are_found_and_named():
    store = make_store("previous-token")
    found = {f.claim: f for f in Distance().findings(of(store))}
    assert found["previous-token-heads"].holds
    assert len(found["previous-token-heads"].evidence["heads"]) == 8
    assert found["local-heads"].holds
    assert not found["long-range-heads"].holds
    assert "forward-heads" not in found


def test_heads_that_read_the_next_token_are_forward_heads():
    n = 12
    rng = np.random.default_rng(0)
    ahead = np.eye(n, k=1) + np.eye(n) * (np.arange(n) == n - 1)[:, None]
    twins = [two_sided(softmax(0.3 * rng.standard_normal((3, 2, 4, n, n)))) for _ in range(3)]
    store = two_sided(np.broadcast_to(ahead, (3, 2, 4, n, n)).copy(), twins=twins)
    result = of(store)
    found = {f.claim: f.holds for f in Distance().findings(result)}
    assert found["forward-heads"]
    assert not found["backward-heads"]
    Distance().draw("asymmetry_grid", result)


def test_evidence_is_of_the_heads_that_are_named():
    result = of(make_store("previous-token"))
    result["distance"][0, 1] = 100.0
    (found,) = [f for f in Distance().findings(result) if f.claim == "long-range-heads"]
    assert found.evidence == {"heads": ["0.1"], "lowest": 100.0, "highest": 100.0}


def test_nothing_is_claimed_without_twins():
    assert not list(Distance().findings(of(make_store("previous-token", twins=0))))


def test_options_are_checked():
    with pytest.raises(attnlens.errors.OptionError, match="near"):
        Distance(near=0)
