"""Lean capture beside TransformerLens's own ``run_with_cache``, at 2,048 tokens.

A random model of GPT-2-small's width (12 heads, width 768; 4 layers unless told otherwise) reads
one prompt. Each way brings q, k, v and z of every layer:

- ``run_with_cache`` of the bridge with these names: attention matrices are made, and logits;
- an eager pass of attnlens, which ends when the last z is there: matrices, and no logits;
- a lean pass of attnlens, which ends there too: neither;
- lean capture to the disk, patterns' entropy and ``q_rot``, ``k_rot`` included;
- plain Hugging Face with fused attention, without hooks, up to the last layer: the ceiling.

Run it as ``python benchmarks/lean.py``. Times are taken in turns in one process and given as ratios
to the lean pass: the median over the rounds, with the least and the largest. Each peak is the
largest resident size, above the loaded model, of a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("cached", "eager", "lean", "stored", "plain")
NAMES = ("q", "k", "v", "z")


class AllThere(Exception):
    """Ends a pass once everything has arrived."""


class Bench:
    """One model and one prompt, and the ways to read it."""

    def __init__(self, *, layers: int, length: int, folder: Path) -> None:
        import torch
        import transformers

        from attnlens.models import load_model

        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=layers, n_positions=length)
        self.model = load_model(transformers.GPT2LMHeadModel(config).eval())
        config = transformers.GPT2Config(n_layer=layers, n_positions=length)
        config._attn_implementation = "sdpa"
        self.hugging_face = transformers.GPT2Model(config).eval()
        self.ids = torch.randint(0, config.vocab_size, (1, length))
        self.folder = folder
        assert self.model.lean_problem() is None

    def cached(self) -> None:
        """``run_with_cache``."""
        import torch

        layers = range(self.model.facts.n_layers)
        names = [self.model.hook_name(name, layer) for name in NAMES for layer in layers]
        with torch.inference_mode():
            self.model.bridge.run_with_cache(self.ids, names_filter=names, use_cache=False)
        for layer in layers:
            self.model.clear(layer)

    def eager(self) -> None:
        """Run with attention matrices."""
        self._recorded(contextlib.nullcontext())

    def lean(self) -> None:
        """Run without."""
        self._recorded(self.model.lean())

    def stored(self) -> None:
        """Lean capture to the disk."""
        from attnlens.recorder import capture

        capture(
            self.model,
            self.ids.numpy(),
            activations=[*NAMES, "pattern"],
            statistics=["pattern.entropy"],
            lean=True,
            out=self.folder / "bench.attn",
            overwrite=True,
        )

    def plain(self) -> None:
        """Hugging Face alone."""
        import torch

        with torch.inference_mode():
            self.hugging_face(self.ids, use_cache=False)

    def _recorded(self, how: Any) -> None:
        kept: dict[tuple[str, int], Any] = {}

        def keep(name: str, layer: int, value: Any) -> None:
            kept[name, layer] = value.clone()
            if len(kept) == len(NAMES) * self.model.facts.n_layers:
                raise AllThere

        with contextlib.suppress(AllThere), self.model.record(NAMES, keep), how:
            self.model.forward(self.ids)
        assert len(kept) == len(NAMES) * self.model.facts.n_layers


def time_of(work: Callable[[], None]) -> float:
    """Return seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def child(way: str, options: argparse.Namespace) -> None:
    """Print one way's peak resident size above the loaded model, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(layers=options.layers, length=options.length, folder=Path(folder))
        # The peak of loading must not hide the peak of what is measured.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        getattr(bench, way)()
        print(json.dumps({"above": _status("VmHWM") - before}))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak(way: str, options: argparse.Namespace) -> int:
    """Return what a process of its own reports."""
    sizes = [f"--layers={options.layers}", f"--length={options.length}"]
    done = subprocess.run(
        [sys.executable, __file__, "--child", way, *sizes],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(json.loads(done.stdout.splitlines()[-1])["above"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    print(f"{options.layers} layers x 12 heads, width 768, one prompt of {options.length} tokens")
    for way in WAYS:
        above = peak(way, options) / 2**20
        print(f"{way:8} peak {above:7.0f} MiB above the model", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(layers=options.layers, length=options.length, folder=Path(folder))
        rounds = [
            {way: time_of(getattr(bench, way)) for way in WAYS} for _ in range(options.rounds)
        ]
    for way in WAYS:
        times = [r[way] for r in rounds]
        ratios = sorted(r[way] / r["lean"] for r in rounds)
        print(
            f"{way:8} {statistics.median(times):7.2f} s   "
            f"{statistics.median(ratios):6.2f} times the lean pass "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    target = statistics.median(r["cached"] / r["lean"] for r in rounds)
    print(f"lean pass over run_with_cache: {target:.1f} times faster (target: 3)")


if __name__ == "__main__":
    main()
