"""tucker keeps what all analyses promise."""

from __future__ import annotations

import pytest
from attnlens_plugins.tucker import Tucker

from attnlens.testing import check_analysis

MADE = [
    Tucker(),
    Tucker(tensor="pattern"),
]


@pytest.mark.parametrize("analysis", MADE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_keeps_what_analyses_promise(analysis: Tucker) -> None:
    check_analysis(analysis)
