"""embedding keeps what all analyses promise."""

from __future__ import annotations

import pytest
from attnlens_plugins.embedding import Embedding

from attnlens.testing import check_analysis

MADE = [
    Embedding(),
    Embedding(of="outputs"),
]


@pytest.mark.parametrize("analysis", MADE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_keeps_what_analyses_promise(analysis: Embedding) -> None:
    check_analysis(analysis)
