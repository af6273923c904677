"""Patterns and scores that are computed when they are read, of stored queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnlens.activations import MASKED_SCORE
from attnlens.store.lazy import OuterArray
from attnlens.store.rules import ScoreRule
from attnlens.store.shards import Index

#: Queries that are worked on at a time: causal rows then end where their keys do.
_ROWS: Final = 128
#: Bytes of queries that are read at a time.
_READ: Final = 64 << 20


class Rebuilt(OuterArray):
    """Scores or weights over [prompt, layer, head, query_pos, key_pos].

    Only the rows that are asked for are computed; the softmax is over all keys whichever are
    asked for. What lies beyond a prompt's length is NaN.

    Parameters
    ----------
    what : {"scores", "pattern"}
    q, k : OuterArray
        ``q_rot`` and ``k_rot``, over [prompt, layer, pos, head or kv_head, d_head].
    rules : sequence of ScoreRule
        One for each layer that `q` holds.
    heads : sequence of int
        Number of each head that `q` holds.
    places : ndarray of int, [head]
        Where along ``kv_head`` each head's keys lie.
    lengths : ndarray of int, [prompt]
    """

    def __init__(
        self,
        what: Literal["scores", "pattern"],
        q: OuterArray,
        k: OuterArray,
        *,
        rules: Sequence[ScoreRule],
        heads: Sequence[int],
        places: Index,
        lengths: Index,
    ) -> None:
        self.what = what
        self.q, self.k = q, k
        self.rules, self.heads = rules, heads
        self.places, self.lengths = places, lengths
        prompts, layers, n, n_heads, _ = q.shape
        self.shape = (prompts, layers, n_heads, n, n)
        self.dtype = np.result_type(q.dtype, k.dtype)

    def read(self, selection: Sequence[Index]) -> npt.NDArray[Any]:
        """Compute the outer product of the indices."""
        prompts, layers, heads, rows, cols = selection
        out = np.full([len(i) for i in selection], np.nan, dtype=self.dtype)
        if not out.size:
            return out
        n, d = self.shape[-1], self.q.shape[-1]
        width = np.arange(d)
        groups = np.unique(self.places[heads])
        step = max(1, _READ // max(1, n * len(heads) * d * self.dtype.itemsize))
        for at, layer in enumerate(layers):
            for start in range(0, len(prompts), step):
                some = prompts[start : start + step]
                here = np.array([layer])
                q = self.q.read([some, here, rows, heads, width])[:, 0]
                k = self.k.read([some, here, np.arange(n), groups, width])[:, 0]
                for i, prompt in enumerate(some):
                    for j, head in enumerate(heads):
                        group = int(np.searchsorted(groups, self.places[head]))
                        length = int(self.lengths[prompt])
                        self._fill(
                            out[start + i, at, j],
                            q[i, :, j],
                            np.ascontiguousarray(k[i, :length, group]),
                            self.rules[layer],
                            self.heads[head],
                            rows,
                            cols,
                        )
        return out

    def _fill(
        self,
        out: npt.NDArray[Any],
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        rule: ScoreRule,
        head: int,
        rows: Index,
        cols: Index,
    ) -> None:
        """Compute one head of one prompt into `out`, [row, column]."""
        length = len(k)
        real = np.flatnonzero(cols < length)
        empty = 0.0 if self.what == "pattern" else MASKED_SCORE
        for start in range(0, len(rows), _ROWS):
            block = start + np.flatnonzero(rows[start : start + _ROWS] < length)
            if not len(block):
                continue
            at = rows[block]
            low, high = rule.keys(int(at.min()), int(at.max()), length)
            made = rule.scores(q[block], k[low:high], at, low, head)
            if self.what == "pattern":
                made -= made.max(axis=1, keepdims=True)
                np.exp(made, out=made)
                made /= made.sum(axis=1, keepdims=True)
            whole = np.full((len(block), length), empty, dtype=self.dtype)
            whole[:, low:high] = made
            out[np.ix_(block, real)] = whole[:, cols[real]]
