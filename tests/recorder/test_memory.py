"""Memory is flat: over batches, and over captures in one process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil

from attnlens.models import load_model
from attnlens.recorder import capture


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


class Watch:
    """Notes the process's size after each forward pass."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @contextlib.contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        yield lambda steps: self.sizes.append(resident())

    def note(self, text: str) -> None:
        pass


def test_memory_does_not_grow_with_the_number_of_batches(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    path = folder("gpt2", n_positions=128)
    watch = Watch()
    # Raw patterns of 2 layers x 4 heads x 128^2 in float16: 256 KiB a prompt, 40 MiB in all.
    ids = np.random.default_rng(0).integers(1, 50, size=(160, 128))
    capture(
        path,
        ids,
        activations=["pattern", "z"],
        statistics=["pattern.entropy"],
        batch_size=4,
        out=tmp_path / "s.attn",
        progress=watch,
    )
    assert len(watch.sizes) > 36
    assert max(watch.sizes) - watch.sizes[8] < 6 * 2**20


def test_captures_in_one_process_leave_nothing_behind(
    folder: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    model = load_model(folder("gpt2"))
    sizes = []
    for _ in range(45):
        capture(model, tokens, out=tmp_path / "s.attn", overwrite=True)
        sizes.append(resident())
    gc.collect()
    assert sizes[-1] - sizes[19] < 4 * 2**20
