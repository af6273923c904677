"""The ``spectrum`` plugin: singular values, ranks, entropies and sinks of attention patterns."""

from __future__ import annotations

import attnlens
from attnlens_plugins.spectrum.analysis import Spectrum

__all__ = ["Spectrum"]


@attnlens.hookimpl
def attnlens_register_analysis() -> type[Spectrum]:
    """Register :class:`Spectrum`."""
    return Spectrum
