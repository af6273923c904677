"""CP and Tucker decompositions of labelled tensors, rank selection, alignment and stability.

Results are plain numpy in labelled datasets and, on request, tensorly objects. No global backend is
read or set.
"""

from __future__ import annotations

from .align import FactorMatch, MatchNull, align, factor_match, match_null
from .cp import cp
from .diagnostics import Degeneracy
from .rank import RankSelection
from .results import CPFit, CPScan

__all__ = [
    "CPFit",
    "CPScan",
    "Degeneracy",
    "FactorMatch",
    "MatchNull",
    "RankSelection",
    "align",
    "cp",
    "factor_match",
    "match_null",
]
