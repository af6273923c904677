"""How names and numbers are said in findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnlens_plugins.words import span as span


def some(names: Sequence[str], most: int = 12) -> str:
    """List names, the first few of many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def heads(names: Sequence[str]) -> str:
    """Say which heads."""
    return f"head{'s' if len(names) > 1 else ''} {some(names)}"


def layers(numbers: Sequence[int]) -> str:
    """Say which layers."""
    unique = sorted(set(numbers))
    return f"layer{'s' if len(unique) > 1 else ''} {some([str(n) for n in unique])}"


def count(number: int, noun: str) -> str:
    """Say how many of something there are."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def small(values: Any) -> str:
    """Write the largest of small numbers."""
    return f"{np.nanmax(values):.1e}"


def percent(values: Any) -> str:
    """Write shares as a percentage, or as a range of them."""
    low, high = np.nanmin(values), np.nanmax(values)
    return f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
