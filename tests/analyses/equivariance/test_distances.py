"""Distances of heads: against whole matrices, blind to bases, aware of offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attnlens_plugins.equivariance import certificate, distances, gauge
from attnlens_plugins.equivariance.groups import query_key_group, random_invertible
from attnlens_plugins.equivariance.live import each_attention
from attnlens_plugins.equivariance.merging import merged
from attnlens_plugins.equivariance.rotary import NONE, Rotary
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlens
from tests import modelzoo

ROTARY = {"llama": [(0, 2), (1, 3)], "neox": [(0, 1)], "qwen3": [(i, i + 4) for i in range(4)]}


def turning(pairs):
    """The rotary embedding of two layers, with the usual frequencies."""
    frequencies = 10000.0 ** (-np.arange(len(pairs)) / max(len(pairs), 1))
    return [Rotary.turning(pairs, frequencies, 300) if pairs else NONE] * 2


def brute(weights, facts, pairs, offset):
    """Whole forms and maps, one head at a time, from the definitions."""
    forms, maps, lengths = [], [], []
    per = facts.n_heads // facts.n_kv_heads
    d = facts.d_model
    for layer in range(facts.n_layers):
        gain = weights["ln1_w"][layer] if "ln1_w" in weights else np.ones(d)
        bias = weights["ln1_b"][layer] if "ln1_b" in weights else np.zeros(d)
        centre = np.eye(d)
        if facts.norm == "layer" and "ln1_w" in weights:
            centre -= 1.0 / d
        # A row for what the norm's direction gives, one for constants.
        lift = np.vstack([centre @ np.diag(gain), bias])
        for head in range(facts.n_heads):
            g = head // per

            def of(part, h, layer=layer, lift=lift):
                w = lift @ weights[f"W_{part}"][layer, h]
                if f"b_{part}" in weights:
                    w[-1] += weights[f"b_{part}"][layer, h]
                return w

            q, k, v = of("Q", head), of("K", g), of("V", g)
            if "q_norm_w" in weights:
                # The norm takes away the size of the weights before it, and divides by a length.
                q, k = (w / np.sqrt((w**2).mean()) for w in (q, k))
                lengths.append(np.concatenate([(w @ w.T).ravel() for w in (q, k)]))
                q, k = q * weights["q_norm_w"][layer], k * weights["k_norm_w"][layer]
            turn = np.eye(facts.d_head)
            for i, (a, b) in enumerate(pairs):
                # Keys are turned back by the offset: q_i . k_j sees R(j - i).
                angle = -offset * 10000.0 ** (-i / len(pairs))
                c, s = np.cos(angle), np.sin(angle)
                turn[np.ix_((a, b), (a, b))] = [[c, -s], [s, c]]
            if facts.soft_cap is None and not facts.qk_norm:
                still = [i for i in range(facts.d_head) if i not in {j for p in pairs for j in p}]
                k[-1, still] = 0.0
            forms.append(q @ turn @ k.T)
            maps.append(v @ weights["W_O"][layer, head])
    return np.array(forms), np.array(maps), np.array(lengths)


def relative(matrices):
    n = len(matrices)
    found = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j:
                size = np.linalg.norm(matrices[i]) ** 2 + np.linalg.norm(matrices[j]) ** 2
                found[i, j] = np.linalg.norm(matrices[i] - matrices[j]) / np.sqrt(size)
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "gemma2", "qwen3", "bert", "bloom"])
def test_against_whole_matrices(family, zoo):
    model = zoo(family)
    facts = model.facts
    weights = {n: v.astype(np.float64) for n, v in model.weights().items()}
    pairs = ROTARY.get(family, [(i, i + 4) for i in range(4)] if family == "gemma2" else [])
    at = (0, 1, 3) if pairs else (0,)
    found = distances.head_distances(weights, facts, turning(pairs), at)
    forms = np.concatenate([brute(weights, facts, pairs, o)[0].reshape(8, -1) for o in at], axis=1)
    if facts.qk_norm:
        forms = np.hstack([forms, brute(weights, facts, pairs, 0)[2]])
    np.testing.assert_allclose(found["qk"], relative(forms), atol=1e-7)
    np.testing.assert_allclose(found["qk_content"], relative(brute(weights, facts, pairs, 0)[0]),
                               atol=1e-7)  # fmt: skip
    np.testing.assert_allclose(found["vo"], relative(brute(weights, facts, pairs, 0)[1]), atol=1e-7)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "neox"])
def test_the_forms_give_the_live_scores(family, zoo, tokens):
    """scores[i, j] = scale x_i^T W_Q R(i - j) W_K^T x_j, up to a constant of row i."""
    model = zoo(family)
    facts, weights = model.facts, {n: v.astype(np.float64) for n, v in model.weights().items()}
    pairs = ROTARY.get("llama" if family == "mistral" else family, [])
    built = {o: distances.query_key_heads(weights, facts, turning(pairs), o) for o in range(14)}
    found = {}

    def visit(call):
        gain = weights["ln1_w"][call.layer]
        bias = weights["ln1_b"][call.layer] if "ln1_b" in weights else 0.0
        x = (call.x[0].double().numpy() - bias) / gain
        found[call.layer] = np.hstack([x, np.ones((len(x), 1))]), call.seen["pattern"][0]

    each_attention(model, tokens, visit)
    for layer, (x, pattern) in found.items():
        for head in range(4):
            at = layer * 4 + head
            form = {o: h.left[at] @ h.right[at] for o, h in built.items()}
            for i in (4, 9, 13):
                low = 0 if facts.windows[layer] is None else max(0, i - facts.windows[layer] + 1)
                row = np.array([x[i] @ form[i - j] @ x[j] for j in range(low, i + 1)])
                weight = np.exp(facts.scales[layer] * (row - row.max()))
                np.testing.assert_allclose(
                    weight / weight.sum(), pattern[head, i, low : i + 1].numpy(), atol=1e-5
                )


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox", "gemma2", "qwen3"])
def test_another_basis_changes_no_distance(family, zoo, tokens):
    model = zoo(family)
    weights = {n: v.astype(np.float64) for n, v in model.weights().items()}
    found = {}

    def visit(call):
        gains = {n: weights[n][call.layer] for n in ("q_norm_w", "k_norm_w") if n in weights}
        found[call.layer] = gauge.groups_of(call, gains)

    each_attention(model, tokens, visit)
    rotary = certificate.gauges(model, tokens, weights, 0).rotary
    generator = np.random.default_rng(2)
    turned = {n: v.copy() for n, v in weights.items()}
    for layer in range(2):
        own = {n: weights[n][layer] for n in weights if n[:3] in ("W_Q", "W_K", "b_Q", "b_K")
               or n in ("W_V", "b_V", "W_O")}  # fmt: skip
        maps = [group.draw(generator) for group in found[layer]]
        new = gauge.turn_query_key(own, maps)
        maps = [query_key_group(model.facts.d_head, []).draw(generator) for _ in found[layer]]
        new |= gauge.turn_value_output(own, maps)
        for name, value in new.items():
            turned[name][layer] = value
    for name, values in distances.head_distances(weights, model.facts, rotary, (0, 1, 5)).items():
        other = distances.head_distances(turned, model.facts, rotary, (0, 1, 5))[name]
        np.testing.assert_allclose(other, values, atol=1e-9, err_msg=name)


def test_equal_at_offset_0_can_hide_different_scores(zoo):
    """W_Q W_K^T is one thing, what the rotary embedding makes of it another."""
    model = zoo("llama")
    weights = {n: v.astype(np.float64) for n, v in model.weights().items()}
    m = random_invertible(4, np.random.default_rng(0))
    # Heads of two key-value groups: the same W_Q W_K^T in bases that no rotation allows.
    weights["W_Q"][0, 2] = weights["W_Q"][0, 0] @ m
    weights["W_K"][0, 1] = weights["W_K"][0, 0] @ np.linalg.inv(m).T
    found = distances.head_distances(weights, model.facts, turning(ROTARY["llama"]), (0, 1, 2, 4))
    assert found["qk_content"][0, 2] < 1e-6
    assert found["qk"][0, 2] > 0.1


def test_a_key_bias_alone_is_no_difference_and_a_value_bias_is(zoo):
    model = zoo("gpt2")
    weights = {n: v.astype(np.float64) for n, v in model.weights().items()}
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
        weights[name][0, 1] = weights[name][0, 0]
    weights["b_K"][0, 1] += 3.0
    found = distances.head_distances(weights, model.facts, turning([]), (0,))
    assert found["qk"][0, 1] < 1e-7 and found["vo"][0, 1] < 1e-7
    weights["b_V"][0, 1] += 3.0
    assert distances.head_distances(weights, model.facts, turning([]), (0,))["vo"][0, 1] > 0.1


@given(st.integers(2, 9), st.integers(1, 4), st.integers(2, 20), st.integers(1, 64))
@settings(max_examples=40, deadline=None)
def test_strips_of_any_size_give_the_same(heads, d_head, rows, numbers):
    generator = np.random.default_rng(heads * rows)
    given_heads = distances.Heads(
        generator.normal(size=(heads, rows, d_head)), generator.normal(size=(heads, d_head, 7))
    )
    whole = (given_heads.left @ given_heads.right).reshape(heads, -1)
    found = distances.gram(given_heads, numbers=numbers * heads)
    np.testing.assert_allclose(found, whole @ whole.T, rtol=1e-12, atol=1e-12)


def test_a_model_too_large_is_compared_layer_by_layer(zoo, monkeypatch):
    model = zoo("gpt2")
    weights = model.weights()
    whole = distances.head_distances(weights, model.facts, turning([]), (0,))
    monkeypatch.setattr(distances, "_MOST_WORK", 0.0)
    parts = distances.head_distances(weights, model.facts, turning([]), (0,))
    same = np.kron(np.eye(2), np.ones((4, 4))).astype(bool)
    np.testing.assert_allclose(parts["both"][same], whole["both"][same], atol=1e-7)
    assert np.isnan(parts["both"][~same]).all()
    assert np.isfinite(distances.nearest(parts["both"])).all()
    groups, order = distances.cluster(parts["both"], 0.5)
    assert (groups == -1).all() and sorted(order) == list(range(8))


def test_planted_heads_are_found_and_merged_in_the_live_model(tokens):
    built = modelzoo.build("gpt2", seed=4)
    model = attnlens.load_model(built)
    own = model.head_weights(1)
    m, n = (random_invertible(4, np.random.default_rng(s)) for s in (0, 1))
    planted = {name: value.copy() for name, value in own.items()}
    planted["W_Q"][3], planted["b_Q"][3] = own["W_Q"][0] @ m, own["b_Q"][0] @ m
    planted["W_K"][3] = own["W_K"][0] @ np.linalg.inv(m).T
    planted["W_V"][3], planted["b_V"][3] = own["W_V"][0] @ n, own["b_V"][0] @ n
    planted["W_O"][3] = np.linalg.inv(n) @ own["W_O"][0]
    with model.replaced_weights({(k, 1): v for k, v in planted.items() if k != "b_O"}):
        weights = model.weights()
        found = distances.head_distances(weights, model.facts, turning([]), (0,))
        pairs = np.argwhere(np.triu(found["both"] < distances.EQUAL, 1))
        assert pairs.tolist() == [[4, 7]]
        groups, _ = distances.cluster(found["both"], 0.5)
        assert groups.tolist() == [-1, -1, -1, -1, 0, -1, -1, 0]
        assert merged(model, tokens, [(4, 7)]) < 1e-5
        assert merged(model, tokens, [(4, 6)]) > 1e-3


def test_clusters_of_planted_groups():
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(3, 40))
    matrices = np.repeat(centres, 4, axis=0) + 0.1 * generator.normal(size=(12, 40))
    groups, order = distances.cluster(relative(matrices), 0.5)
    assert groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(order) == list(range(12))
    assert distances.cluster(np.zeros((1, 1)), 0.5)[0].tolist() == [-1]


def test_degenerate_heads():
    zero = distances.relative_distances(np.zeros((3, 3)))
    assert (zero == 0).all()
    one = np.eye(3)
    one[0, 0] = 0.0
    assert np.isfinite(distances.relative_distances(one)).all()
    assert np.isnan(distances.nearest(np.zeros((1, 1)))).all()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_the_rotation_is_that_of_the_live_model(rope, tokens):
    built = modelzoo.build("llama", rope_parameters={**rope, "rope_theta": 10000.0})
    cos, sin = built.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(14)[None])
    want = (cos + 1j * sin)[0, :, :2].numpy()
    model = attnlens.load_model(built)
    found = certificate.gauges(model, tokens, model.weights(), 0)
    for rotary in found.rotary:
        assert rotary.pairs == ((0, 2), (1, 3))
        np.testing.assert_allclose(rotary.turns, want, atol=1e-6)
    assert found.dims["qk"].tolist() == [2 * 4] * 2
    assert (found.error["qk"] <= found.tolerance["qk"]).all()
    assert (found.error["qk"] > 0).any() and (found.outside["qk"] > 1e-3).all()
    s = abs(want[0, 0]) ** 2
    for offset in (0, 1, 5):
        angles = want[offset, :] / abs(want[offset, :])
        np.testing.assert_allclose(rotary.between(offset), s * angles, atol=1e-6)


def test_equal_weights_with_other_slopes_or_scales_are_not_equal(tokens):
    for family, changes in (("bloom", {}), ("gpt2", {"scale_attn_by_inverse_layer_idx": True})):
        model = attnlens.load_model(modelzoo.build(family, **changes))
        first = model.head_weights(0)
        if family == "bloom":
            values = {(n, 0): w.copy() for n, w in first.items() if n != "b_O"}
            for w in values.values():
                w[2] = w[0]
            one, other = 0, 2
        else:
            values = {(n, 1): w for n, w in first.items() if n != "b_O"}
            one, other = 0, 4
        with model.replaced_weights(values):
            weights = {n: v.astype(np.float64) for n, v in model.weights().items()}
            if family == "gpt2":
                for name in ("ln1_w", "ln1_b"):
                    weights[name][1] = weights[name][0]
            gauged = certificate.gauges(model, tokens, weights, 0)
            found = certificate.head_map(weights, model.facts, gauged, 14)
        assert float(found["distance_vo"][one, other]) < 1e-6
        assert float(found["distance"][one, other]) > 0.05


def test_under_qk_norm_size_is_nothing_and_length_is_something(zoo):
    model = zoo("qwen3")
    weights = {n: v.astype(np.float64) for n, v in model.weights().items()}
    for name in ("W_Q", "W_K", "W_V"):
        weights[name][0, 1] = weights[name][0, 0]
    weights["W_Q"][0, 2], weights["W_O"][0, 2] = 3 * weights["W_Q"][0, 0], weights["W_O"][0, 0]
    weights["W_K"][0, 1] *= 5
    rotary = [Rotary.turning(ROTARY["qwen3"], 10000.0 ** (-np.arange(4) / 4), 14)] * 2
    found = distances.head_distances(weights, model.facts, rotary, (0, 1, 2))
    assert found["both"][0, 2] < 1e-6
    # A map of queries and keys that leaves W_Q W_K^T alone changes the lengths.
    gains = weights["q_norm_w"][0], weights["k_norm_w"][0]
    m = np.diag(np.exp(np.linspace(-1, 1, 8)))
    weights["W_Q"][0, 2] = weights["W_Q"][0, 0] @ np.diag(gains[0]) @ m @ np.diag(1 / gains[0])
    weights["W_K"][0, 1] = (
        weights["W_K"][0, 0] @ np.diag(gains[1]) @ np.linalg.inv(m) @ np.diag(1 / gains[1])
    )
    assert distances.head_distances(weights, model.facts, rotary, (0,))["qk"][0, 2] > 0.05
