"""Tiny models of every family, made once and loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlens.models import Model, load_model
from tests.modelzoo import tiny


@pytest.fixture(scope="session", autouse=True)
def _offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a family's model; made when first asked for."""
    base = tmp_path_factory.mktemp("zoo")
    made: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> Path:
        key = "-".join([family, *(f"{k}-{v}" for k, v in sorted(changes.items()))])
        if key not in made:
            made[key] = tiny(family, base / key, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def loaded(zoo: Callable[..., Path]) -> Callable[..., Model]:
    """Return a family's loaded model, which tests must leave as it is."""
    kept: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in kept:
            kept[family] = load_model(zoo(family))
        return kept[family]

    return get


@pytest.fixture
def tokens() -> torch.Tensor:
    """Token ids ``[batch, pos]`` that every tiny model accepts."""
    return torch.randint(1, 50, (3, 11), generator=torch.Generator().manual_seed(0))
