"""The ``cp`` plugin: heads, tokens and directions that belong together, by CP decomposition."""

from __future__ import annotations

import attnlens
from attnlens_plugins.cp.analysis import CP

__all__ = ["CP"]


@attnlens.hookimpl
def attnlens_register_analysis() -> type[CP]:
    """Register :class:`CP`."""
    return CP
