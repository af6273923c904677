"""Patterns and scores computed on reading, of queries and keys that any tool captured."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attnlens.activations import MASKED_SCORE
from attnlens.errors import NeedError
from attnlens.models import Model
from attnlens.store import Store
from tests.modelzoo import FAMILIES


def captured(model: Model, tokens: Tensor, *names: str) -> dict[str, np.ndarray]:
    """Return activations over [prompt, layer, ...]."""
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    with model.record(names, lambda name, layer, value: kept[name].append(value.clone())):
        model.forward(tokens)
    return {name: torch.stack(values, 1).numpy() for name, values in kept.items()}


def store_of(live: Model, tokens: Tensor, **how: Any) -> Store:
    parts = captured(live, tokens, "q_rot", "k_rot")
    return Store.from_arrays(tokens=tokens.numpy(), **({"model": live.facts} | parts | how))


@pytest.mark.parametrize("family", FAMILIES)
def test_pattern_is_hugging_faces(
    family: str,
    loaded: Callable[[str], Model],
    attentions: Callable[[str, Tensor], Tensor],
    tokens: Tensor,
) -> None:
    store = store_of(loaded(family), tokens)
    reference = attentions(family, tokens).numpy()
    assert "pattern" in store and "pattern" in store.names()
    assert store["pattern"].dims == ("prompt", "layer", "head", "query_pos", "key_pos")
    np.testing.assert_allclose(store["pattern"].values, reference, rtol=1e-4, atol=1e-6)
    (unit,) = store.units()
    np.testing.assert_allclose(unit["pattern"].values, reference, rtol=1e-4, atol=1e-6)
    for layer in range(2):
        for handle in (store.attention(layer), unit.attention(layer)):
            np.testing.assert_allclose(
                handle.to_dense().numpy(), reference[:, layer], rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("bert", "bloom")])
def test_scores_are_those_before_the_softmax(
    family: str, loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    model = loaded(family)
    store = store_of(model, tokens)
    reference = captured(model, tokens, "scores")["scores"]
    found = store["scores"].values
    np.testing.assert_array_equal(found == MASKED_SCORE, reference == MASKED_SCORE)
    np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "bert"])
def test_statistics_are_those_of_the_pattern(
    family: str,
    loaded: Callable[[str], Model],
    attentions: Callable[[str, Tensor], Tensor],
    tokens: Tensor,
) -> None:
    model = loaded(family)
    derived = store_of(model, tokens)
    dense = Store.from_arrays(
        tokens=tokens.numpy(), pattern=attentions(family, tokens), model=model.facts
    )
    for name in ("entropy", "entropy_share", "max", "received", "by_offset"):
        a, b = derived[f"pattern.{name}"], dense[f"pattern.{name}"]
        assert a.dims == b.dims
        np.testing.assert_allclose(a.values, b.values, rtol=1e-4, atol=1e-5)


def test_chosen_cells_are_the_same_as_of_the_whole(
    loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    array = store_of(loaded("gemma2"), tokens)["pattern"]
    whole = array.values
    np.testing.assert_allclose(
        array.isel(prompt=1, layer=0, head=2, query_pos=-1).values, whole[1, 0, 2, -1], rtol=1e-5
    )
    part = array.isel(query_pos=[9, 2], key_pos=[0, 12, 3], head=[3, 1], layer=[1]).values
    np.testing.assert_allclose(
        part, whole[:, [1]][:, :, [3, 1]][..., [9, 2], :][..., [0, 12, 3]], rtol=1e-5
    )


def test_lengths_that_differ(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    model, lengths = loaded("mistral"), [13, 5, 9]
    parts = captured(model, tokens, "q_rot", "k_rot")
    for array in parts.values():
        for i, length in enumerate(lengths):
            array[i, :, length:] = np.nan
    store = Store.from_arrays(tokens=tokens.numpy(), lengths=lengths, model=model.facts, **parts)
    whole = store["pattern"].values
    for i, length in enumerate(lengths):
        # A causal prompt cut short has the same attention as far as it goes.
        alone = store_of(model, tokens[i : i + 1, :length])["pattern"].values[0]
        np.testing.assert_allclose(whole[i, :, :, :length, :length], alone, rtol=1e-4, atol=1e-6)
        assert np.isnan(whole[i, :, :, length:]).all() and np.isnan(whole[i, ..., length:]).all()
        handle = store.attention(1).to_dense()[i]
        np.testing.assert_allclose(handle[:, :length, :length], alone[1], rtol=1e-4, atol=1e-6)
        assert not handle[:, length:].any()


def test_chosen_layers_and_heads(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    """Three of four heads read both key-value heads, in groups that are not whole."""
    import xarray as xr

    model = loaded("gemma2")
    parts = captured(model, tokens, "q_rot", "k_rot", "pattern")
    dims = ("prompt", "layer", "pos", "head", "d_head")
    heads = [0, 2, 3]
    q = xr.DataArray(
        parts["q_rot"][:, [1]][..., heads, :], dims=dims, coords={"layer": [1], "head": heads}
    )
    k = xr.DataArray(
        parts["k_rot"][:, [1]],
        dims=(*dims[:3], "kv_head", "d_head"),
        coords={"layer": [1], "kv_head": [0, 1]},
    )
    store = Store.from_arrays(tokens=tokens.numpy(), q_rot=q, k_rot=k, model=model.facts)
    wanted = parts["pattern"][:, [1]][:, :, heads]
    np.testing.assert_allclose(store["pattern"].values, wanted, rtol=1e-4, atol=1e-6)
    assert store["pattern"]["layer"].values.tolist() == [1]
    assert store["pattern"]["head"].values.tolist() == heads
    found = store.attention(1).to_dense().numpy()
    np.testing.assert_allclose(found, wanted[:, 0], rtol=1e-4, atol=1e-6)
    assert store["pattern.entropy"]["head"].values.tolist() == heads
    with pytest.raises(NeedError, match="no pattern of layer 0"):
        store.attention(0)


def test_saved_and_opened_again(
    loaded: Callable[[str], Model], tokens: Tensor, tmp_path: Any
) -> None:
    store = store_of(loaded("qwen3"), tokens)
    again = store.save(tmp_path / "derived.attn")
    np.testing.assert_array_equal(again["pattern"].values, store["pattern"].values)
    assert not list(tmp_path.rglob("pattern"))
    assert "pattern" in repr(again) and "derived" in again._repr_html_()


@pytest.mark.parametrize(
    "changes",
    [
        {"sinks": True},
        {"positions": "relative"},
        {"positions": "alibi", "alibi_slopes": None},
        {"scales": (1.0,)},
    ],
)
def test_rules_that_the_facts_do_not_settle(
    changes: dict[str, Any], loaded: Callable[[str], Model], tokens: Tensor
) -> None:
    model = loaded("llama")
    facts = dataclasses.replace(model.facts, **changes)
    store = store_of(model, tokens, model=facts)
    assert "pattern" not in store and "pattern.entropy" not in store
    with pytest.raises(NeedError):
        store["pattern"]
    with pytest.raises(NeedError, match="no attention"):
        store.attention(0)


def test_without_facts_there_is_no_rule(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    assert "pattern" not in store_of(loaded("llama"), tokens, model=None)


def test_scores_under_alibi_are_not_made_up(loaded: Callable[[str], Model], tokens: Tensor) -> None:
    store = store_of(loaded("bloom"), tokens)
    assert "pattern" in store and "scores" not in store


def test_large_scores_give_one_hot_rows() -> None:
    facts = {"scales": (1.0,), "causal": True, "windows": (None,)}
    q = np.full((1, 1, 4, 1, 2), 1e18, dtype=np.float32)
    k = np.linspace(0, 1e18, 4, dtype=np.float32)[None, None, :, None, None].repeat(2, -1)
    store = Store.from_arrays(q_rot=q, k_rot=k, model=facts)
    np.testing.assert_array_equal(store["pattern"].values[0, 0, 0], np.eye(4))


def test_reading_needs_no_torch(
    loaded: Callable[[str], Model], tokens: Tensor, tmp_path: Any
) -> None:
    path = tmp_path / "derived.attn"
    store_of(loaded("llama"), tokens).save(path)
    code = (
        "import sys\nsys.modules['torch'] = None\nimport attnlens\n"
        f"print(attnlens.open_store({str(path)!r})['pattern'].values.sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(3 * 2 * 4 * 13, rel=1e-5)


def test_a_window_in_a_long_prompt() -> None:
    """Rows far from the start read only the keys that their window reaches."""
    n, window = 300, 17
    facts = {"scales": (0.7,), "causal": True, "windows": (window,)}
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, n, 1, 8))
    store = Store.from_arrays(q_rot=q, k_rot=k, model=facts)
    back = np.arange(n)[:, None] - np.arange(n)
    scores = np.where((back >= 0) & (back < window), 0.7 * q[0, 0, :, 0] @ k[0, 0, :, 0].T, -np.inf)
    wanted = np.exp(scores - scores.max(1, keepdims=True))
    wanted /= wanted.sum(1, keepdims=True)
    found = store["pattern"][0, 0, 0]
    np.testing.assert_allclose(found.values, wanted, atol=1e-12)
    np.testing.assert_allclose(found[[250, 20]].values, wanted[[250, 20]], atol=1e-12)
    handle = store.attention(0).to_dense()[0, 0].numpy()
    np.testing.assert_allclose(handle, wanted, atol=1e-12)
