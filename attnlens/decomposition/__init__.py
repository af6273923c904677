"""CP and Tucker decompositions of labelled tensors, rank selection, alignment and stability.

Results are plain numpy in labelled datasets and, on request, tensorly objects. No global backend is
read or set.
"""

from __future__ import annotations

from .align import FactorMatch, MatchNull, align, factor_match, match_null
from .compress import Compressed
from .cp import cp
from .diagnostics import Degeneracy
from .rank import RankSelection
from .results import CPFit, CPScan, Interaction, TuckerFit
from .slices import compress_slices, slices_memory
from .tucker import tucker

__all__ = [
    "CPFit",
    "CPScan",
    "Compressed",
    "Degeneracy",
    "FactorMatch",
    "Interaction",
    "MatchNull",
    "RankSelection",
    "TuckerFit",
    "align",
    "compress_slices",
    "cp",
    "factor_match",
    "match_null",
    "slices_memory",
    "tucker",
]
