"""Stores of arrays from other tools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from attnlens.activations import MASKED_SCORE
from attnlens.errors import MissingActivationError, NeedError, NonFiniteError, UsageError
from attnlens.store import Store

RNG = np.random.default_rng(0)


def attention(*shape: int) -> np.ndarray[Any, Any]:
    x = np.tril(RNG.random((*shape, shape[-1])) + 0.1)
    return x / x.sum(-1, keepdims=True)


P = attention(3, 2, 4, 6)
Z = RNG.normal(size=(3, 2, 6, 4, 5))


@pytest.mark.parametrize(
    "make",
    [
        np.asarray,
        torch.from_numpy,
        lambda x: torch.from_numpy(x).requires_grad_(),
        lambda x: torch.from_numpy(np.ascontiguousarray(x.T)).permute(*range(x.ndim)[::-1]),
        lambda x: x[::-1][::-1],
        np.asfortranarray,
    ],
)
def test_arrays_of_any_tool(make: Any) -> None:
    """Views, transposed arrays and tensors with a gradient too (CASES G08)."""
    store = Store.from_arrays(pattern=make(P), z=make(Z))
    np.testing.assert_array_equal(store["pattern"].values, P)
    np.testing.assert_array_equal(store["z"].values, Z)
    assert store["pattern"].dims == ("prompt", "layer", "head", "query_pos", "key_pos")
    assert store.path is None
    assert "pattern" in store
    assert "q" not in store


@given(order=st.permutations(["prompt", "layer", "head", "query_pos", "key_pos"]))
def test_named_dimensions_may_come_in_any_order(order: list[str]) -> None:
    array = xr.DataArray(P, dims=["prompt", "layer", "head", "query_pos", "key_pos"])
    store = Store.from_arrays(pattern=array.transpose(*order))
    np.testing.assert_array_equal(store["pattern"].values, P)


def test_labels_of_layers_and_heads_are_kept() -> None:
    array = xr.DataArray(
        P,
        dims=["prompt", "layer", "head", "query_pos", "key_pos"],
        coords={"layer": [5, 9], "head": [3, 2, 1, 0]},
    )
    store = Store.from_arrays(pattern=array)
    assert store["pattern"].layer.values.tolist() == [5, 9]
    assert store["pattern.entropy"].layer.values.tolist() == [5, 9]
    assert store["pattern.entropy"]["head"].values.tolist() == [3, 2, 1, 0]
    np.testing.assert_allclose(store.attention(9).to_dense(), P[:, 1], rtol=1e-6)
    with pytest.raises(NeedError, match="layer 0"):
        store.attention(0)


def test_nothing_is_shared_with_the_caller() -> None:
    ours = P.copy()
    store = Store.from_arrays(pattern=ours)
    ours[:] = 0
    store["pattern"].values[:] = 1
    store["pattern"][0] = 7
    np.testing.assert_array_equal(store["pattern"].values, P)


@pytest.mark.parametrize(
    ("dtype", "read"),
    [("float16", "float32"), ("float64", "float64"), ("int8", "float32"), ("int64", "float64")],
)
def test_everything_is_at_least_float32(dtype: str, read: str) -> None:
    """CASES B20."""
    store = Store.from_arrays(z=Z.astype(dtype))
    assert store["z"].dtype == read
    np.testing.assert_array_equal(store["z"].values, Z.astype(dtype).astype(read))


def test_bfloat16() -> None:
    """CASES A15: numpy has no bfloat16."""
    tensor = torch.from_numpy(Z).to(torch.bfloat16)
    np.testing.assert_array_equal(Store.from_arrays(z=tensor)["z"].values, tensor.float().numpy())


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["a"]), [[1], [1, 2]], None])
def test_no_objects(value: Any) -> None:
    """CASES G06."""
    with pytest.raises(UsageError, match="z "):
        Store.from_arrays(z=value)


# ---- missing dimensions ----------------------------------------------------------------------


def test_one_prompt_of_one_layer() -> None:
    assert Store.from_arrays(pattern=P[0, 0])["pattern"].shape == (1, 1, 4, 6, 6)
    assert Store.from_arrays(z=Z[0, 0])["z"].shape == (1, 1, 6, 4, 5)


@pytest.mark.parametrize(
    ("given_", "shape"),
    [
        ({"pattern": P[0, :1]}, (1, 1)),
        ({"pattern": P[0], "tokens": np.arange(6)}, (1, 2)),
        ({"pattern": P[:, 0], "tokens": np.zeros((3, 6), int)}, (3, 1)),
        ({"pattern": P[:, 0], "lengths": [6, 6, 6]}, (3, 1)),
        ({"pattern": P[0], "z": Z[:1]}, (1, 2)),
        ({"pattern": P[:, 0], "z": Z[:, :1]}, (3, 1)),
        ({"pattern": P[0], "weights": {"W_O": np.zeros((2, 4, 5, 7))}}, (1, 2)),
    ],
)
def test_a_missing_dimension_is_inferred_without_doubt(
    given_: dict[str, Any], shape: tuple[int, int]
) -> None:
    assert Store.from_arrays(**given_)["pattern"].shape[:2] == shape


@pytest.mark.parametrize(
    "given_",
    [
        {"pattern": P[0]},
        {"pattern": P[0, 0, 0]},
        {"pattern": P[None]},
        {"pattern": P[0], "z": Z},
        {"pattern": xr.DataArray(P[0, 0], dims=["h", "query_pos", "key_pos"])},
    ],
)
def test_a_doubt_is_an_error_that_names_the_dimensions(given_: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Store.from_arrays(**given_)
    assert "[prompt, layer, head, query_pos, key_pos]" in str(caught.value)


# ---- what must agree -------------------------------------------------------------------------


def test_tokens_longer_than_the_pattern() -> None:
    """CASES E05: both lengths are named."""
    with pytest.raises(UsageError) as caught:
        Store.from_arrays(pattern=P, tokens=np.zeros((3, 7), dtype=int))
    assert "pattern has 6 positions and tokens has 7" in str(caught.value)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"pattern": P, "z": Z[:2]}, "3 prompts and z has 2"),
        ({"pattern": P, "z": Z[:, :, :, :3]}, "4 heads and z has 3"),
        ({"pattern": P[..., :5]}, "6 positions and pattern has 5"),
        ({"pattern": P, "lengths": [6, 6]}, "3 prompts and lengths has 2"),
        ({"pattern": P, "lengths": [6, 6, 7]}, "between 1 and 6"),
        ({"pattern": P, "lengths": [6, 6, 0]}, "between 1 and 6"),
        ({"pattern": P, "tokens": np.zeros((3, 6))}, "tokens are float64"),
        ({"patern": P}, "Did you mean 'pattern'"),
    ],
)
def test_disagreements_are_named(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Store.from_arrays(**given_)


# ---- padding ---------------------------------------------------------------------------------


def ragged(fill: float) -> np.ndarray[Any, Any]:
    p = np.full((2, 1, 2, 5, 5), fill)
    p[0, 0] = attention(2, 5)
    p[1, 0, :, :3, :3] = attention(2, 3)
    return p


def test_padding_is_dropped_whatever_it_holds() -> None:
    """CASES A10, A11."""
    for fill in (np.nan, np.inf, 0.2):
        p = ragged(fill)
        store = Store.from_arrays(pattern=p, lengths=[5, 3])
        read = store["pattern"].values
        assert np.isnan(read[1, :, :, 3:]).all()
        assert np.isnan(read[1, :, :, :, 3:]).all()
        np.testing.assert_array_equal(read[1, 0, :, :3, :3], p[1, 0, :, :3, :3])
        assert [u.length for u in store.units()] == [3, 5]
        alone = Store.from_arrays(pattern=p[1:, :, :, :3, :3])
        for name in ("pattern.entropy", "pattern.max"):
            np.testing.assert_allclose(
                store[name].sel(prompt=1).values, alone[name].values[0], rtol=1e-12
            )
        dense = store.attention(0).to_dense()
        assert torch.isfinite(torch.as_tensor(dense)).all()
        assert (torch.as_tensor(dense)[1, :, 3:] == 0).all()


def test_nan_at_a_real_token_is_refused_by_place() -> None:
    p = P.copy()
    p[2, 1, 3, 4] = np.nan
    with pytest.raises(NonFiniteError, match="prompt 2, layer 1, head 3, row 4") as caught:
        Store.from_arrays(pattern=p)
    assert "lengths=" in str(caught.value)
    z = Z.copy()
    z[0, 0, 2, 1, 4] = np.inf
    with pytest.raises(NonFiniteError, match="inf at prompt 0, layer 0, position 2, head 1"):
        Store.from_arrays(z=z)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("masked", ["minimum", "infinity"])
def test_masked_scores_get_the_sentinel(dtype: str, masked: str) -> None:
    """CASES, fact 2."""
    low = -np.inf if masked == "infinity" else float(np.finfo(dtype).min)
    mask = np.tril(np.ones((6, 6), dtype=bool))
    scores = np.where(mask, RNG.normal(size=(1, 1, 4, 6, 6)), low).astype(dtype)
    read = Store.from_arrays(scores=scores)["scores"].values
    np.testing.assert_allclose(read[..., ~mask], MASKED_SCORE)
    np.testing.assert_array_equal(read[..., mask], scores[..., mask])
    scores[0, 0, 0, 3, 1] = np.nan
    with pytest.raises(NonFiniteError):
        Store.from_arrays(scores=scores)


# ---- the rest --------------------------------------------------------------------------------


def test_companions_vocabulary_and_facts() -> None:
    twin, other = Store.from_arrays(pattern=P), Store.from_arrays(pattern=P)
    store = Store.from_arrays(
        pattern=P,
        tokens=np.tile(np.arange(6), (3, 1)),
        vocabulary=["a", " b", "\n", "東", "$x$"],
        twins=[twin],
        corpora={"repeated-random": other},
        period=3,
    )
    assert store.twins == [twin]
    assert store.corpus("repeated-random") is other
    with pytest.raises(NeedError, match="'texts'"):
        store.corpus("texts")
    assert store.token_strings(0) == ["a", " b", "\n", "東", "$x$", "5"]
    assert store.manifest.prompts.period == 3
    assert store.facts is None
    assert store.results == {}
    with pytest.raises(NeedError):
        _ = store.model
    model = object()
    store.attach(model)
    assert store.model is model


def test_a_store_without_tokens() -> None:
    store = Store.from_arrays(pattern=P)
    assert not store.has_tokens
    assert store.token_strings(0) == ["0", "1", "2", "3", "4", "5"]
    with pytest.raises(NeedError, match="without tokens"):
        _ = store.tokens


def test_a_statistic_may_be_given() -> None:
    offset = xr.DataArray(np.ones((2, 4, 6)), dims=("layer", "head", "offset"))
    store = Store.from_arrays(**{"pattern.by_offset": offset})
    np.testing.assert_array_equal(store["pattern.by_offset"].values, offset.values)
    assert store.names() == ["pattern.by_offset"]
    with pytest.raises(UsageError, match="DataArray"):
        Store.from_arrays(**{"pattern.by_offset": offset.values})


def test_head_outputs() -> None:
    w_o = RNG.normal(size=(2, 4, 5, 7))
    store = Store.from_arrays(z=Z, weights={"W_O": torch.from_numpy(w_o)})
    expected = np.einsum("plthd,lhdm->plthm", Z, w_o.astype("f4"))
    np.testing.assert_allclose(store["result"].values, expected, rtol=1e-10)
    assert store["result"].dims == ("prompt", "layer", "pos", "head", "d_model")
    part = store["result"].isel(layer=1, head=[2, 0], pos=slice(1, 4), d_model=[6, 3])
    np.testing.assert_allclose(
        part.values, expected[:, 1][:, 1:4][:, :, [2, 0]][..., [6, 3]], rtol=1e-10
    )
    (unit,) = store.units()
    np.testing.assert_allclose(unit["result"].values, expected, rtol=1e-10)
    without = Store.from_arrays(z=Z)
    assert "result" not in without
    with pytest.raises(NeedError, match="W_O"):
        _ = without["result"]


# ---- caches of TransformerLens ---------------------------------------------------------------


def cache(tensors: bool = True) -> dict[str, Any]:
    made: dict[str, Any] = {"hook_embed": np.zeros(3)}
    for layer in range(2):
        made[f"blocks.{layer}.attn.hook_pattern"] = P[:, layer]
        made[f"blocks.{layer}.attn.hook_z"] = Z[:, layer]
        made[f"blocks.{layer}.attn.hook_k"] = Z[:, layer, :, :2]
    return {k: torch.from_numpy(v) for k, v in made.items()} if tensors else made


@pytest.mark.parametrize("tensors", [True, False])
def test_a_cache_becomes_a_store(tensors: bool) -> None:
    store = Store.from_cache(cache(tensors), tokens=np.zeros((3, 6), int))
    np.testing.assert_array_equal(store["pattern"].values, P)
    np.testing.assert_array_equal(store["z"].values, Z)
    assert store["k"].dims == ("prompt", "layer", "pos", "kv_head", "d_head")
    assert list(store.manifest.activations) == ["k", "z", "pattern"]


def test_a_cache_of_one_prompt_and_some_layers() -> None:
    only = {k: v[0] for k, v in cache().items() if ".1." in k}
    store = Store.from_cache(only, names=["pattern"])
    assert store["pattern"].layer.values.tolist() == [1]
    np.testing.assert_array_equal(store["pattern"].values, P[:1, 1:])


def test_what_a_cache_lacks_is_named() -> None:
    """CASES A23."""
    with pytest.raises(MissingActivationError, match="hook_q") as caught:
        Store.from_cache(cache(), names=["q"])
    assert "blocks.0.attn.hook_" in str(caught.value)
    with pytest.raises(MissingActivationError, match="hook_embed"):
        Store.from_cache({"hook_embed": np.zeros(3)})
    with pytest.raises(NeedError, match="'patern'"):
        Store.from_cache(cache(), names=["patern"])


def test_scores_after_the_softmax_are_no_scores() -> None:
    """CASES A24."""
    made = cache()
    for layer in range(2):
        made[f"blocks.{layer}.attn.hook_attn_scores"] = made[f"blocks.{layer}.attn.hook_pattern"]
    assert "scores" not in Store.from_cache(made)
    with pytest.raises(UsageError, match="after the softmax"):
        Store.from_cache(made, names=["scores"])
