"""The ``embedding`` plugin: maps of heads and features, and how far to trust them."""

from __future__ import annotations

import attnlens
from attnlens_plugins.embedding.analysis import Embedding

__all__ = ["Embedding"]


@attnlens.hookimpl
def attnlens_register_analysis() -> type[Embedding]:
    """Register :class:`Embedding`."""
    return Embedding
