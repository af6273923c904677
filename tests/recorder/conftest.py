"""Small models as folders, one of each family for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.modelzoo import tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a family's model; made when first asked for."""
    base = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> Path:
        key = "-".join([family, *(f"{k}={v}" for k, v in sorted(changes.items()))])
        if key not in made:
            made[key] = tiny(family, base / key, **changes)
        return made[key]

    return get


@pytest.fixture
def tokens() -> np.ndarray:
    """Token ids ``[prompt, pos]`` that every tiny model accepts."""
    return np.random.default_rng(0).integers(1, 50, size=(5, 9))
