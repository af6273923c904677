"""The statistics against plain loops in float64, in any split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.attention import Attention
from attnlens.errors import NeedError, UsageError
from attnlens.statistics import STATISTICS, compute

PATTERN = [name for name, s in STATISTICS.items() if s.of == "pattern"]
LAYERS = (3, 5)


def random_pattern(
    prompts: int, heads: int, n: int, seed: int, causal: bool = True, dtype: str = "float32"
) -> np.ndarray:
    """Attention [prompt, layer, head, query, key] of two layers."""
    rng = np.random.default_rng(seed)
    scores = 3 * rng.standard_normal((prompts, len(LAYERS), heads, n, n))
    if causal:
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)).astype(dtype)


def oracle(name: str, p: np.ndarray, causal: bool = True) -> np.ndarray:
    """The definition of each statistic, for one array [prompt, layer, head, query, key]."""
    p = p.astype(np.float64)
    n = p.shape[-1]
    visible = np.arange(1, n + 1) if causal else np.full(n, n)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    if name == "pattern.entropy":
        return entropy.mean(-1)
    if name == "pattern.entropy_share":
        rows = visible > 1
        return (entropy[..., rows] / np.log(visible[rows])).mean(-1)
    if name == "pattern.max":
        return p.max(-1).mean(-1)
    if name == "pattern.received":
        viewers = n - np.arange(n) if causal else np.full(n, n)
        return p.sum((0, -2)) / viewers / len(p)
    offsets = range(0 if causal else 1 - n, n)
    return np.stack(
        [np.trace(p, -o, axis1=-2, axis2=-1).sum(0) / (n - abs(o)) / len(p) for o in offsets], -1
    )


def run(name: str, p: np.ndarray, splits: list[list[int]]) -> xr.DataArray:
    """Accumulate units of prompts, each in batches: `splits` holds batch sizes per unit."""
    kind = STATISTICS[name]
    states, at = [], 0
    for unit in splits:
        size = sum(unit)
        one = kind(n_prompts=size, layers=LAYERS, n_heads=p.shape[2], length=p.shape[-1], d_head=0)
        start = 0
        for batch in unit:
            for i, layer in enumerate(LAYERS):
                part = torch.from_numpy(p[at + start : at + start + batch, i])
                one.update(layer, Attention.from_pattern(part), slice(start, start + batch))
            start += batch
        at += size
        states.append(one.state())
    return kind.finalize(kind.merge(states))


@pytest.mark.parametrize("name", PATTERN)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [2, 7, 70])
def test_against_the_definition(name: str, causal: bool, n: int) -> None:
    p = random_pattern(3, 2, n, seed=n, causal=causal)
    got = run(name, p, [[3]])
    assert got.dims == STATISTICS[name].dims
    assert got.layer.values.tolist() == list(LAYERS)
    np.testing.assert_allclose(got.values, oracle(name, p, causal), rtol=1e-12, atol=1e-15)


def test_offsets_are_labelled_by_distance() -> None:
    got = run("pattern.by_offset", random_pattern(1, 1, 5, 0), [[1]])
    assert got.offset.values.tolist() == [0, 1, 2, 3, 4]
    got = run("pattern.by_offset", random_pattern(1, 1, 5, 0, causal=False), [[1]])
    assert got.offset.values.tolist() == list(range(-4, 5))


@pytest.mark.parametrize("name", PATTERN)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_split_gives_the_same(name: str, splits: list[list[int]]) -> None:
    total = sum(map(sum, splits))
    p = random_pattern(total, 3, 19, seed=total)
    np.testing.assert_allclose(
        run(name, p, splits).values, run(name, p, [[total]]).values, rtol=1e-12
    )


@pytest.mark.parametrize("name", PATTERN)
def test_merge_is_associative_over_ragged_units(name: str) -> None:
    kind = STATISTICS[name]
    states = []
    for n in (3, 9, 6):
        one = kind(n_prompts=2, layers=LAYERS, n_heads=2, length=n, d_head=0)
        p = torch.from_numpy(random_pattern(2, 2, n, n))
        for i, layer in enumerate(LAYERS):
            one.update(layer, Attention.from_pattern(p[:, i]), slice(0, 2))
        states.append(one.state())
    left = kind.merge([kind.merge(states[:2]), states[2]])
    right = kind.merge([states[0], kind.merge(states[1:])])
    for key, value in kind.merge(states).items():
        assert value.dtype == np.float64
        np.testing.assert_allclose(left[key], value, rtol=1e-15)
        np.testing.assert_allclose(right[key], value, rtol=1e-15)


def test_ragged_received_averages_over_the_queries_that_see_the_key() -> None:
    kind = STATISTICS["pattern.received"]
    states = []
    for n in (2, 4):  # all mass on key 0
        one = kind(n_prompts=1, layers=[0], n_heads=1, length=n, d_head=0)
        p = torch.zeros(1, 1, n, n)
        p[..., 0] = 1
        one.update(0, Attention.from_pattern(p), slice(0, 1))
        states.append(one.state())
    assert kind.finalize(kind.merge(states)).values.tolist() == [[[1.0, 0.0, 0.0, 0.0]]]


def test_uniform_causal_has_its_closed_forms() -> None:
    n = 64
    p = np.tri(n) / np.arange(1, n + 1)[:, None]
    p = np.broadcast_to(p, (1, 2, 1, n, n)).copy()
    assert run("pattern.entropy_share", p, [[1]]).values == pytest.approx(1.0)
    mean = np.log(np.arange(1, n + 1)).sum() / n  # ln(n!) / n
    assert run("pattern.entropy", p, [[1]]).values == pytest.approx(mean)


def test_one_token_prompts() -> None:
    p = np.ones((2, 2, 1, 1, 1), dtype="float32")
    assert run("pattern.entropy", p, [[2]]).values.tolist() == [[[0.0]] * 2] * 2
    assert np.isnan(run("pattern.entropy_share", p, [[2]]).values).all()
    assert run("pattern.by_offset", p, [[2]]).values.tolist() == [[[1.0]]] * 2


@pytest.mark.parametrize("of", ["q", "k", "v", "z"])
def test_moments(of: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 2, 3)).astype("float16") * 100
    for name in (f"{of}.mean", f"{of}.second_moment"):
        kind = STATISTICS[name]
        states = []
        for unit in (slice(0, 1), slice(1, 4)):
            one = kind(n_prompts=unit.stop - unit.start, layers=[2], n_heads=2, length=6, d_head=3)
            for i in range(unit.start, unit.stop):
                at = i - unit.start
                one.update(2, torch.from_numpy(x[i : i + 1]), slice(at, at + 1))
            states.append(one.state())
        got = kind.finalize(kind.merge(states))
        wide = x.astype(np.float64)
        want = wide.mean((0, 1)) if "mean" in name else np.einsum("bphi,bphj->hij", wide, wide) / 24
        assert got.dims == kind.dims
        np.testing.assert_allclose(got.values[0], want, rtol=1e-12, atol=1e-9)


def array(p: np.ndarray) -> xr.DataArray:
    dims = ("prompt", "layer", "head", "query_pos", "key_pos")
    ids = np.arange(len(p)) + 10
    return xr.DataArray(p, dims=dims, coords={"layer": list(LAYERS), "prompt": ids})


@pytest.mark.parametrize("name", PATTERN)
def test_compute_from_arrays(name: str) -> None:
    p = random_pattern(5, 2, 8, 1)
    both = compute(name, [array(p[:2]), {"pattern": array(p[2:])}])
    np.testing.assert_allclose(both.values, oracle(name, p), rtol=1e-12)
    if "prompt" in both.dims:
        assert both.prompt.values.tolist() == [10, 11, 10, 11, 12]
    swapped = compute(name, array(p).transpose("head", "key_pos", "layer", "query_pos", "prompt"))
    np.testing.assert_allclose(swapped.values, both.values, rtol=1e-12)


@pytest.mark.parametrize("name", [*PATTERN, "z.mean", "z.second_moment"])
def test_compute_ignores_padding(name: str) -> None:
    lengths = [4, 2]
    if name.startswith("z"):
        rng = np.random.default_rng(0)
        short = [rng.standard_normal((1, 2, n, 3, 2)) for n in lengths]
        padded = np.full((2, 2, 4, 3, 2), np.nan)
        dims = ("prompt", "layer", "pos", "head", "d_head")
        for i, (n, value) in enumerate(zip(lengths, short, strict=True)):
            padded[i, :, :n] = value[0]
    else:
        short = [random_pattern(1, 3, n, n) for n in lengths]
        padded = np.full((2, 2, 3, 4, 4), np.nan)
        dims = ("prompt", "layer", "head", "query_pos", "key_pos")
        for i, (n, value) in enumerate(zip(lengths, short, strict=True)):
            padded[i, :, :, :n, :n] = value[0]
    want = compute(name, [xr.DataArray(x, dims=dims) for x in short])
    got = compute(name, xr.DataArray(padded, dims=dims), lengths=lengths)
    np.testing.assert_allclose(got.values, want.values, rtol=1e-12)


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(NeedError, match=r"pattern\.entropi.*\n.*pattern\.entropy"):
        compute("pattern.entropi", [])
    with pytest.raises(UsageError, match="no units"):
        compute("pattern.entropy", [])
    with pytest.raises(UsageError, match="query_pos"):
        compute("pattern.entropy", xr.DataArray(np.zeros((1, 1)), dims=("prompt", "layer")))


@pytest.mark.parametrize("name", PATTERN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_queries_and_keys_serve_as_well_as_patterns(name: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 3, 70, 8, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))

    def run_on(batches: list[slice], patterns: bool) -> xr.DataArray:
        one = STATISTICS[name](n_prompts=4, layers=[0], n_heads=3, length=70, d_head=8)
        for batch in batches:
            a = Attention.from_qk(q[batch].double(), k[batch].double(), scale=0.5)
            exact = Attention.from_pattern(a.to_dense())
            plain = Attention.from_qk(q[batch], k[batch], scale=0.5)
            one.update(0, exact if patterns else plain, batch)
        return STATISTICS[name].finalize(STATISTICS[name].merge([one.state()]))

    got = run_on([slice(0, 4)], patterns=False).values
    want = run_on([slice(0, 4)], patterns=True).values
    np.testing.assert_allclose(got, want, rtol=1e-10 if dtype == torch.float64 else 3e-5)
    split = run_on([slice(0, 1), slice(1, 4)], patterns=False).values
    np.testing.assert_allclose(split, got, rtol=1e-12)
