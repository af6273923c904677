"""The decomposition engine against tensorly: one thread, float64, the same tensors.

    OMP_NUM_THREADS=1 python benchmarks/decomposition.py [scan] [nonnegative] [tucker] [planted]

Each comparison alternates the two sides, and prints the ratio of the median times with the
smallest and largest ratio over the repeats, and the errors of both sides. Times are those of the
one thread's CPU, as other work on the machine would show in the wall clock; ``--wall`` for that.
``--quick`` runs fewer ranks and restarts, the same on both sides, and says which; nothing is
extrapolated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy as np  # noqa: E402
import tensorly as tl  # noqa: E402
import tlviz  # noqa: E402
import torch  # noqa: E402
from tensorly.decomposition import non_negative_parafac_hals, parafac  # noqa: E402

from attnlens.decomposition import cp, tucker  # noqa: E402

torch.set_num_threads(1)
CLOCK = time.process_time


def add_noise(tensor: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    white = rng.standard_normal(tensor.shape)
    return tensor + share * np.linalg.norm(tensor) / np.linalg.norm(white) * white


def planted(shape: tuple[int, ...], rank: int, noise: float, seed: int) -> np.ndarray:
    """Draw normal factors under white noise."""
    rng = np.random.default_rng(seed)
    factors = [rng.standard_normal((n, rank)) for n in shape]
    return add_noise(np.einsum("ir,jr,kr->ijk", *factors), noise, rng)


def decaying(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Forty correlated components of falling weight under a tenth of noise."""
    rng = np.random.default_rng(seed)
    rank = 40
    factors = [rng.standard_normal((n, rank)) + 0.7 * rng.standard_normal((n, 1)) for n in shape]
    weights = 1.0 / np.arange(1, rank + 1)
    return add_noise(np.einsum("r,ir,jr,kr->ijk", weights, *factors), 0.1, rng)


def nonnegative_planted(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Sparse exponential factors, non-negative noise."""
    rng = np.random.default_rng(seed)
    factors = [rng.exponential(size=(n, 6)) * (rng.random((n, 6)) < 0.5) for n in shape]
    tensor = np.einsum("ir,jr,kr->ijk", *factors)
    return tensor + np.abs(0.2 * tensor.std() * rng.standard_normal(shape))


def attention(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Causal patterns: softmax of mixtures of the kinds of head that models have."""
    rng = np.random.default_rng(seed)
    heads, n, _ = shape
    row = np.arange(n)
    distance = row[:, None] - row[None]
    kinds = np.stack(
        [
            -0.5 * np.abs(distance - 1),  # previous token
            4.0 * (row[None] == 0) * np.ones((n, 1)),  # sink
            -0.02 * distance,
            3.0 * (distance % 37 == 0),  # repeats
            -0.3 * distance,
            0.0 * distance,
        ]
    )
    weights = rng.exponential(size=(heads, 6)) * (rng.random((heads, 6)) < 0.5) * 2
    logits = np.einsum("hf,fij->hij", weights, kinds) + 0.5 * rng.standard_normal(shape)
    logits = np.where(distance < 0, -np.inf, logits)
    pattern = np.exp(logits - logits.max(-1, keepdims=True))
    return pattern / pattern.sum(-1, keepdims=True)


def error_of(tensor: np.ndarray, model: np.ndarray) -> float:
    return float(np.linalg.norm(tensor - model) / np.linalg.norm(tensor))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = CLOCK()
    value = call()
    return CLOCK() - start, value


def compare(
    title: str,
    ours: Callable[[], dict[Any, float]],
    theirs: Callable[[], dict[Any, float]],
    repeats: int,
    target: float,
) -> bool:
    """Time both sides in turn; each returns its errors by case."""
    mine, other, errors, reference = [], [], {}, {}
    for _ in range(repeats):
        seconds, errors = timed(ours)
        mine.append(seconds)
        seconds, reference = timed(theirs)
        other.append(seconds)
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    ratio = statistics.median(other) / statistics.median(mine)
    excess = {k: errors[k] - reference[k] for k in errors}
    worst = max(excess, key=lambda k: excess[k])
    # Both sides stop at a tolerance of 1e-8 to 1e-6: differences below that are no difference.
    met = ratio >= target and excess[worst] <= 1e-6
    print(
        f"{title}\n"
        f"  attnlens {statistics.median(mine):.3f} s, tensorly {statistics.median(other):.3f} s: "
        f"ratio {ratio:.1f} ({min(ratios):.1f} to {max(ratios):.1f} over {repeats}), "
        f"target {target:.0f}: {'met' if met else 'MISSED'}\n"
        f"  error, attnlens minus tensorly: at most {excess[worst]:+.2e} (at {worst}), at least "
        f"{min(excess.values()):+.2e}",
        flush=True,
    )
    return met


def scan(args: argparse.Namespace) -> bool:
    """Ranks 1 to 12, ten restarts each, and core consistency, on [144, 256, 64]."""
    ranks = [2, 6, 12] if args.quick else list(range(1, 13))
    restarts = 3 if args.quick else 10
    scope = f"ranks {ranks}, {restarts} restarts each, both sides" + (
        " (quick: a subset)" if args.quick else ""
    )
    met = True
    for name, tensor in (
        ("decaying", decaying((144, 256, 64), 0)),
        ("planted rank 8, noise 0.5", planted((144, 256, 64), 8, 0.5, 0)),
    ):

        def ours(tensor: np.ndarray = tensor) -> dict[int, float]:
            return {r: f.error for r, f in cp(tensor, ranks, n_restarts=restarts).items()}

        def loop(tensor: np.ndarray = tensor) -> dict[int, float]:
            errors = {}
            for rank in ranks:
                fits = [
                    parafac(tensor, rank, init="random", random_state=s) for s in range(restarts)
                ]
                scored = [error_of(tensor, tl.cp_to_tensor(f)) for f in fits]
                best = int(np.argmin(scored))
                tlviz.model_evaluation.core_consistency(fits[best], tensor)
                errors[rank] = scored[best]
            return errors

        def by_hand(tensor: np.ndarray = tensor) -> dict[int, float]:
            bases = []
            for mode in range(3):
                flat = tl.unfold(tensor, mode)
                bases.append(np.linalg.eigh(flat @ flat.T)[1][:, -3 * max(ranks) :])
            core = tl.tenalg.multi_mode_dot(tensor, bases, transpose=True)
            errors = {}
            for rank in ranks:
                fits = [parafac(core, rank, init="random", random_state=s) for s in range(restarts)]
                best = min(fits, key=lambda f: error_of(core, tl.cp_to_tensor(f)))
                full = (best[0], [b @ f for b, f in zip(bases, best[1], strict=True)])
                tlviz.model_evaluation.core_consistency(full, tensor)
                errors[rank] = error_of(tensor, tl.cp_to_tensor(full))
            return errors

        where = f"CP scan of the {name} tensor [144, 256, 64], {scope}"
        met &= compare(f"{where}: hand-compressed core", ours, by_hand, args.repeats, 4)
        if not args.no_loop:
            met &= compare(f"{where}: loop over parafac", ours, loop, args.loop_repeats, 30)
    return met


def nonnegative(args: argparse.Namespace) -> bool:
    """Non-negative CP of [64, 256, 256]: ten restarts against one run of tensorly."""
    met = True
    for name, make in (("planted", nonnegative_planted), ("attention", attention)):
        tensor = make((64, 256, 256), 0)
        for rank in (4, 8):

            def ours(tensor: np.ndarray = tensor, rank: int = rank) -> dict[str, float]:
                return {"fit": cp(tensor, rank, nonnegative=True).error}

            for start in ("svd", "random"):

                def theirs(
                    tensor: np.ndarray = tensor, rank: int = rank, start: str = start
                ) -> dict[str, float]:
                    fit = non_negative_parafac_hals(tensor, rank, init=start, random_state=0)
                    return {"fit": error_of(tensor, tl.cp_to_tensor(fit))}

                met &= compare(
                    f"Non-negative CP of the {name} tensor [64, 256, 256], rank {rank}: 10 "
                    f"restarts here, one run of non_negative_parafac_hals(init={start!r})",
                    ours,
                    theirs,
                    args.repeats,
                    5 if start == "svd" else 1,
                )
    return met


def tucker_(args: argparse.Namespace) -> bool:
    """Tucker of [144, 256, 64]."""
    tensor = decaying((144, 256, 64), 0)
    met = True
    for ranks in ((8, 8, 8), (20, 20, 20), (12, 30, 10)):

        def ours(ranks: tuple[int, ...] = ranks) -> dict[str, float]:
            return {"fit": tucker(tensor, ranks).error}

        def theirs(ranks: tuple[int, ...] = ranks) -> dict[str, float]:
            fit = tl.decomposition.tucker(tensor, ranks)
            return {"fit": error_of(tensor, tl.tucker_to_tensor(fit))}

        met &= compare(f"Tucker {ranks} of [144, 256, 64]", ours, theirs, args.repeats, 5)
    return met


def planted_ranks(args: argparse.Namespace) -> bool:
    """Split-half along the second mode of [48, 256, 64]: 4 ranks, 3 noises, 3 seeds."""
    right, seconds, cases = 0, [], 0
    for rank in (2, 4, 6, 9):
        for noise in (0.1, 0.5, 1.0):
            for seed in range(1 if args.quick else 3):
                tensor = planted((48, 256, 64), rank, noise, seed)
                took, found = timed(lambda t=tensor: cp(t, "auto", split=1))
                right += found.selection.chosen == rank
                cases += 1
                seconds.append(took)
    need = 30 * cases // 36
    print(
        f"Planted ranks on [48, 256, 64]: {right} of {cases} right (at least {need} asked), "
        f"{statistics.median(seconds):.2f} s each ({min(seconds):.2f} to {max(seconds):.2f})"
    )
    return right >= need


BENCHMARKS = {
    "scan": scan,
    "nonnegative": nonnegative,
    "tucker": tucker_,
    "planted": planted_ranks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], default=[])
    parser.add_argument("--quick", action="store_true", help="a subset, the same on both sides")
    parser.add_argument("--no-loop", action="store_true", help="leave out the loop over parafac")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loop-repeats", type=int, default=3, help="of the loop over parafac")
    parser.add_argument("--wall", action="store_true", help="time by the wall clock")
    args = parser.parse_args()
    if args.wall:
        global CLOCK
        CLOCK = time.perf_counter
    cp(np.random.default_rng(0).standard_normal((4, 5, 6)), 2)  # load everything first
    return int(not min([BENCHMARKS[n](args) for n in args.names or BENCHMARKS]))


if __name__ == "__main__":
    raise SystemExit(main())
