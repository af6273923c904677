"""What a layer's rotary embedding does, read off the live model and never from its configuration.

A rotary embedding multiplies each pair of dimensions, as one complex number, by ``s e^(i p w)`` at
position p. Which dimensions form pairs, the frequencies w with all their scaling, and the factor s
(YaRN's) are measured on queries and keys before and after it. Where the model does not show these
after the embedding, the tables of cosines and sines that it hands to attention are taken, and
believed only if the pattern that they give is the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlens_plugins.equivariance.live import Call
from attnlens_plugins.equivariance.rounding import (
    pattern_tolerance,
    unit_roundoff,
    working_dtype,
)

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding as it acts.

    Attributes
    ----------
    pairs : tuple of (int, int)
        Dimensions that are turned together; empty where nothing turns.
    turns : complex128[pos, pair]
        What each pair, as ``first + i second``, is multiplied by.
    """

    pairs: tuple[tuple[int, int], ...]
    turns: NDArray[np.complex128]

    @classmethod
    def turning(cls, pairs: Pairs, frequencies: Any, length: int) -> Rotary:
        """Return the embedding of given frequencies, radians per position."""
        angles = np.arange(length)[:, None] * np.asarray(frequencies)
        return cls(tuple(pairs), np.exp(1j * angles))

    def between(self, offset: int) -> NDArray[np.complex128]:
        """Return what is left between a query and the key so far before it, complex128[pair].

        It is the same at all positions; their mean is the most exact.
        """
        earlier = self.turns[: len(self.turns) - offset]
        return np.asarray((self.turns[offset:] * earlier.conj()).mean(0))

    def keys_back(self, keys: Any, offset: int) -> Any:
        """Turn keys, or weights that make them, [..., d_head], as a query sees them."""
        if not self.pairs:
            return keys
        first, second = (list(side) for side in zip(*self.pairs, strict=True))
        found = keys.copy()
        turned = (keys[..., first] + 1j * keys[..., second]) * self.between(offset).conj()
        found[..., first], found[..., second] = turned.real, turned.imag
        return found


#: Nothing is turned.
NONE = Rotary((), np.ones((1, 0), dtype=np.complex128))


def measured(call: Call, gains: Sequence[Any] | None = None) -> Rotary | None:
    """Measure the rotary embedding of a layer.

    Parameters
    ----------
    call : Call
    gains : (float64[head, d_head], float64[kv_head, d_head]), optional
        Of QK-norm on queries and keys, which acts before the rotation.

    Returns
    -------
    Rotary or None
        None where it cannot be told, or where what was seen is no rotation of pairs.
    """
    facts = call.model.facts
    if facts.positions != "rotary":
        return NONE
    if facts.qk_norm and gains is None:
        return None
    turned = int(facts.rotary_dim or facts.d_head)
    if {"q", "k", "q_rot", "k_rot"} <= call.seen.keys():
        eps = unit_roundoff(call.seen["q"].dtype)
        vectors = [_vectors(call, name, None if gains is None else gains[i])
                   for i, name in enumerate("qk")]  # fmt: skip
        before, after = (np.concatenate(side, axis=2) for side in zip(*vectors, strict=True))
        return fitted(before, after, turned, eps)
    return None if facts.qk_norm else _from_tables(call, turned)


def _vectors(call: Call, name: str, gain: Any) -> tuple[Any, Any]:
    before, after = (call.seen[n].double().cpu().numpy() for n in (name, f"{name}_rot"))
    if gain is None:
        return before, after
    # Only directions are compared: whether the norm spans one head or all does not matter.
    return _direction(before * gain), _direction(after)


def _direction(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=-1, keepdims=True).clip(1e-30)


def layouts(turned: int) -> list[list[tuple[int, int]]]:
    """List the two layouts in use: i with i + n / 2 (Llama), or neighbours (GPT-J)."""
    half = turned // 2
    return [[(i, i + half) for i in range(half)], [(2 * i, 2 * i + 1) for i in range(half)]]


def fitted(before: Any, after: Any, turned: int, eps: float) -> Rotary | None:
    """Find the rotation that takes vectors to what they became.

    For each layout, position and pair it is the complex number that fits best in the least-squares
    sense. It must fit up to rounding, and be as long at all positions.

    Parameters
    ----------
    before, after : float64[prompt, pos, head, d_head]
    turned : int
        The first so many dimensions may be turned.
    eps : float
        The rounding unit of the numbers.

    Returns
    -------
    Rotary or None
    """
    if not np.array_equal(before[..., turned:], after[..., turned:]) and not np.allclose(
        before[..., turned:], after[..., turned:], rtol=0, atol=16 * eps * np.abs(after).max()
    ):
        return None
    for pairs in layouts(turned):
        first, second = (list(side) for side in zip(*pairs, strict=True))
        z, w = (v[..., first] + 1j * v[..., second] for v in (before, after))
        power = (np.abs(z) ** 2).sum((0, 2))
        if not (power > 0).all():
            return None
        turns = (w * z.conj()).sum((0, 2)) / power
        allowed = 16 * eps * max(float(np.abs(w).max()), float(np.abs(z).max()))
        lengths = np.abs(turns)
        uneven = (lengths - np.median(lengths)) * np.sqrt(power / (z.shape[0] * z.shape[2]))
        if np.abs(w - turns[:, None] * z).max() <= allowed and np.abs(uneven).max() <= allowed:
            still = np.abs(turns - 1).max() <= 16 * eps
            return NONE if still else Rotary(tuple(pairs), turns)
    return None


def _from_tables(call: Call, turned: int) -> Rotary | None:
    """Take the cosines and sines that attention is given, if they explain the pattern."""
    if not {"q", "k", "pattern"} <= call.seen.keys():
        return None
    right = [r for r in _candidates(call.tables(), turned) if _explains(call, r)]
    return right[0] if len(right) == 1 else None


def _candidates(tables: Sequence[Any], turned: int) -> Iterator[Rotary]:
    if len(tables) != 2:
        return
    # At position 0 the sines are 0: some models hand them over first.
    cos, sin = sorted(tables, key=lambda table: -float(np.abs(table[0]).sum()))
    half = turned // 2
    for pairs, columns in zip(layouts(turned), (slice(0, half), slice(0, turned, 2)), strict=True):
        here = slice(None) if cos.shape[1] == half else columns
        turns = cos[:, here] + 1j * sin[:, here]
        if turns.shape[1] == half:
            yield Rotary(tuple(pairs), turns)


def _explains(call: Call, rotary: Rotary) -> bool:
    import torch

    facts, seen = call.model.facts, call.seen
    if len(rotary.turns) != call.n:
        return False
    first, second = (list(side) for side in zip(*rotary.pairs, strict=True))
    q, k = (seen[name].double().cpu().numpy().copy() for name in "qk")
    for vectors in (q, k):
        z = (vectors[..., first] + 1j * vectors[..., second]) * rotary.turns[:, None]
        vectors[..., first], vectors[..., second] = z.real, z.imag
    k = np.repeat(k, facts.n_heads // facts.n_kv_heads, axis=2)
    scores = facts.scales[call.layer] * np.einsum("bihd,bjhd->bhij", q, k)
    if facts.soft_cap is not None:
        scores = facts.soft_cap * np.tanh(scores / facts.soft_cap)
    hidden = ~call.visible.cpu().numpy()
    made = torch.softmax(torch.as_tensor(np.where(hidden, -np.inf, scores)), -1).numpy()
    # What a sink takes away is taken from all keys alike.
    pattern = seen["pattern"].double().cpu().numpy()
    pattern = pattern / pattern.sum(-1, keepdims=True).clip(1e-30)
    allowed = 4 * pattern_tolerance(seen, facts, call.layer, call.n).double().numpy()
    allowed = allowed + 8 * unit_roundoff(working_dtype(seen))
    return bool((np.abs(made - pattern).max((0, 2, 3)) <= allowed).all())
