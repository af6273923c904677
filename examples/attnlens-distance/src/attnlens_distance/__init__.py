"""Attention distance and direction: an analysis for attnlens."""

from __future__ import annotations

import attnlens
from attnlens_distance.analysis import Distance

__all__ = ["Distance"]


@attnlens.hookimpl
def attnlens_register_analysis() -> type[Distance]:
    """Register :class:`Distance`."""
    return Distance
