"""The ``equivariance`` plugin: which symmetries a model's attention has, and which it breaks."""

from __future__ import annotations

import attnlens
from attnlens_plugins.equivariance.analysis import Equivariance

__all__ = ["Equivariance"]


@attnlens.hookimpl
def attnlens_register_analysis() -> type[Equivariance]:
    """Register :class:`Equivariance`."""
    return Equivariance
