"""The tensor of one model, compressed as it is read: it is never held whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import attnlens
from attnlens_plugins.cp.sample import Sample, blocks

Floats = npt.NDArray[np.float64]

#: Numbers in one block of tokens: 64 MB of float32.
BLOCK = 1 << 24
#: A tensor of up to so many numbers is kept between the two passes over it.
READ_AT_ONCE = 1 << 25
#: Least size of the core along tokens and features.
_CORE = 48
#: Directions that the range finder keeps beyond those that are used.
_OVERSAMPLE = 10


@dataclass
class Compressed:
    """A tensor over heads and two further modes, those in orthonormal bases.

    ``tensor ~ core x_2 bases[0] x_3 bases[1]``: the heads are all there.

    Attributes
    ----------
    dims : tuple of str
        Names of the modes; the first is ``head``.
    layer, head : ndarray of int [row]
        Numbers of the heads.
    core : ndarray [row, c_1, c_2]
    bases : pair of ndarray [n_k, c_k], or None where the core is the tensor
    energy : ndarray [row]
        Squared norm of each head's slice of the whole tensor; 1 where heads were scaled.
    norm : ndarray [row]
        Norm of each head's slice before scaling.
    gram : ndarray [row, row]
        Inner products of the heads' slices before scaling, exact.
    halves : callable
        ``halves(i)`` gives the core's like of each half of the i-th random split; None where
        nothing can be split.
    compared : tuple of int
        Modes that the halves share.
    split : str
        What is split in halves.
    blocks : callable
        ``blocks()`` reads the tensor itself again, scaled, in blocks ``[row, n, n_2]`` of its
        second mode; None where the core is the tensor.
    """

    dims: tuple[str, str, str]
    layer: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    core: Floats
    bases: tuple[Floats, Floats] | None
    energy: Floats
    norm: Floats
    gram: Floats
    halves: Callable[[int], tuple[Floats, Floats]] | None
    compared: tuple[int, ...] = (0, 1, 2)
    split: str = "prompt"
    blocks: Callable[[], Iterator[Any]] | None = None

    def expand(self, factor: Floats, mode: int) -> Floats:
        """Bring a factor of the core, [c_k, component], back to the tensor's own size."""
        if mode == 0 or self.bases is None:
            return factor
        return self.bases[mode - 1] @ factor

    def take(self, rows: npt.NDArray[np.int64]) -> Compressed:
        """Return the same tensor with some heads alone."""
        whole, read = self.halves, self.blocks

        def halves(i: int) -> tuple[Floats, Floats]:
            assert whole is not None
            a, b = whole(i)
            return a[rows], b[rows]

        def blocks() -> Iterator[Any]:
            assert read is not None
            return (block[rows] for block in read())

        by_head = self.split == "head"
        kept = _by_head(self.core[rows]) if by_head else None if whole is None else halves
        return Compressed(
            self.dims, self.layer[rows], self.head[rows], self.core[rows], self.bases,
            self.energy[rows], self.norm[rows], self.gram[np.ix_(rows, rows)], kept,
            self.compared, self.split, None if read is None else blocks,
        )  # fmt: skip


def kept_features(max_rank: int) -> int:
    """Return how many leading features are kept for fits of up to `max_rank` components."""
    return max(3 * max_rank, _CORE)


def head_outputs(
    store: Any,
    name: str,
    sample: Sample,
    *,
    pooled: bool,
    scaled: bool,
    center: bool,
    max_rank: int,
    seed: int,
) -> Compressed:
    """Compress ``result`` or ``z`` over [head, token, feature] in three passes over the tokens.

    The first pass sums the Gram matrix of the heads, which gives their norms, the second that of
    the features, and the third projects on the leading features; the token mode is compressed
    last, in the space of the leading heads (a sequentially truncated HOSVD).

    Parameters
    ----------
    store : View or Store
    name : {"result", "z"}
    sample : Sample
    pooled : bool
        Take the mean over each prompt as one entry.
    scaled : bool
        Bring every head to norm 1.
    center : bool
        Subtract each head's mean over the entries first.
    max_rank : int
        Largest number of components that will be fitted.
    seed : int
        Of the random halves.

    References
    ----------
    Vannieuwenhoven, Vandebril and Meerbergen, "A new truncation strategy for the higher-order
    singular value decomposition" (2012).
    """
    size = kept_features(max_rank)
    layers, heads = _head_numbers(store, name)
    groups = sample.prompts if pooled else sample.prompt
    source = _Passes(store, name, sample, pooled)
    gram: Any = 0.0
    total: Any = 0.0
    for block in source:
        rows = block.reshape(block.shape[0], -1)
        gram = gram + np.asarray(rows @ rows.T, dtype=np.float64)
        total = total + block.sum(axis=1, dtype=np.float64)
    if center:
        mean = total / len(groups)
        gram = gram - len(groups) * mean @ mean.T
        source.subtract(mean)
    _check_finite(gram, layers, heads, name)
    norm, factor = _scales(gram, scaled)
    directions = _features(source, factor, size, seed)
    core = np.empty((len(gram), len(groups), directions.shape[1]))
    at = 0
    for block in source:
        core[:, at : at + block.shape[1]] = block @ directions.astype(block.dtype)
        at += block.shape[1]
    core *= factor[:, None, None]
    mixed = leading(np.einsum("atc,btc->ab", core, core, optimize=True), size)
    reduced = np.tensordot(mixed, core, axes=(0, 0))
    tokens = _left(np.moveaxis(reduced, 1, 0).reshape(core.shape[1], -1), size)
    core = np.einsum("atc,tk->akc", core, tokens, optimize=True)
    prompts = np.unique(groups)

    def halves(i: int) -> tuple[Floats, Floats]:
        rng = np.random.default_rng([seed, 2, i])
        if len(prompts) >= 4:
            picked = rng.permutation(prompts)[: len(prompts) // 2]
            inside = np.isin(groups, picked)
        else:
            inside = rng.permutation(len(groups)) < len(groups) // 2
        return _rows_of(core, tokens, inside), _rows_of(core, tokens, ~inside)

    return Compressed(
        ("head", "token", "d_head" if name == "z" else "d_model"),
        layers,
        heads,
        core,
        (tokens, directions),
        (norm * factor) ** 2,
        norm,
        gram,
        halves if len(groups) >= 4 else None,
        (0, 2),
        "prompt" if len(prompts) >= 4 else "token",
        lambda: (block * factor.astype(block.dtype)[:, None, None] for block in source),
    )


def _features(source: _Passes, factor: Floats, size: int, seed: int) -> Floats:
    """Return the leading directions of the features, [d, at most size].

    By the Gram matrix where that is small, else by two steps of block power iteration from seeded
    random directions (Halko, Martinsson and Tropp 2011, algorithm 4.4): a quarter of the work at
    width 768.
    """
    width = source.width
    sketch = size + _OVERSAMPLE
    exact = width <= 4 * sketch
    start = np.random.default_rng([seed, 3]).standard_normal((width, min(sketch, width)))
    found = np.eye(width) if exact else np.linalg.qr(start)[0]
    for _ in range(1 if exact else 2):
        grown = np.zeros_like(found)
        for block in source:
            flat = (block * factor.astype(block.dtype)[:, None, None]).reshape(-1, width)
            grown += flat.T @ (flat if exact else flat @ found.astype(flat.dtype))
        found = leading(grown, size) if exact else np.linalg.svd(grown, full_matrices=False)[0]
    return np.asarray(found[:, :size])


def whole(
    tensor: Floats,
    dims: tuple[str, str, str],
    numbers: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    *,
    max_rank: int,
    scaled: bool,
    keep: bool,
    halves: Callable[[int], tuple[Floats, Floats]] | None,
    compared: tuple[int, ...] = (0, 1, 2),
    split: str = "prompt",
) -> Compressed:
    """Compress a tensor that is in memory; with `keep`, leave it as it is.

    Parameters
    ----------
    tensor : ndarray [row, n_1, n_2]
    dims : tuple of str
    numbers : pair of ndarray of int [row]
        Layer and head of each row.
    max_rank : int
    scaled : bool
        Bring every head to norm 1.
    keep : bool
        Non-negative factors are found in the tensor's own space.
    halves : callable, optional
        Tensors of the two halves of the i-th split; without it and with `split` ``"head"``, the
        heads themselves are split.
    compared : tuple of int
    split : str
    """
    flat = tensor.reshape(len(tensor), -1)
    gram = np.asarray(flat @ flat.T, dtype=np.float64)
    _check_finite(gram, *numbers, dims[1])
    norm, factor = _scales(gram, scaled)
    tensor = tensor * factor.astype(tensor.dtype)[:, None, None]
    bases: tuple[Floats, Floats] | None = None
    core = np.asarray(tensor, dtype=np.float64) if keep else tensor
    if not keep:
        size = kept_features(max_rank)
        first = leading(sum(x @ x.T for x in tensor), size)
        core = np.einsum("hab,ac->hcb", tensor, first.astype(tensor.dtype), optimize=True)
        second = leading(sum(x.T @ x for x in core), size)
        core = np.asarray(core @ second.astype(tensor.dtype), dtype=np.float64)
        bases = (first, second)

    def projected(i: int) -> tuple[Floats, Floats]:
        assert halves is not None
        a, b = (x * factor[:, None, None] for x in halves(i))
        if bases is not None:
            a, b = (np.einsum("hab,ac,bd->hcd", x, *bases, optimize=True) for x in (a, b))
        return a, b

    found: Callable[[int], tuple[Floats, Floats]] | None = None
    if halves is not None:
        found = projected
    elif split == "head":
        found = _by_head(core)
    return Compressed(
        dims, *numbers, core, bases, (norm * factor) ** 2, norm, gram, found, compared, split,
        None if keep else lambda: iter([tensor]),
    )  # fmt: skip


def _by_head(core: Floats) -> Callable[[int], tuple[Floats, Floats]] | None:
    """Halve the heads at random; None where they are too few."""

    def halves(i: int) -> tuple[Floats, Floats]:
        rng = np.random.default_rng([0, 2, i])
        inside = rng.permutation(len(core)) < len(core) // 2
        return core[inside], core[~inside]

    return halves if len(core) >= 4 else None


def _scales(gram: Floats, scaled: bool) -> tuple[Floats, Floats]:
    """Return each head's norm, and what it is multiplied with; heads near zero stay as they are."""
    norm = np.sqrt(np.clip(np.diag(gram), 0.0, None))
    if not scaled:
        return norm, np.ones(len(norm))
    alive = norm > 1e-9 * max(float(norm.max(initial=0.0)), 1e-300)
    return norm, np.where(alive, 1.0 / np.where(alive, norm, 1.0), 0.0)


def leading(gram: Any, size: int) -> Floats:
    """Return the leading eigenvectors of a Gram matrix, [n, at most size], signs fixed."""
    values, vectors = np.linalg.eigh(np.asarray(gram, dtype=np.float64))
    keep = max(int((values > 1e-12 * max(values[-1], 0.0)).sum()), 1)
    columns = vectors[:, ::-1][:, : min(size, keep)]
    largest = np.abs(columns).argmax(axis=0)
    signs = np.where(columns[largest, np.arange(columns.shape[1])] < 0, -1.0, 1.0)
    return np.asarray(columns * signs)


def _left(matrix: Floats, size: int) -> Floats:
    """Return the leading left singular vectors of a matrix by its smaller Gram matrix."""
    if matrix.shape[0] <= matrix.shape[1]:
        return leading(matrix @ matrix.T, size)
    right = leading(matrix.T @ matrix, size)
    basis, _ = np.linalg.qr(matrix @ right)
    return np.asarray(basis)


def _rows_of(core: Floats, basis: Floats, inside: npt.NDArray[np.bool_]) -> Floats:
    """Restrict the second mode to some of its entries, up to a rotation of that mode."""
    upper = np.linalg.qr(basis[inside], mode="r")
    return np.asarray(np.einsum("akc,jk->ajc", core, upper, optimize=True))


class _Passes:
    """The blocks of an activation, read anew for each pass unless they are few.

    ``width`` is the number of features.
    """

    def __init__(self, store: Any, name: str, sample: Sample, pooled: bool) -> None:
        self._how = (store, name, sample)
        self._pooled = pooled
        self._kept: list[Any] | None = None
        self._mean: Floats | None = None
        data = next(iter(store.units()))[name]
        self.width = int(data.sizes[data.dims[-1]])

    def subtract(self, mean: Floats) -> None:
        """Subtract a mean over [row, feature] from all that is read from now on."""
        self._mean = mean

    def __iter__(self) -> Any:
        for block in self._read():
            yield block if self._mean is None else block - self._mean.astype(block.dtype)[:, None]

    def _read(self) -> Any:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Any] = []
        total = at = 0
        store, name, sample = self._how
        for block in blocks(store, name, sample, BLOCK):
            if self._pooled:
                which = sample.prompt[at : at + block.shape[1]]
                means = [block[:, which == p].mean(axis=1) for p in np.unique(which)]
                at += block.shape[1]
                block = np.stack(means, axis=1)
            # Small tensors are worth double precision; large ones are not worth its memory.
            total += block.size
            if total <= READ_AT_ONCE:
                block = block.astype(np.float64)
                kept.append(block)
            else:
                kept.clear()
            yield block
        if total <= READ_AT_ONCE:
            self._kept = kept


def _head_numbers(store: Any, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    data = next(iter(store.units()))[name]
    return grid(data["layer"].values, data["head"].values)


def grid(
    layers: Sequence[int] | npt.NDArray[Any], heads: Sequence[int] | npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return layer and head of each row, layer by layer."""
    return (
        np.repeat(np.asarray(layers, dtype=np.int64), len(heads)),
        np.tile(np.asarray(heads, dtype=np.int64), len(layers)),
    )


def _check_finite(gram: Floats, layers: Any, heads: Any, name: str) -> None:
    bad = np.flatnonzero(~np.isfinite(np.diag(gram)))
    if len(bad):
        raise attnlens.errors.DecompositionError(
            f"{name} of head {layers[bad[0]]}.{heads[bad[0]]} holds NaN or infinity.",
            hint="Capture again: captured tensors are checked for that on arrival.",
        )
