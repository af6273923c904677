"""Stores in memory whose structure is known."""

from __future__ import annotations

from typing import Any

import numpy as np

import attnlens

LAYERS, HEADS, D_HEAD, D_MODEL, PROMPTS, LENGTH = 2, 6, 4, 24, 8, 12
VOCABULARY = [f" w{i}" for i in range(30)]


def groups() -> np.ndarray:
    """Return the group of each of the 12 heads, [layer, head]."""
    return np.arange(LAYERS * HEADS).reshape(LAYERS, HEADS) % 3


def planted(
    *, noise: float = 0.0, seed: int = 0, gauge: bool = False, order: Any = None, **more: Any
) -> attnlens.Store:
    """Make a store whose ``result`` has three components, each of a group of four heads.

    Parameters
    ----------
    noise : float
        Norm of the white noise over that of the signal, added to ``result``.
    seed : int
        Of the noise.
    gauge : bool
        Change the basis of every head's d_head space.
    order : sequence of int, optional
        Permutation of the heads of each layer.
    """
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, len(VOCABULARY), (PROMPTS, LENGTH))
    of_token = rng.standard_normal((PROMPTS, LENGTH, 3))
    direction = np.linalg.qr(rng.standard_normal((D_MODEL, 3)))[0].T
    into = rng.standard_normal((LAYERS, HEADS, D_HEAD))
    strength = 1 + rng.random((LAYERS, HEADS))
    group = groups()
    z = np.einsum("lhd,pnlh->plnhd", into, of_token[..., group])
    w_o = np.einsum("lhd,lh,lhm->lhdm", into, strength, direction[group])
    other = np.random.default_rng(seed)
    if gauge:
        basis = other.standard_normal((LAYERS, HEADS, D_HEAD, D_HEAD))
        z = np.einsum("plnhd,lhde->plnhe", z, basis)
        w_o = np.linalg.solve(basis, w_o)
    weights = {"W_O": w_o, "W_U": rng.standard_normal((D_MODEL, len(VOCABULARY)))}
    written = {"z": z}
    if noise:
        result = np.einsum("plnhd,lhdm->plnhm", z, w_o)
        extra = other.standard_normal(result.shape)
        written = {
            "result": result + noise * extra * np.linalg.norm(result) / np.linalg.norm(extra)
        }
    if order is not None:
        written = {k: v[:, :, :, order] for k, v in written.items()}
        weights["W_O"] = w_o[:, order]
    return attnlens.Store.from_arrays(
        tokens=tokens, vocabulary=VOCABULARY, weights=weights, **written, **more
    )


def chance(seed: int, **changes: Any) -> attnlens.Store:
    """Make a store of heads that write what they like: no structure at all."""
    rng = np.random.default_rng([11, seed])
    sizes = {"layers": LAYERS, "heads": HEADS, "prompts": PROMPTS, "length": LENGTH} | changes
    z = rng.standard_normal(
        (sizes["prompts"], sizes["layers"], sizes["length"], sizes["heads"], D_HEAD)
    )
    w_o = rng.standard_normal((sizes["layers"], sizes["heads"], D_HEAD, D_MODEL))
    return attnlens.Store.from_arrays(z=z, weights={"W_O": w_o})


def attention(kind: str, length: int, period: int = 0) -> np.ndarray:
    """Return the pattern of a head of a known type, [query_pos, key_pos].

    Where a row has no such key it rests on the first token.
    """
    pattern = np.zeros((length, length))
    for i in range(length):
        key = {"previous": i - 1, "duplicate": i - period, "induction": i - period + 1}.get(kind, 0)
        pattern[i, key if 0 <= key <= i else 0] = 1
    if kind == "uniform":
        pattern = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    return pattern


def typed(kinds: list[str], *, seed: int = 0, **more: Any) -> attnlens.Store:
    """Make a store of one layer whose heads are of known types, on both corpora."""
    length, period, prompts = 21, 10, 4
    rng = np.random.default_rng(seed)

    def patterns() -> np.ndarray:
        one = np.stack([attention(k, length, period) for k in kinds])
        return np.broadcast_to(one, (prompts, 1, *one.shape))

    z = rng.standard_normal((prompts, 1, length, len(kinds), D_HEAD))
    w_o = rng.standard_normal((1, len(kinds), D_HEAD, D_MODEL))
    repeated = attnlens.Store.from_arrays(pattern=patterns(), period=period)
    return attnlens.Store.from_arrays(
        z=z,
        pattern=patterns(),
        weights={"W_O": w_o},
        corpora={"repeated-random": repeated},
        **more,
    )
