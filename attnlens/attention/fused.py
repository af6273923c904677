"""Fused attention kernels: products with softmax(scale q k^T) that never hold n x n numbers.

The public ``scaled_dot_product_attention`` does not return the rows' log-sum-exp; the operators
behind it do. They are private to torch, so each is tried once per device and dtype against plain
arithmetic, and used only where it agrees.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

#: Widest product of one call; wider values are cut.
_MAX_WIDTH = 256


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale q k^T + bias) v and the log-sum-exp of its rows.

    Parameters
    ----------
    q : Tensor, [batch, group, pos, d_head]
    k : Tensor, [batch, 1 or group, pos, d_head]
        Shared by a group where its second dimension is 1.
    v : Tensor, [batch, 1 or group, pos, column]
    scale : float
    causal : bool
    bias : Tensor, [batch, 1 or group, pos], optional
        Added to all scores of a key; finite.

    Returns
    -------
    tuple of Tensor
        [batch, group, pos, column] and [batch, group, pos].
    """
    batch, group, n, d = q.shape
    columns = v.shape[-1]
    # The kernels want q, k and v of one width. Padding q and k to the width of v costs less than
    # calling again for every d columns: each call exponentiates the whole matrix.
    width = -(-min(max(d, columns), _MAX_WIDTH) // 8) * 8
    if q.device.type != "cpu" and bias is not None:
        # There a bias would have to be an n x n tensor: let it ride on one more dimension.
        q = torch.cat((q, torch.ones_like(q[..., :1])), -1)
        k = torch.cat((k.expand(batch, bias.shape[1], n, d), bias[..., None] / scale), -1)
        bias = None
        width = max(width, -(-(d + 1) // 8) * 8)
    q, k = widened(q, width), widened(k, width).expand(batch, group, n, width)
    parts = []
    for start in range(0, columns, width):
        part = widened(v[..., start : start + width], width).expand(batch, group, n, width)
        out, lse = _call(q, k, part, scale, causal, bias)
        parts.append(out[..., : min(width, columns - start)])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)), lse


def widened(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension with zeros, and see that it is dense: the kernels take it to be."""
    if x.shape[-1] < width:
        return torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        row = None if bias is None else bias[:, :, None, :]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=row, scale=scale
        )
        return out, lse
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    # This kernel pads the log-sum-exp to a multiple of 32 rows.
    return found[0], found[1][..., : q.shape[-2]]


@functools.cache
def supported(device: str, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for the device and dtype that agrees with plain arithmetic."""
    if device not in ("cpu", "cuda") or (device == "cuda" and dtype != torch.float32):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, v, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 2, 40, 8), (2, 1, 40, 8), (2, 2, 40, 12), (2, 2, 40))
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    try:
        for causal in (False, True):
            given = [x.to(device, dtype) for x in (q, k, v, bias)]
            out, lse = attend(*given[:3], scale=0.5, causal=causal, bias=given[3])
            scores = 0.5 * q @ k.mT + bias[:, :, None, :]
            if causal:
                scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -1e300)
            wrong = (out.cpu().double() - scores.softmax(-1) @ v).abs().amax()
            wrong += (lse.cpu().double() - scores.logsumexp(-1)).abs().amax()
            if not float(wrong) < tolerance:
                return False
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True
