"""Gauge groups: which changes of a head's basis leave the model exactly as it is.

Queries and keys meet in ``q^T k`` alone, values and outputs in ``W_V W_O`` alone, so each head may
express them in another basis: ``(W_Q A, W_K B)`` with ``A B^T = 1`` and ``(W_V N, N^-1 W_O)``,
biases along. What acts between the projection and the product makes the group smaller. The maps
here act from the right on ``W[d_model, d_head]`` and on ``b[d_head]``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kind = Literal[
    "linear",
    "scaled rotations",
    "rotations",
    "orthogonal",
    "signs",
    "pair signs",
    "none",
    "unknown",
]

#: Elements are drawn with singular values between 1 / _STRETCH and _STRETCH.
_STRETCH = 2.0

#: How nearly two gains must agree to count as equal.
_EQUAL = 1e-6

WORDS: dict[str, str] = {
    "linear": "GL({0})",
    "scaled rotations": "{1} blocks (a, b; −b, a)",
    "rotations": "SO(2)^{1}",
    "orthogonal": "O({0})",
    "signs": "{0} signs",
    "pair signs": "{1} pair signs",
    "none": "trivial on {0}",
    "unknown": "not known on {0}",
}


@dataclass(frozen=True)
class Block:
    """One factor of a gauge group, acting on some of a head's dimensions.

    Attributes
    ----------
    kind : str
        ``"linear"``: any invertible map; ``"scaled rotations"``: (a, b; -b, a) on each pair;
        ``"rotations"``: the same with a^2 + b^2 = 1; ``"orthogonal"``; ``"signs"``: of each
        dimension; ``"pair signs"``: of each pair; ``"none"``: the identity alone; ``"unknown"``:
        something acts there that was not understood, so that the identity alone is drawn.
    dims : tuple of int
        In pairs of neighbours for the kinds that act on pairs.
    """

    kind: Kind
    dims: tuple[int, ...]

    @property
    def dimension(self) -> int:
        """Number of continuous parameters."""
        n = len(self.dims)
        return {
            "linear": n * n,
            "scaled rotations": n,
            "rotations": n // 2,
            "orthogonal": n * (n - 1) // 2,
        }.get(self.kind, 0)

    def draw(self, generator: np.random.Generator) -> Array:
        """Return a random element on the block's dimensions, [n, n]."""
        n = len(self.dims)
        if self.kind == "linear":
            return random_invertible(n, generator)
        if self.kind == "orthogonal":
            return random_orthogonal(n, generator)
        if self.kind == "signs":
            return np.diag(_signs(n, generator))
        if self.kind == "pair signs":
            return np.diag(np.repeat(_signs(n // 2, generator), 2))
        if self.kind in ("rotations", "scaled rotations"):
            found = np.zeros((n, n))
            for i in range(0, n, 2):
                angle = generator.uniform(0.5, 2 * np.pi - 0.5)
                length = 1.0
                if self.kind == "scaled rotations":
                    length = np.exp(generator.uniform(-1, 1) * np.log(_STRETCH))
                a, b = length * np.cos(angle), length * np.sin(angle)
                found[i : i + 2, i : i + 2] = [[a, b], [-b, a]]
            return found
        return np.eye(n)


@dataclass(frozen=True)
class Group:
    """The gauge group of one key-value head and the query heads that read it.

    Attributes
    ----------
    blocks : tuple of Block
        Over all of the head's dimensions.
    d_head : int
    """

    blocks: tuple[Block, ...]
    d_head: int

    @property
    def dimension(self) -> int:
        """Dimensions of the redundant space: directions in which weights move and nothing else."""
        return sum(block.dimension for block in self.blocks)

    @property
    def trivial(self) -> bool:
        """Whether the group holds the identity alone."""
        return all(block.kind == "none" for block in self.blocks)

    @property
    def known(self) -> bool:
        """Whether all that acts between projection and product was understood."""
        return all(block.kind != "unknown" for block in self.blocks)

    def draw(self, generator: np.random.Generator) -> tuple[Array, Array]:
        """Return a random element: the maps of queries and of keys, each [d_head, d_head].

        The second is the transposed inverse of the first.
        """
        a = np.eye(self.d_head)
        for block in self.blocks:
            a[np.ix_(block.dims, block.dims)] = block.draw(generator)
        return a, np.asarray(np.linalg.inv(a).T, dtype=np.float64)

    def draw_outside(self, generator: np.random.Generator) -> tuple[Array, Array]:
        """Return maps that belong to a larger group (GL, or one side only) and not to this one."""
        if len(self.blocks) == 1 and self.blocks[0].kind == "linear":
            # Nothing invertible is outside; queries alone must not be changed.
            return random_invertible(self.d_head, generator), np.eye(self.d_head)
        a = random_invertible(self.d_head, generator)
        return a, np.asarray(np.linalg.inv(a).T, dtype=np.float64)

    def words(self) -> str:
        """Name the group, such as ``GL(64)`` or ``8 blocks (a, b; −b, a) x GL(48)``."""
        counts: dict[str, int] = {}
        orthogonal = []
        for block in self.blocks:
            if block.kind == "orthogonal":
                orthogonal.append(WORDS["orthogonal"].format(len(block.dims)))
            elif block.dims:
                counts[block.kind] = counts.get(block.kind, 0) + len(block.dims)
        named = [WORDS[kind].format(n, n // 2) for kind, n in counts.items()]
        text = " x ".join([*named, *orthogonal]) or "trivial"
        return re.sub(r"\b1 (block|sign|pair sign)s\b", r"1 \1", text)


def random_orthogonal(n: int, generator: np.random.Generator) -> Array:
    """Return a random orthogonal matrix, [n, n], uniform under the Haar measure.

    References
    ----------
    Mezzadri, "How to generate random matrices from the classical compact groups" (2007).
    """
    q, r = np.linalg.qr(generator.normal(size=(n, n)))
    signs = np.where(np.diag(r) < 0, -1.0, 1.0)
    return np.asarray(q * signs)


def random_invertible(n: int, generator: np.random.Generator) -> Array:
    """Return a random invertible matrix, [n, n], whose condition number is at most 4.

    An ill-conditioned one would enlarge rounding errors and say nothing more.
    """
    sigma = np.exp(generator.uniform(-1, 1, size=n) * np.log(_STRETCH))
    left, right = random_orthogonal(n, generator), random_orthogonal(n, generator)
    return np.asarray((left * sigma) @ right)


def condition(*maps: Array) -> float:
    """Return the largest condition number among maps."""
    return max(float(np.linalg.cond(m)) for m in maps)


def _signs(n: int, generator: np.random.Generator) -> Array:
    signs = generator.choice([-1.0, 1.0], size=n)
    if n and bool((signs > 0).all()):
        signs[0] = -1.0
    return signs


def query_key_group(
    d_head: int,
    pairs: Sequence[tuple[int, int]],
    gains: Sequence[tuple[Array, Array]] | None = None,
    *,
    centred: bool = False,
) -> Group:
    """Return the gauge group of queries and keys.

    Parameters
    ----------
    d_head : int
    pairs : sequence of (int, int)
        Dimensions that a rotary embedding turns together; empty without one.
    gains : sequence of (q_gain, k_gain), optional
        For each query head of the key-value head, the gains of QK-norm, each [d_head]; None
        without QK-norm.
    centred : bool
        Whether QK-norm subtracts the mean (LayerNorm), which leaves nothing but the identity.

    Returns
    -------
    Group

    Notes
    -----
    Without QK-norm the maps are A on queries and A^-T on keys. A rotary embedding puts
    ``R(i)`` between them, so A must commute with all rotations: on each pair of a frequency of its
    own that is a complex number, (a, b; -b, a), and on unrotated dimensions everything.

    QK-norm divides by the length of q, so A must be orthogonal, and the same for keys; then gains
    g and h follow: ``A^T G H B = G H`` with both orthogonal makes A commute with (G H)^2. For
    unequal gains these are signs.

    With both, a pair's block must also satisfy ``A^T G J H B = G J H`` for the quarter turn J.
    A rotation does only if the pair's gains are equal; the sign of a whole pair always does.
    """
    rotated = {i for pair in pairs for i in pair}
    rest = tuple(i for i in range(d_head) if i not in rotated)
    if gains is None:
        blocks = [Block("scaled rotations", tuple(i for pair in pairs for i in pair))]
        blocks += [Block("linear", rest)]
        return Group(tuple(b for b in blocks if b.dims), d_head)
    if centred:
        return Group((Block("none", tuple(range(d_head))),), d_head)
    q_gains = np.stack([np.abs(q) for q, _ in gains])
    k_gains = np.stack([np.abs(k) for _, k in gains])
    free = [
        (i, j)
        for i, j in pairs
        if _same(q_gains[:, i], q_gains[:, j])
        and _same(k_gains[:, i], k_gains[:, j])
        and all(_aligned(q, k, i, j) for q, k in gains)
    ]
    tied = [pair for pair in pairs if pair not in free]
    blocks = [
        Block("rotations", tuple(i for pair in free for i in pair)),
        Block("pair signs", tuple(i for pair in tied for i in pair)),
    ]
    single: list[int] = []
    for members in _classes(np.stack([q * k for q, k in gains]), rest):
        if len(members) > 1:
            blocks.append(Block("orthogonal", members))
        else:
            single += members
    blocks.append(Block("signs", tuple(single)))
    return Group(tuple(b for b in blocks if b.dims), d_head)


def value_output_group(d_head: int) -> Group:
    """Return the gauge group of values and outputs: everything invertible."""
    return Group((Block("linear", tuple(range(d_head))),), d_head)


def _same(a: Any, b: Any) -> bool:
    return bool(np.all(np.abs(a - b) <= _EQUAL * np.maximum(np.abs(a), np.abs(b))))


def _aligned(q: Array, k: Array, i: int, j: int) -> bool:
    """Whether a pair's gains have the same signs, so that no reflection is hidden in them."""
    return bool(q[i] * q[j] > 0 and k[i] * k[j] > 0)


def _classes(products: Array, dims: Sequence[int]) -> list[tuple[int, ...]]:
    """Group the dimensions whose products of gains, [head, d_head], are equal in all heads."""
    found: list[list[int]] = []
    for i in dims:
        for members in found:
            if _same(products[:, i], products[:, members[0]]):
                members.append(i)
                break
        else:
            found.append([i])
    return [tuple(members) for members in found]
