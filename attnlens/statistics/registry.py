"""The built-in statistics by name."""

from __future__ import annotations

from typing import Final

from attnlens.statistics.base import Statistic
from attnlens.statistics.moments import MOMENTS
from attnlens.statistics.pattern import (
    PatternByOffset,
    PatternEntropy,
    PatternEntropyShare,
    PatternMax,
    PatternReceived,
)

_BUILT_IN: Final[tuple[type[Statistic], ...]] = (
    PatternEntropy,
    PatternEntropyShare,
    PatternMax,
    PatternReceived,
    PatternByOffset,
    *MOMENTS,
)

#: Analyses may bring more.
STATISTICS: Final[dict[str, type[Statistic]]] = {s.name: s for s in _BUILT_IN}
