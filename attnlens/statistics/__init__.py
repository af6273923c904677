"""Statistics: accumulated over activations while they stream past, mergeable, exact in any split.

One instance accumulates one unit (prompts of one length); `Statistic.state` gives its partial
sums, `Statistic.merge` joins those of many units, `Statistic.finalize` turns them into a labelled
array. All sums are float64.
"""

from attnlens.statistics.apply import compute
from attnlens.statistics.base import State, Statistic
from attnlens.statistics.registry import STATISTICS

__all__ = ["STATISTICS", "State", "Statistic", "compute"]
