"""Tiny models with random gains and biases, made once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from attnlens_plugins.equivariance.live import Call, each_attention

import attnlens
from tests import modelzoo

TOKENS = np.random.default_rng(0).integers(1, 50, (6, 14))


@cache
def built(family: str, **changes: Any) -> Any:
    """Load a model of a family; nothing may be left changed in it."""
    return attnlens.load_model(modelzoo.build(family, **changes))


@pytest.fixture(scope="session")
def zoo() -> Any:
    return built


@pytest.fixture(scope="session")
def tokens() -> Any:
    return TOKENS


@pytest.fixture(params=["gpt2", "llama", "mistral", "neox", "gemma2", "qwen3", "bert", "bloom"])
def model(request: pytest.FixtureRequest) -> Any:
    return built(request.param)


def calls(model: Any, tokens: Any = TOKENS) -> list[Call]:
    """Return the layers' calls, usable while no other forward pass runs."""
    found: list[Call] = []
    each_attention(model, tokens, found.append)
    return found
