"""One handle over a head's attention, backed by a dense pattern or by queries and keys alone.

Analyses and statistics never ask where attention comes from: ``Attention.from_pattern`` and
``Attention.from_qk`` give the same methods.
"""

from attnlens.attention.base import Transposed
from attnlens.attention.handle import Attention
from attnlens.attention.results import SVD, ByOffset, Estimate, TopKeys

__all__ = ["SVD", "Attention", "ByOffset", "Estimate", "TopKeys", "Transposed"]
