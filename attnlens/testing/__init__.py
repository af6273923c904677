"""The kit for authors of analyses: small stores with known answers, and checks.

In a test of your own::

    import pytest
    from my_package import LookBack

    @pytest.mark.attnlens(analysis=LookBack)
    def test_it_keeps_what_analyses_promise(attnlens_check):
        attnlens_check()

The fixture comes with attnlens. Without pytest, call :func:`check_analysis`.
"""

from __future__ import annotations

from attnlens.testing.checks import CHECKS, CheckFailed, compute
from attnlens.testing.kit import check_analysis, maker
from attnlens.testing.stores import KINDS, make_store

__all__ = [
    "CHECKS",
    "KINDS",
    "CheckFailed",
    "check_analysis",
    "compute",
    "make_store",
    "maker",
]
