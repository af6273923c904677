"""Small stores with known answers, made in memory without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from attnlens.activations import MASKED_SCORE
from attnlens.models.facts import ModelFacts
from attnlens.store import Store

Kind = Literal["random", "uniform", "identity", "previous-token", "induction", "planted-cp"]

#: Every kind of attention that :func:`make_store` knows, with its known answer.
KINDS: dict[str, str] = {
    "random": "softmax of Gaussian queries and keys: no structure, like a model before training",
    "uniform": "every visible key alike: entropy ln i in row i, singular values of the "
    "causal-uniform matrix",
    "identity": "each token reads itself: entropy 0, all singular values 1",
    "previous-token": "each token reads the one before: sigma = (sqrt 2, 1, ..., 1, 0)",
    "induction": "each token reads what followed its last occurrence; on tokens that repeat",
    "planted-cp": "heads in three groups whose results are multiples of each other",
}


def make_store(
    kind: Kind = "random",
    *,
    n_prompts: int = 4,
    n_layers: int = 2,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    length: int = 12,
    lengths: Sequence[int] | None = None,
    d_head: int = 4,
    d_model: int = 16,
    d_vocab: int = 40,
    dtype: Any = np.float32,
    twins: int = 3,
    seed: int = 0,
) -> Store:
    """Build a store that holds every activation, weights, twins and a repeated-random corpus.

    Parameters
    ----------
    kind : str
        One of :data:`KINDS`. Twins are always ``"random"``.
    n_prompts, n_layers, n_heads, length, d_head, d_model, d_vocab : int
    n_kv_heads : int, optional
        Fewer than `n_heads`: grouped-query attention.
    lengths : sequence of int, optional
        Of each prompt, where they differ; at most `length`.
    dtype : dtype
        Of the activations.
    twins : int
    seed : int

    Returns
    -------
    attnlens.Store
    """
    shape = {
        "n_prompts": n_prompts,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads or n_heads,
        "length": length,
        "lengths": lengths,
        "d_head": d_head,
        "d_model": d_model,
        "d_vocab": d_vocab,
        "dtype": dtype,
    }
    return _with_corpus(
        kind,
        seed,
        shape,
        twins=tuple(_with_corpus("random", seed * 1000 + 1 + i, shape) for i in range(twins)),
    )


def _with_corpus(
    kind: str, seed: int, shape: dict[str, Any], twins: tuple[Store, ...] = ()
) -> Store:
    repeated = _plain(kind, seed, shape | {"lengths": None}, repeated=True)
    return _plain(kind, seed, shape, twins=twins, corpora={"repeated-random": repeated})


def _plain(
    kind: str, seed: int, shape: dict[str, Any], *, repeated: bool = False, **companions: Any
) -> Store:
    rng = np.random.default_rng([seed, int(repeated)])
    p, layers, h, kv = (shape[n] for n in ("n_prompts", "n_layers", "n_heads", "n_kv_heads"))
    n, d, width, vocabulary = (shape[x] for x in ("length", "d_head", "d_model", "d_vocab"))
    period = max(1, n // 2)
    tokens = rng.integers(1, vocabulary, (p, n))
    if repeated or kind == "induction":
        tokens = np.tile(tokens[:, :period], (1, -(-n // period)))[:, :n]

    weights = _weights(np.random.default_rng([seed, 7]), shape)
    group = h // kv
    q = rng.standard_normal((p, layers, n, h, d))
    k, v = rng.standard_normal((2, p, layers, n, kv, d))
    scores = np.einsum("plihd,pljhd->plhij", q, np.repeat(k, group, axis=3)) / np.sqrt(d)
    pattern = _pattern(kind, scores, tokens, period)
    visible = np.tri(n, dtype=bool)
    with np.errstate(divide="ignore"):
        logged = scores if kind in ("random", "planted-cp") else np.log(pattern)
    scores = np.where(visible & np.isfinite(logged), logged, MASKED_SCORE)
    z = np.einsum("plhij,pljhd->plihd", pattern, np.repeat(v, group, axis=3))
    if kind == "planted-cp":
        # Heads of one group are multiples of the group's first.
        first = np.minimum(np.arange(h) // max(1, -(-h // 3)) * max(1, -(-h // 3)), h - 1)
        factor = 1 + np.arange(h) % max(1, -(-h // 3)) * 0.5
        z = z[:, :, :, first] * factor[:, None]
        weights["W_O"] = weights["W_O"][:, first]
    out = np.einsum("plihd,lhdm->plim", z, weights["W_O"])
    arrays = {
        "q": q, "k": k, "v": v, "z": z, "pattern": pattern, "scores": scores,
        "resid_pre": rng.standard_normal((p, layers, n, width)), "attn_out": out,
    }  # fmt: skip
    if kind == "random":
        arrays |= {"q_rot": q, "k_rot": k}
    cast = {
        name: array.astype(np.float32 if name == "scores" else shape["dtype"])
        for name, array in arrays.items()
    }
    return Store.from_arrays(
        tokens=tokens,
        vocabulary=[f" word{i}" for i in range(vocabulary)],
        weights=weights,
        lengths=shape["lengths"],
        model=_facts(kind, shape),
        period=period if repeated or kind == "induction" else None,
        **companions,
        **cast,
    )


def _pattern(kind: str, scores: Any, tokens: Any, period: int) -> Any:
    n = scores.shape[-1]
    visible = np.tri(n, dtype=bool)
    if kind in ("random", "planted-cp"):
        shifted = np.where(visible, scores, -np.inf)
        raised = np.exp(shifted - shifted.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)
    uniform = visible / visible.sum(-1, keepdims=True)
    one = {
        "uniform": uniform,
        "identity": np.eye(n),
        "previous-token": np.eye(n, k=-1) + np.eye(n) * (np.arange(n) == 0),
        "induction": _induction(uniform, period),
    }[kind]
    return np.broadcast_to(one, scores.shape).copy()


def _induction(uniform: Any, period: int) -> Any:
    n = len(uniform)
    pattern = uniform.copy()
    for i in range(period, n):
        pattern[i] = np.eye(n)[i - period + 1]
    return pattern


def _weights(rng: np.random.Generator, shape: dict[str, Any]) -> dict[str, Any]:
    layers, h, kv = shape["n_layers"], shape["n_heads"], shape["n_kv_heads"]
    d, width = shape["d_head"], shape["d_model"]

    def normal(*size: int) -> Any:
        return rng.standard_normal(size).astype(np.float32) / np.float32(np.sqrt(width))

    return {
        "W_Q": normal(layers, h, width, d),
        "W_K": normal(layers, kv, width, d),
        "W_V": normal(layers, kv, width, d),
        "W_O": normal(layers, h, d, width),
        "b_O": np.zeros((layers, width), dtype=np.float32),
        "W_E": normal(shape["d_vocab"], width),
        "W_U": normal(width, shape["d_vocab"]),
    }


def _facts(kind: str, shape: dict[str, Any]) -> ModelFacts:
    layers, d = shape["n_layers"], shape["d_head"]
    return ModelFacts(
        name=f"test-{kind}",
        source="memory",
        revision=None,
        architecture="TestForCausalLM",
        n_layers=layers,
        n_heads=shape["n_heads"],
        n_kv_heads=shape["n_kv_heads"],
        d_model=shape["d_model"],
        d_head=d,
        d_vocab=shape["d_vocab"],
        n_ctx=max(shape["length"], 16),
        positions="none",
        causal=True,
        windows=(None,) * layers,
        soft_cap=None,
        scales=(float(d) ** -0.5,) * layers,
        qk_norm=False,
        dtype="float32",
        device="cpu",
        mode="raw",
        n_params=1000,
        weights_hash="0" * 64,
        config={},
    )


def permuted(store: Store, order: list[int]) -> Store:
    """Return the store with its heads in another order, with its twins and corpora."""
    arrays: dict[str, Any] = {}
    for name in store.manifest.activations:
        values = store[name]
        heads = [d for d in values.dims if d in ("head", "kv_head")]
        arrays[name] = values.isel(dict.fromkeys(heads, order)).values
    weights = {
        str(name): values.isel({d: order for d in ("head", "kv_head") if d in values.dims}).values
        for name, values in store.weights.data_vars.items()
    }
    return Store.from_arrays(
        tokens=store.tokens.values,
        vocabulary=store.vocabulary,
        weights=weights,
        model=store.facts,
        period=store.manifest.prompts.period,
        twins=[permuted(t, order) for t in store.twins],
        corpora={name: permuted(c, order) for name, c in store.corpora.items()},
        **arrays,
    )
