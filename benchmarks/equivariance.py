"""Distances of all heads beside the direct computation, and the certificates' price in passes.

Run as ``python benchmarks/equivariance.py``; ``--quick`` measures smaller models.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from attnlens_plugins.equivariance.distances import Heads, gram, relative_distances
from numpy.typing import NDArray

Array = NDArray[np.float64]


def heads(count: int, d_model: int, d_head: int) -> Heads:
    generator = np.random.default_rng(0)
    left = generator.normal(size=(count, d_model, d_head))
    right = generator.normal(size=(count, d_head, d_model))
    left[1], right[1] = left[0], right[0]  # two equal heads: the hardest pair for rounding
    return Heads(left, right)


def direct(given: Heads) -> Array:
    """All matrices at once, and one product of them."""
    matrices = (given.left @ given.right).reshape(len(given.left), -1)
    return relative_distances(matrices @ matrices.T)


def pair_by_pair(given: Heads) -> Array:
    """All matrices at once, and each pair's difference."""
    matrices = given.left @ given.right
    square = (matrices**2).sum((1, 2))
    found = np.zeros((len(matrices), len(matrices)))
    for i in range(len(matrices)):
        for j in range(i):
            apart = np.linalg.norm(matrices[i] - matrices[j]) / np.sqrt(square[i] + square[j])
            found[i, j] = found[j, i] = apart
    return found


def ours(given: Heads) -> Array:
    return relative_distances(gram(given))


WAYS: dict[str, Callable[[Heads], Array]] = {
    "ours": ours,
    "direct": direct,
    "pair by pair": pair_by_pair,
}


def measured(way: str, count: int, d_model: int, d_head: int) -> tuple[float, float]:
    """Seconds, and MiB above the heads themselves at the peak, in a process of its own."""
    command = [sys.executable, __file__, "--measure", way]
    command += ["--heads", str(count), "--width", str(d_model), "--d-head", str(d_head)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(found[0]), float(found[1])


def measure(way: str, count: int, d_model: int, d_head: int) -> None:
    given = heads(count, d_model, d_head)
    WAYS[way](heads(4, d_model, d_head))  # libraries load once
    start = time.perf_counter()
    WAYS[way](given)
    seconds = time.perf_counter() - start
    tracemalloc.start()  # numpy reports every array to it
    WAYS[way](given)
    print(seconds, tracemalloc.get_traced_memory()[1] / 2**20)


def distances(count: int, d_model: int, d_head: int, repeats: int) -> None:
    print(f"distances of {count} heads of width {d_head} in a {d_model}-wide model:")
    rows: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):  # in turn, so that a busy machine is busy for all
        for way, found in rows.items():
            found.append(measured(way, count, d_model, d_head))
    medians = {way: np.median(np.array(found), axis=0) for way, found in rows.items()}
    for way, (seconds, mib) in medians.items():
        print(f"  {way}: {seconds:.2f} s, {mib:.0f} MiB above the weights")
    for way in ("direct", "pair by pair"):
        faster, less = medians[way] / medians["ours"]
        print(f"  beside {way}: {faster:.1f} times faster, {less:.0f} times less memory (goal 10)")
    given = heads(min(count, 24), d_model, d_head)
    off = np.abs(ours(given) - pair_by_pair(given)).max()
    print(f"  largest difference of a distance {off:.1e} (goal 1e-6)")


def certificates(layers: int, d_model: int, n_heads: int) -> None:
    """Time every symmetry of a GPT-2 in forward passes of the same model on the same tokens."""
    import torch
    import transformers
    from attnlens_plugins.equivariance import certificate

    import attnlens

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=d_model, n_head=n_heads, n_positions=256, vocab_size=5000,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = attnlens.load_model(transformers.GPT2LMHeadModel(config).eval())
    tokens = torch.randint(0, 5000, (16, 64)).numpy()  # as many as by default
    model.forward(tokens)
    start = time.perf_counter()
    for _ in range(3):
        model.forward(tokens)
    one = (time.perf_counter() - start) / 3
    print(f"GPT-2 of {layers} layers, {d_model} wide: one forward pass {one:.2f} s")
    for name, seconds in certificate.timed(model, tokens).items():
        print(f"  {name}: {seconds:.2f} s, {seconds / one:.1f} forward passes (goal 10)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--heads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--d-head", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.heads, args.width, args.d_head)
        return
    if args.quick:
        distances(24, 256, 32, 1)
        certificates(2, 128, 4)
    else:
        distances(144, 768, 64, 3)
        certificates(12, 768, 12)


if __name__ == "__main__":
    main()
