"""cp keeps what all analyses promise."""

from __future__ import annotations

import pytest
from attnlens_plugins.cp import CP

from attnlens.testing import check_analysis

MADE = [
    CP(rank="1..3", n_restarts=2, n_splits=1),
    CP(tensor="pattern", rank=2, n_restarts=2),
    CP(layers="each", rank=2, n_restarts=2, n_splits=1),
]


@pytest.mark.parametrize("analysis", MADE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_keeps_what_analyses_promise(analysis: CP) -> None:
    check_analysis(analysis)
