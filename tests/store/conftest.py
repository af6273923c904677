from __future__ import annotations

import pytest

from attnlens.store import files, layout


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small arrays have several chunks and shards."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 64)
    monkeypatch.setattr(layout, "SHARD_BYTES", 700)
    # Hundreds of stores are written; none has to outlive the machine's power.
    monkeypatch.setattr(files, "_fsync", lambda path: None)
    monkeypatch.setattr(files.os, "fsync", lambda handle: None)
    monkeypatch.setattr(layout, "_WAITING_BYTES", 200)
