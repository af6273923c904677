"""Capture beside TransformerLens's own ``run_with_cache`` followed by saving.

A random model of GPT-2-small's size (12 layers, 12 heads, width 768) reads prompts of 512 tokens:

- time of all ``pattern.*`` statistics, and of ``z`` of all layers to disk, over the bridge's plain
  forward pass on the same batches;
- peak memory above the plain forward pass, for few and for many batches, over
  ``run_with_cache``'s.

Run it as ``python benchmarks/capture.py``. Times are taken in turns in one process and given as
ratios: the median over the rounds, with the least and the largest. Each peak is the largest
resident size of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATTERN = ["entropy", "entropy_share", "max", "received", "by_offset"]


class Bench:
    """One model and its prompts, and the ways to read them."""

    def __init__(self, *, batches: int, batch_size: int, length: int, folder: Path) -> None:
        import numpy as np
        import torch
        import transformers

        from attnlens.models import load_model

        torch.manual_seed(0)
        config = transformers.GPT2Config()
        hf = transformers.GPT2LMHeadModel(config).eval()
        self.model = load_model(hf)
        rng = np.random.default_rng(0)
        self.ids = rng.integers(0, config.vocab_size, size=(batches * batch_size, length))
        self.batch_size = batch_size
        self.folder = folder

    def _batches(self) -> list[Any]:
        import torch

        return list(torch.as_tensor(self.ids).split(self.batch_size))

    def plain(self) -> None:
        """Only the bridge's forward pass."""
        import torch

        with torch.inference_mode():
            for batch in self._batches():
                self.model.bridge(batch, return_type="logits", use_cache=False)
                self._forget()

    def cached(self) -> None:
        """``run_with_cache`` of everything, then ``torch.save`` of z and the patterns."""
        import torch

        with torch.inference_mode():
            for number, batch in enumerate(self._batches()):
                _, cache = self.model.bridge.run_with_cache(batch, use_cache=False)
                kept = {k: v for k, v in cache.items() if k.endswith(("hook_z", "hook_pattern"))}
                torch.save(kept, self.folder / f"{number}.pt")
                del cache, kept
                self._forget()

    def statistics(self) -> None:
        """All statistics of patterns, nothing raw."""
        self._capture(activations=[], statistics=[f"pattern.{name}" for name in PATTERN])

    def z(self) -> None:
        """``z`` of all layers, to the disk."""
        self._capture(activations=["z"])

    def pattern(self) -> None:
        """Patterns of all layers, to the disk."""
        self._capture(activations=["pattern"])

    def _capture(self, **wanted: Any) -> None:
        from attnlens.recorder import capture

        store = capture(
            self.model,
            self.ids,
            batch_size=self.batch_size,
            out=self.folder / "bench.attn",
            overwrite=True,
            **wanted,
        )
        assert store.path is not None
        shutil.rmtree(store.path)

    def _forget(self) -> None:
        for layer in range(self.model.facts.n_layers):
            self.model.clear(layer)


def time_of(work: Callable[[], None]) -> float:
    """Return seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def child(mode: str, options: argparse.Namespace) -> None:
    """Print one way's peak resident size above the loaded model, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            batches=options.batches,
            batch_size=options.batch_size,
            length=options.length,
            folder=Path(folder),
        )
        # The peak of loading must not hide the peak of what is measured.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        getattr(bench, mode)()
        print(json.dumps({"above": _status("VmHWM") - before}))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak(mode: str, batches: int, options: argparse.Namespace) -> int:
    """Return what a process of its own reports."""
    done = subprocess.run(
        [
            sys.executable,
            __file__,
            "--child",
            mode,
            f"--batches={batches}",
            f"--batch-size={options.batch_size}",
            f"--length={options.length}",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(json.loads(done.stdout.splitlines()[-1])["above"])


def times(options: argparse.Namespace) -> None:
    """Print the ratios of time."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            batches=options.batches,
            batch_size=options.batch_size,
            length=options.length,
            folder=Path(folder),
        )
        ways = ("plain", "statistics", "z", "pattern", "cached")
        bench.plain()
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in ways:
                taken[way].append(time_of(getattr(bench, way)))
    size = f"{options.batches} batches of {options.batch_size} x {options.length} tokens"
    print(f"time over the plain forward pass ({size}, {options.rounds} rounds)")
    print(f"  plain forward pass: {statistics.median(taken['plain']):.2f} s")
    for way, goal in (
        ("statistics", 1.4),
        ("z", 1.4),
        ("pattern", None),
        ("cached", None),
    ):
        ratios = sorted(a / b for a, b in zip(taken[way], taken["plain"], strict=True))
        aim = f"  (goal: at most {goal})" if goal else ""
        label = {"cached": "run_with_cache and saving", "statistics": "all pattern.*"}.get(way, way)
        print(
            f"  {label + ':':27s}{statistics.median(ratios):5.2f}  "
            f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]{aim}"
        )


def peaks(options: argparse.Namespace) -> None:
    """Print the ratios of memory."""
    few, many = 2, 8
    plain = peak("plain", few, options)
    theirs = peak("cached", few, options) - plain
    print(f"peak memory above the plain forward pass ({plain / 2**20:.0f} MiB above the weights)")
    print(f"  run_with_cache and saving: {theirs / 2**20:.0f} MiB")
    for way in ("statistics", "z", "pattern"):
        ours = [peak(way, n, options) - plain for n in (few, many)]
        shown = ", ".join(
            f"{n} batches {x / 2**20:.0f} MiB ({max(x, 0) / theirs:.2f})"
            for n, x in zip((few, many), ours, strict=True)
        )
        print(f"  {way + ':':27s}{shown}  (goal: at most 0.33, the same for both)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", choices=["times", "peaks"])
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    if options.skip != "times":
        times(options)
    if options.skip != "peaks":
        peaks(options)


if __name__ == "__main__":
    main()
