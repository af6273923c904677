"""Attention backed by queries and keys: memory linear in the number of positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnlens.attention import fused
from attnlens.attention.blocked import Block, Scores, lowest
from attnlens.attention.convert import pairs_of, wide
from attnlens.attention.dense import add_diagonals, renyi_near_one
from attnlens.attention.masks import Mask

#: Bytes of queries and keys that `Factored.entries` gathers at a time.
_GATHER_BYTES = 16 << 20

#: The kernels give one number for a row's log-sum-exp: beside larger scores, where attention is
#: hard, it could not tell one largest key from several.
_FUSED_SCORE = 1e4


class Factored:
    """Attention over [prompt, head, query_pos, key_pos] as softmax(scale q k^T + mask).

    Parameters
    ----------
    q : Tensor, [prompt, head, pos, d_head]
    k : Tensor, [prompt, kv_head, pos, d_head]
        Query head h reads key-value head ``h // (head / kv_head)``. Where a prompt has a length,
        q and k beyond it must be zero.
    mask : Mask
    scale : float
    soft_cap : float or None
    slopes : Tensor or None, [prompt, head]
    bound : float
        No score is larger in size.
    dtype : torch.dtype
        Of products and weights. q and k may be wider, where float32 would lose too much.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        mask: Mask,
        *,
        scale: float,
        soft_cap: float | None,
        slopes: Tensor | None,
        bound: float,
        dtype: torch.dtype,
    ) -> None:
        prompts, heads, n, d = q.shape
        kv_heads = k.shape[1]
        self.q, self.k, self.mask = q, k, mask
        self.slopes, self.bound = slopes, bound
        self.shape = (prompts, heads, n)
        self.device = q.device
        self.dtype = dtype
        self.wide = wide(q.device)
        self.group = heads // kv_heads
        # One entry of the batch per prompt and key-value head: its keys are shared, not copied.
        of = torch.arange(prompts, device=q.device).repeat_interleave(kv_heads)
        self._prompt_of = of
        self._scores = Scores(
            q.reshape(prompts * kv_heads, self.group, n, d),
            k.reshape(prompts * kv_heads, 1, n, d),
            mask.part(of),
            scale,
            soft_cap,
            None if slopes is None else slopes.reshape(prompts * kv_heads, self.group),
        )
        self._fused = (
            mask.window is None
            and mask.prefix is None
            and soft_cap is None
            and slopes is None
            and bound < _FUSED_SCORE
            and fused.supported(q.device.type, q.dtype)
        )
        self._alive = mask.visible(q.device)[:, None] > 0

    # ---- plumbing ---------------------------------------------------------------------------

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, group, ...] -> [prompt, head, ...]."""
        return x.reshape(*self.shape[:2], *x.shape[2:])

    def _batch(self, x: Tensor) -> Tensor:
        """[prompt, head, ...] -> [batch, group, ...]."""
        return x.reshape(-1, self.group, *x.shape[2:])

    def _live(self, x: Tensor) -> Tensor:
        """Zero the rows that see no key, and give the accumulating dtype."""
        return torch.where(self._alive, self._heads(x), 0.0).to(self.wide)

    def _zeros(self, *size: int) -> Tensor:
        lead = self._scores.q.shape[:2]
        return torch.zeros(*lead, *size, dtype=self.wide, device=self.device)

    @functools.cached_property
    def _key_bias(self) -> Tensor | None:
        """What hides the keys beyond a prompt's length where causality does not."""
        lengths = self._scores.mask.lengths
        if lengths is None or self.mask.causal:
            return None
        beyond = torch.arange(self.shape[2], device=self.device) >= lengths[:, None, None]
        return torch.where(beyond, lowest(torch.float32), 0.0).to(self.q.dtype)

    def _attend(self, x: Tensor, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return A X and the log-sum-exp, fused; x [batch, 1 or group, pos, column]."""
        s = self._scores
        return fused.attend(
            s.q, s.k, x, scale=s.scale * alpha, causal=self.mask.causal, bias=self._key_bias
        )

    @functools.cached_property
    def _lse(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of each row, as `Scores.row_lse`; 0 for rows that see no key.

        There every score is `lowest`, and weights come out 0.
        """
        alive = self._batch(self._alive.expand(self.shape[0], self.shape[1], -1))
        top, rest = self._raw_lse(1.0)
        return torch.where(alive, top, 0.0), torch.where(alive, rest, 0.0)

    def _weights(self) -> Iterator[Block]:
        return self._scores.weights(*self._lse)

    # ---- rows -------------------------------------------------------------------------------

    def entropy(self) -> Tensor:
        """Return ``LSE_i - scale q_i . (A k)_i``, or the blocked sum where scores are bent."""
        if not self._fused:
            return self._live(self._scores.entropy()).clamp_min_(0.0)
        s = self._scores
        mean_key, lse = self._attend(s.k)
        mean: Tensor = torch.linalg.vecdot(s.q, mean_key)
        return self._live(lse - s.scale * mean).clamp_min_(0.0)

    def row_lse(self, alpha: float) -> Tensor:
        """Return ``ln sum_j exp(alpha s_ij)``; -inf for rows that see no key."""
        top, rest = self._lse if alpha == 1.0 else self._raw_lse(alpha)
        total = top.to(self.wide) + rest.to(self.wide)
        return torch.where(self._alive, self._heads(total), -math.inf)

    def _raw_lse(self, alpha: float) -> tuple[Tensor, Tensor]:
        if not self._fused:
            return self._scores.row_lse(alpha)
        lse = self._attend(self._scores.k, alpha)[1]
        return lse, torch.zeros_like(lse)

    def _log_power_sum(self, alpha: float) -> Tensor:
        """Return ``ln sum_j p_ij^alpha = LSE(alpha) - alpha LSE(1)``, [batch, group, pos]."""
        (top, rest), (one, others) = self._raw_lse(alpha), self._lse
        if self._fused:
            return top.to(self.wide) - alpha * one.to(self.wide)
        # The largest scores are the same ones, alpha times: they cancel exactly.
        return rest.to(self.wide) - alpha * others.to(self.wide)

    def renyi(self, alpha: float) -> Tensor:
        """Return ``ln(sum p^alpha) / (1 - alpha)``, alpha not 1."""
        if abs(alpha - 1.0) <= 0.05:
            out = self._zeros(self.shape[2])
            for b in self._weights():
                out[b.batch, :, b.rows] = renyi_near_one(b.scores, alpha).to(self.wide)
            return self._live(out)
        return self._live(self._log_power_sum(alpha) / (1.0 - alpha))

    def frobenius2(self) -> Tensor:
        """Return ``sum_i exp(LSE_i(2) - 2 LSE_i(1))``."""
        rows = self._heads(self._log_power_sum(2.0).exp())
        return torch.where(self._alive, rows, 0.0).sum(-1)

    def max(self) -> Tensor:
        """Return the largest weight of each row."""
        top, rest = self._lse
        if self._fused:
            top = top - self._scores.largest()
            return self._live(top.neg_().exp_()).clamp_max_(1.0)
        return self._live(rest.neg().exp_()).clamp_max_(1.0)

    def top_keys(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest weights of each row and their keys."""
        lead = (*self._scores.q.shape[:3], k)
        weights = torch.zeros(lead, dtype=self.dtype, device=self.device)
        keys = torch.zeros(lead, dtype=torch.int64, device=self.device)
        for b in self._weights():
            found, at = b.scores.topk(min(k, b.scores.shape[-1]), dim=-1)
            weights[b.batch, :, b.rows, : found.shape[-1]] = found.to(self.dtype)
            keys[b.batch, :, b.rows, : found.shape[-1]] = at + b.cols.start
        return self._heads(weights), self._heads(keys)

    # ---- keys, distances, cells -------------------------------------------------------------

    def column_sums(self) -> Tensor:
        """Return A^T 1."""
        if not self._fused:
            out = self._zeros(self.shape[2])
            for b in self._weights():
                out[b.batch, :, b.cols] += b.scores.sum(-2).to(self.wide)
            return self._heads(out)
        ones = self._alive[..., None].expand(*self.shape, 1).to(self.q.dtype)
        return self._gather_rows(ones)[..., 0].to(self.wide)

    def offset_sums(self) -> Tensor:
        """Return the total weight at each distance."""
        n = self.shape[2]
        out = self._zeros(2 * n - 1)
        flat = out.view(-1, 2 * n - 1)
        for b in self._weights():
            part = slice(b.batch.start * self.group, b.batch.stop * self.group)
            block = b.scores.flatten(0, 1)
            add_diagonals(flat[part], b.rows.start, b.cols.start, block)
        return self._heads(out)[..., n - 1 if self.mask.one_sided else 0 :]

    def entries(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return ``exp(s_ij - LSE_i)`` at chosen cells."""
        prompts, heads, _ = self.shape
        size = (prompts, heads, rows.shape[-1])
        rows, cols = rows.expand(size), cols.expand(size)
        step = max(1, _GATHER_BYTES // max(1, prompts * heads * self.q[0, 0, 0].nbytes))
        parts = [
            self._cells(rows[..., at : at + step], cols[..., at : at + step])
            for at in range(0, max(1, size[-1]), step)
        ]
        return torch.cat(parts, -1)

    def _cells(self, rows: Tensor, cols: Tensor) -> Tensor:
        prompts, heads, m = rows.shape
        q = torch.take_along_dim(self.q, rows[..., None], 2)
        shared = cols.reshape(prompts, heads // self.group, self.group * m, 1)
        k = torch.take_along_dim(self.k, shared, 2).view_as(q)
        scores: Tensor = torch.linalg.vecdot(q, k).mul_(self._scores.scale)
        slopes = None if self.slopes is None else self.slopes[..., None]
        self._scores.bend(scores, rows - cols, slopes)
        top, rest = (torch.take_along_dim(self._heads(x), rows, 2) for x in self._lse)
        of = torch.arange(prompts, device=self.device)[:, None, None]
        seen = self.mask.sees(rows, cols, of)
        # Unseen cells may have any score: theirs must not reach the exponential.
        weight = torch.where(seen, scores - top - rest, 0.0).exp_()
        return torch.where(seen, weight, 0.0).to(self.dtype)

    def matched(self, query_label: Tensor, key_label: Tensor) -> Tensor:
        """Return per row the weight on earlier keys whose label is the query's."""
        out = self._zeros(self.shape[2])
        query_label, key_label = query_label[self._prompt_of], key_label[self._prompt_of]
        for b in self._weights():
            same = query_label[b.batch, b.rows, None] == key_label[b.batch, None, b.cols]
            same = same.tril(b.rows.start - b.cols.start - 1)[:, None]
            out[b.batch, :, b.rows] = torch.where(same, b.scores, 0.0).sum(-1).to(self.wide)
        return self._heads(out)

    # ---- as an operator ---------------------------------------------------------------------

    def matmul(self, x: Tensor) -> Tensor:
        """Return A X."""
        x = self._batch(x.to(self.q.dtype))
        if self._fused:
            out = self._attend(x)[0]
        else:
            out = torch.empty_like(x)
            for b in self._weights():
                out[b.batch, :, b.rows] = b.scores @ x[b.batch, :, b.cols]
        return torch.where(self._alive[..., None], self._heads(out), 0.0).to(self.dtype)

    def rmatmul(self, y: Tensor) -> Tensor:
        """Return A^T Y."""
        if self._fused:
            return self._gather_rows(y.to(self.q.dtype)).to(self.dtype)
        y = self._batch(y.to(self.q.dtype))
        out = torch.zeros_like(y)
        for b in self._weights():
            out[b.batch, :, b.cols] += b.scores.mT @ y[b.batch, :, b.rows]
        return self._heads(out).to(self.dtype)

    def _gather_rows(self, y: Tensor) -> Tensor:
        """Return A^T Y by fused attention from keys to queries; y must be 0 in dead rows.

        Column j of A holds ``exp(s_ij - LSE_i)``: attention of key j over the queries, with -LSE_i
        as their bias, times its own normaliser. A causal key sees the queries from itself on,
        which is causal once both sequences are reversed.
        """
        s = self._scores
        columns = y.shape[-1]
        # As wide as the kernel wants it, so that it need not be copied once more.
        y = fused.widened(self._batch(y), s.q.shape[-1])
        q, k, bias = s.q, s.k, -self._lse[0]
        if self.mask.causal:
            q, k, y, bias = q.flip(2), k.flip(2), y.flip(2), bias.flip(2)
        k = k.expand(-1, self.group, -1, -1)
        out, mass = fused.attend(
            k, q, y, scale=s.scale, causal=self.mask.causal, bias=bias.contiguous()
        )
        del q, k, y
        out = out[..., :columns].mul_(mass.exp()[..., None])
        out = self._heads(out.flip(2) if self.mask.causal else out)
        lengths = self.mask.lengths
        if lengths is None:
            return out
        inside = torch.arange(self.shape[2], device=self.device) < lengths[:, None]
        return torch.where(inside[:, None, :, None], out, 0.0)

    def dense(self) -> Tensor:
        """Return the weights themselves."""
        n = self.shape[2]
        out = torch.zeros(*self._scores.q.shape[:2], n, n, dtype=self.dtype, device=self.device)
        for b in self._weights():
            out[b.batch, :, b.rows, b.cols] = b.scores.to(self.dtype)
        return self._heads(out)

    def part(self, prompts: Tensor, heads: Tensor) -> Factored:
        """Return chosen (prompt, head) pairs as [pair, 1, ...], with their log-sum-exp."""
        part = self._like(
            pairs_of(self.q, prompts, heads),
            pairs_of(self.k, prompts, heads // self.group),
            prompts,
            None if self.slopes is None else pairs_of(self.slopes, prompts, heads),
        )
        part.__dict__["_lse"] = tuple(pairs_of(self._heads(x), prompts, heads) for x in self._lse)
        return part

    def take(self, prompts: Tensor, heads: Tensor) -> Factored:
        """Return chosen prompts x chosen heads; the index tensors are [prompt] and [head]."""
        p = prompts[:, None]
        return self._like(
            self.q[p, heads],
            self.k[p, heads // self.group],
            prompts,
            None if self.slopes is None else self.slopes[p, heads],
        )

    def _like(self, q: Tensor, k: Tensor, prompts: Tensor, slopes: Tensor | None) -> Factored:
        return Factored(
            q,
            k,
            self.mask.part(prompts),
            scale=self._scores.scale,
            soft_cap=self._scores.soft_cap,
            slopes=slopes,
            bound=self.bound,
            dtype=self.dtype,
        )
