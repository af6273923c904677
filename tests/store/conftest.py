from __future__ import annotations

import os

import pytest

from attnlens.store import layout


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of stores are written; none has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small arrays have several chunks and shards."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 64)
    monkeypatch.setattr(layout, "SHARD_BYTES", 700)
    monkeypatch.setattr(layout, "_WAITING_BYTES", 200)
