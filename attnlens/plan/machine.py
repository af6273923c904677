"""What this machine has free: disk and memory."""

from __future__ import annotations

import shutil
from pathlib import Path


def free_disk(path: Path) -> int | None:
    """Return the free bytes where `path` is or will be; None if that cannot be known."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def free_memory(device: str = "cpu") -> int | None:
    """Return the free bytes of a device; for the CPU, no more than the container allows."""
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            return None
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    if device not in ("cpu", "mps"):
        return None
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _container_room()
    return free if limit is None else min(free, limit)


def _container_room(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what a control group (version 2) still allows; None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        stat = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines() if line
        )
        # The page cache counts as used, and is given back when it is needed.
        return max(int(limit) - used + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None


def readable_bytes(count: int) -> str:
    """Write a number of bytes for people.

    >>> readable_bytes(1536)
    '1.5 KiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
