"""The gauge groups by algebra: invariance inside, and dimensions counted independently."""

from __future__ import annotations

import numpy as np
import pytest
from attnlens_plugins.equivariance.groups import (
    Block,
    query_key_group,
    random_invertible,
    random_orthogonal,
    value_output_group,
)
from attnlens_plugins.equivariance.rotary import fitted
from hypothesis import given, settings
from hypothesis import strategies as st

HALF = [(i, i + 4) for i in range(4)]


def rotation(pairs, d, angle_of):
    turn = np.eye(d)
    for k, (i, j) in enumerate(pairs):
        c, s = np.cos(angle_of(k)), np.sin(angle_of(k))
        turn[np.ix_((i, j), (i, j))] = [[c, -s], [s, c]]
    return turn


def scores(q, k, pairs, gains=None):
    """Scores of queries and keys [pos, d_head] with QK-norm, gains and rotary embedding."""
    d = q.shape[1]
    if gains is not None:
        q, k = (x / np.sqrt((x**2).mean(1, keepdims=True)) for x in (q, k))
        q, k = q * gains[0], k * gains[1]
    turned = []
    for x in (q, k):
        rows = [
            rotation(pairs, d, lambda f, p=p: p * 0.7 ** (f + 1)) @ row for p, row in enumerate(x)
        ]
        turned.append(np.array(rows))
    return turned[0] @ turned[1].T


def tangent_dimension(pairs, d, gains=None):
    """Dimensions of the group that acts on both sides, from linear algebra alone.

    The pairs of generators (X, Y) with X^T S + S Y = 0 for every form S that the scores use; with
    QK-norm X and Y are antisymmetric.
    """
    forms = []
    for offset in range(7):
        form = rotation(pairs, d, lambda f, o=offset: o * 0.7 ** (f + 1))
        forms.append(form if gains is None else gains[0][:, None] * form * gains[1][None, :])
    columns = []
    for side in range(2):
        for i in range(d):
            for j in range(d):
                generator = np.zeros((d, d))
                generator[i, j] = 1.0
                if gains is not None:
                    if i >= j:
                        continue
                    generator[j, i] = -1.0
                moved = [generator.T @ f if side == 0 else f @ generator for f in forms]
                columns.append(np.concatenate([m.ravel() for m in moved]))
    singular = np.linalg.svd(np.array(columns).T, compute_uv=False)
    return len(columns) - int((singular > 1e-9 * singular[0]).sum())


EQUAL = (np.full(8, 1.3), np.full(8, 0.7))
UNEQUAL = (np.linspace(0.5, 1.5, 8), np.linspace(1.4, 0.6, 8) ** 2)
HALF_EQUAL = (np.array([1, 2, 0.5, 1.7, 1, 2, 0.5, 0.9]), np.array([1, 1, 2, 3, 1, 1, 2.5, 3]))
CASES = {
    "plain": ([], None),
    "rotary": (HALF, None),
    "neighbours": ([(0, 1), (2, 3), (4, 5), (6, 7)], None),
    "partial rotary": ([(0, 2), (1, 3)], None),
    "norm, equal gains": ([], EQUAL),
    "norm, unequal gains": ([], UNEQUAL),
    "norm and rotary, equal gains": (HALF, EQUAL),
    "norm and rotary, unequal gains": (HALF, UNEQUAL),
    "norm and rotary, some equal": (HALF, HALF_EQUAL),
    "norm and partial rotary": ([(0, 2), (1, 3)], EQUAL),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_scores_do_not_move_inside_the_group_and_move_outside(case, seed):
    pairs, gains = CASES[case]
    generator = np.random.default_rng(seed)
    q, k = generator.normal(size=(2, 6, 8))
    group = query_key_group(8, pairs, None if gains is None else [gains])
    before = scores(q, k, pairs, gains)
    a, b = group.draw(generator)
    np.testing.assert_allclose(scores(q @ a, k @ b, pairs, gains), before, atol=1e-12)
    assert np.abs(a - np.eye(8)).max() > 0.1
    a, b = group.draw_outside(generator)
    assert np.abs(scores(q @ a, k @ b, pairs, gains) - before).max() > 0.1


@pytest.mark.parametrize("case", CASES)
def test_the_dimension_is_that_of_the_lie_algebra(case):
    pairs, gains = CASES[case]
    group = query_key_group(8, pairs, None if gains is None else [gains])
    assert group.dimension == tangent_dimension(pairs, 8, gains)


def test_known_dimensions():
    assert query_key_group(64, []).dimension == 64 * 64
    assert value_output_group(64).dimension == 64 * 64
    assert query_key_group(64, [(i, i + 32) for i in range(32)]).dimension == 64
    # Pythia rotates a quarter: complex numbers there, everything on the rest.
    assert query_key_group(64, [(i, i + 8) for i in range(8)]).dimension == 16 + 48 * 48
    norm = query_key_group(8, [], [(np.ones(8), np.ones(8))])
    assert norm.dimension == 28 and norm.words() == "O(8)"
    assert query_key_group(8, [], [UNEQUAL]).words() == "8 signs"
    assert query_key_group(8, HALF, [UNEQUAL]).words() == "4 pair signs"
    assert query_key_group(8, HALF, [EQUAL], centred=True).trivial
    assert "1 block (" in query_key_group(4, [(0, 1)]).words()


def test_heads_that_share_keys_need_equal_gains_together():
    one, other = np.ones(8), np.linspace(1, 2, 8)
    assert query_key_group(8, [], [(one, one), (one, one)]).dimension == 28
    assert query_key_group(8, [], [(one, one), (other, one)]).dimension == 0


@given(st.integers(1, 12), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_random_maps(n, seed):
    generator = np.random.default_rng(seed)
    q = random_orthogonal(n, generator)
    np.testing.assert_allclose(q.T @ q, np.eye(n), atol=1e-12)
    assert np.linalg.cond(random_invertible(n, generator)) <= 4 + 1e-9


@given(st.sampled_from(["scaled rotations", "rotations", "pair signs"]), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_blocks_on_pairs_commute_with_rotations(kind, seed):
    generator = np.random.default_rng(seed)
    block = Block(kind, (0, 1, 2, 3)).draw(generator)
    turn = rotation([(0, 1), (2, 3)], 4, lambda k: 0.3 + k)
    np.testing.assert_allclose(block @ turn, turn @ block, atol=1e-12)


def test_the_layout_is_read_off_what_the_rotation_did():
    generator = np.random.default_rng(0)
    q = generator.normal(size=(1, 5, 3, 8))
    for pairs in (HALF, [(0, 1), (2, 3), (4, 5), (6, 7)]):
        for factor in (1.0, 1.3):
            turned = q.copy()
            for p in range(5):
                turn = factor * rotation(pairs, 8, lambda k, p=p: p * 0.5**k)
                turned[0, p] = q[0, p] @ turn.T
            found = fitted(q, turned, 8, 1e-15)
            assert list(found.pairs) == list(pairs)
            np.testing.assert_allclose(np.abs(found.turns), factor)
    assert fitted(q, generator.normal(size=q.shape), 8, 1e-15) is None
    assert fitted(q, q, 8, 1e-15).pairs == ()
    # Nothing can be told of vectors that are zero.
    assert fitted(0 * q, 0 * q, 8, 1e-15) is None
