"""The ``tucker`` plugin: how many directions heads, tokens and features have, and how they mix."""

from __future__ import annotations

import attnlens
from attnlens_plugins.tucker.analysis import Tucker

__all__ = ["Tucker"]


@attnlens.hookimpl
def attnlens_register_analysis() -> type[Tucker]:
    """Register :class:`Tucker`."""
    return Tucker
