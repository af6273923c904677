"""Tiny models of every family, and plain Hugging Face beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnlens.models import Model, load_model
from tests.modelzoo import build


@pytest.fixture(scope="session")
def loaded() -> Callable[[str], Model]:
    """Return a family's model, which tests must leave as it is."""
    kept: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in kept:
            kept[family] = load_model(build(family))
        return kept[family]

    return get


@pytest.fixture(scope="session")
def attentions() -> Callable[[str, Tensor], Tensor]:
    """Return the patterns of plain Hugging Face with eager attention."""

    def get(family: str, tokens: Tensor) -> Tensor:
        """Give [prompt, layer, head, query_pos, key_pos]."""
        with torch.inference_mode():
            out = build(family)(tokens, output_attentions=True)
        return torch.stack(out.attentions, dim=1)

    return get


@pytest.fixture
def tokens() -> Tensor:
    """Token ids ``[batch, pos]``, longer than every window."""
    return torch.randint(1, 50, (3, 13), generator=torch.Generator().manual_seed(0))
