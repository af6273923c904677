"""Attention from queries and keys beside the dense matrix: time and memory, as ratios in one run.

Run as ``python benchmarks/attention.py``; ``--quick`` measures shorter sequences.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attnlens.attention import Attention

D_HEAD = 64
SCALE = D_HEAD**-0.5


def vectors(n: int) -> tuple[Tensor, Tensor]:
    """Make queries and keys [head, pos, d_head]; scores have a standard deviation of about 1.5."""
    generator = torch.Generator().manual_seed(0)
    q, k = (1.22 * torch.randn(1, n, D_HEAD, generator=generator) for _ in range(2))
    return q, k


def dense(q: Tensor, k: Tensor) -> Tensor:
    """Return the pattern, as eager attention makes it."""
    n = q.shape[-2]
    scores = q @ k.mT * SCALE
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    return scores.masked_fill_(hidden, torch.finfo(scores.dtype).min).softmax(-1)


def side_by_side(
    what: str, ours: Callable[[], object], theirs: Callable[[], object], repeats: int, want: float
) -> None:
    """Time both in turn and print medians, spreads and the ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    ours()
    for _ in range(repeats):
        for call, found in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    mine, other = (statistics.median(x) for x in times)
    spread = [
        f"{m:.3f} s ({min(x):.3f}-{max(x):.3f})" for m, x in zip((mine, other), times, strict=True)
    ]
    print(
        f"{what}: {spread[0]}, dense {spread[1]}: {other / mine:.1f} times faster (goal {want:g})"
    )


def entropy(n: int) -> None:
    q, k = vectors(n)

    def ours() -> Tensor:
        return Attention.from_qk(q, k, scale=SCALE).entropy()

    def theirs() -> Tensor:
        return torch.special.entr(dense(q, k)).sum(-1)

    side_by_side(f"row entropy, {n} tokens", ours, theirs, 5, 8)
    p = dense(q, k)
    side_by_side(
        f"row entropy, {n} tokens, the dense matrix given",
        ours,
        lambda: torch.special.entr(p).sum(-1),
        5,
        1,
    )
    print(f"  largest difference {float((ours() - theirs()).abs().max()):.1e} nats")


def spectrum(n: int) -> None:
    q, k = vectors(n)

    def ours() -> Tensor:
        return Attention.from_qk(q, k, scale=SCALE).singular_values(32)

    def theirs() -> Tensor:
        return torch.linalg.svdvals(dense(q, k))

    side_by_side(f"top 32 singular values, {n} tokens", ours, theirs, 1, 10)
    exact = theirs()[0]
    wrong = (ours()[0] - exact[:32]).abs().max() / exact[0]
    print(f"  largest error {100 * float(wrong):.2f} % of sigma_1 (goal 3 %)")
    start = time.perf_counter()
    value, error = Attention.from_qk(q, k, scale=SCALE).effective_rank()
    seconds = time.perf_counter() - start
    true = torch.special.entr(exact / exact.sum()).sum().exp()
    print(
        f"  effective rank {float(value):.0f} +- {float(error):.0f}, exactly {float(true):.0f}, "
        f"in {seconds:.2f} s"
    )


def memory(n: int) -> None:
    """Measure each quantity in a process of its own: a peak never falls again."""
    limit = n * n * 4 / 20 / 2**20
    for what in ("entropy", "received", "max", "by_offset", "svd"):
        command = [sys.executable, __file__, "--peak", what, "--positions", str(n)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(
            f"memory above the inputs, {what}, one head, {n} tokens: {float(found):.1f} MiB "
            f"(goal {limit:.1f}: a twentieth of one dense matrix)"
        )


def peak(what: str, n: int) -> float:
    """MiB that one quantity adds to the process's peak once the inputs are there."""

    def measure(q: Tensor, k: Tensor) -> None:
        attention = Attention.from_qk(q, k, scale=SCALE)
        _ = attention.svd(32) if what == "svd" else getattr(attention, what)()

    q, k = vectors(n)
    measure(q[:, :1024].clone(), k[:, :1024].clone())  # libraries load their own memory once
    # What loading needed must not hide what is measured.
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    measure(q, k)
    return high_water() - before


def high_water() -> float:
    """MiB that this process has held at most; getrusage would start from its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--positions", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(peak(args.peak, args.positions))
        return
    entropy(1024 if args.quick else 4096)
    spectrum(1024 if args.quick else 4096)
    memory(4096 if args.quick else 16384)


if __name__ == "__main__":
    main()
