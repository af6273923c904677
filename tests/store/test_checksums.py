"""What holds the rest together is checked too: the manifest and the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import attnlens
from attnlens.errors import DamagedStoreError, UsageError
from attnlens.folders import clear, prepare
from attnlens.store import open_store, verify
from tests.modelzoo import tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("made")
    folder = tiny("llama", base / "model", tokenizer=True)
    return attnlens.capture(
        folder, np.ones((2, 6), int), activations=["q_rot", "k_rot"], out=base / "s.attn"
    ).path


def copy(made: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(made, tmp_path / "copy.attn"))


def test_a_changed_digit_in_the_manifest_is_refused(made: Path, tmp_path: Path) -> None:
    store = copy(made, tmp_path)
    file = store / "manifest.json"
    text = file.read_text()
    changed = text.replace('"n_kv_heads": 2', '"n_kv_heads": 4')
    assert changed != text
    file.write_text(changed)
    with pytest.raises(DamagedStoreError, match=r"manifest\.json was altered"):
        open_store(store)


def test_a_manifest_that_is_only_laid_out_otherwise_is_the_same(made: Path, tmp_path: Path) -> None:
    import json

    store = copy(made, tmp_path)
    file = store / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    assert open_store(store)["q_rot"].sizes["prompt"] == 2


@pytest.mark.parametrize("damage", ["empty", "flip"])
def test_an_altered_vocabulary_is_found(made: Path, tmp_path: Path, damage: str) -> None:
    store = copy(made, tmp_path)
    file = store / "vocabulary.json"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(b"" if damage == "empty" else bytes(data))
    assert any("vocabulary" in str(p) for p in verify(store))
    with pytest.raises(DamagedStoreError, match="vocabulary"):
        open_store(store).token_strings(0)


def test_overwriting_leaves_what_somebody_else_put_there(made: Path, tmp_path: Path) -> None:
    store = copy(made, tmp_path)
    (store / "mine.txt").write_text("mine")
    model = made.parent / "model"
    attnlens.capture(model, np.ones((1, 4), int), activations=["z"], out=store, overwrite=True)
    assert (store / "mine.txt").read_text() == "mine"
    assert "z" in open_store(store)
    assert "q_rot" not in open_store(store)


def test_overwriting_a_run_leaves_what_somebody_else_put_there(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "cp" / "result.zarr").mkdir(parents=True)
    assert prepare(tmp_path, overwrite=True) == tmp_path
    assert (tmp_path / "run.json").exists()
    clear(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.md"]


def test_what_is_to_be_read_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "store.attn").mkdir()
    with pytest.raises(UsageError, match="to be read"):
        clear(tmp_path, reading=[tmp_path / "store.attn"])
    assert (tmp_path / "run.json").exists()


def test_overwriting_and_resuming_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        prepare(tmp_path, overwrite=True, resume=True)
