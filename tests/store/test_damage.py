"""Nothing that is missing or altered is read as if it were whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attnlens.errors import (
    DamagedStoreError,
    IncompleteStoreError,
    StoreError,
    StoreVersionError,
)
from attnlens.store import Store, StoreWriter, open_store, store_info, verify

from .making import Recipe, data_files

RECIPE = Recipe(
    lengths=[5, 5, 5], unit_size=2, statistics=["pattern.rows"], weights=True, vocabulary=["a"]
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "x.attn"
    RECIPE.write(folder)
    return folder


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "x.attn"))


def read_everything(path: Path) -> None:
    store = open_store(path)
    for name in store.manifest.activations:
        _ = store[name].values
    for unit in store.units():
        unit.state("pattern.rows")
    _ = store.tokens
    store.weights.load()


def test_a_whole_store_has_no_problems(store: Path) -> None:
    assert verify(store) == []
    assert verify(store, deep=True) == []
    read_everything(store)


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_every_flipped_bit_is_noticed(store: Path, data: st.DataObject) -> None:
    """One bit of any file that holds numbers (CASES G03)."""
    file = data.draw(st.sampled_from([*data_files(store), *sorted(store.glob("weights/*/c*"))]))
    whole = file.read_bytes()
    content = bytearray(whole)
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    array = file.parent.name
    try:
        assert any(array in str(problem) for problem in verify(store, deep=True))
        with pytest.raises(DamagedStoreError, match=array):
            read_one(store, file)
    finally:
        file.write_bytes(whole)


def read_one(store: Path, file: Path) -> None:
    """Read what the numbers in a file are part of."""
    opened = open_store(store)
    place = file.relative_to(store).parts
    if place[0] == "weights":
        opened.weights.load()
    elif place[2] == "statistics":
        for unit in opened.units():
            unit.state(place[3])
    elif place[2] == "tokens":
        _ = opened.tokens
    elif place[2] not in opened:
        # Beside the manifest, for readers other than attnlens.
        raise DamagedStoreError(str(verify(store, deep=True)))
    else:
        _ = opened[place[2]].values


def test_a_damaged_inner_chunk_is_named(store: Path) -> None:
    file = store / "units/000001/z/c.0.1.0.0.0"
    content = bytearray(file.read_bytes())
    content[3] ^= 16
    file.write_bytes(content)
    assert verify(store) == []
    (problem,) = verify(store, deep=True)
    assert str(problem).startswith("units/000001: z: chunk c.0.1.0.0.0 inner chunk 0.0.0.0.0")
    with pytest.raises(DamagedStoreError, match=r"000001: z: chunk c\.0\.1\.0\.0\.0 inner chunk"):
        _ = open_store(store)["z"].values
    # What is whole can still be read.
    assert np.isfinite(open_store(store)["z"].isel(layer=0, prompt=0).values).all()


@pytest.mark.parametrize("name", ["pattern", "z", "tokens", "prompt_id", "statistics"])
def test_a_missing_chunk_is_refused_by_name(store: Path, name: str) -> None:
    """zarr alone gives the fill value (CASES, fact 7)."""
    file = next(p for p in data_files(store) if f"000001/{name}/" in str(p))
    file.unlink()
    with pytest.raises(DamagedStoreError) as caught:
        open_store(store)
    for part in ("units/000001", name, f"chunk {file.name} is missing"):
        assert part in str(caught.value)
    assert any(file.name in str(p) and "missing" in str(p) for p in verify(store))


@pytest.mark.parametrize("name", ["pattern", "z", "tokens", "statistics"])
def test_a_chunk_that_goes_missing_after_opening(store: Path, name: str) -> None:
    opened = open_store(store)
    for file in data_files(store):
        if f"000001/{name}/" in str(file):
            file.unlink()
    with pytest.raises(DamagedStoreError, match="is missing"):
        if name == "tokens":
            _ = opened.tokens
        elif name == "statistics":
            [unit.state("pattern.rows") for unit in opened.units()]
        else:
            _ = opened[name].values


def test_a_shard_cut_short_is_noticed_without_decoding(store: Path) -> None:
    file = store / "units/000000/pattern/c.0.0.0.0.0"
    file.write_bytes(file.read_bytes()[:-7])
    assert "cut short" in str(verify(store)[0])
    with pytest.raises(DamagedStoreError, match="cut short"):
        _ = open_store(store)["pattern"].values


def test_a_shard_of_the_wrong_size_is_noticed_without_decoding(store: Path) -> None:
    file = store / "units/000000/pattern/c.0.0.0.0.0"
    content = file.read_bytes()
    file.write_bytes(content[7:])
    assert f"has {len(content) - 7} bytes where its index says {len(content)}" in str(
        verify(store)[0]
    )


def test_a_shard_that_lacks_an_inner_chunk(store: Path, tmp_path: Path) -> None:
    """As another writer leaves it that was interrupted, or wrote nothing for zeros."""
    array = zarr.open_array(store / "units/000000/pattern", mode="r+")
    array[:, 0, 1] = np.nan
    assert "lacks inner chunk" in str(verify(store)[0])
    with pytest.raises(DamagedStoreError, match="lacks inner chunk"):
        _ = open_store(store)["pattern"].values


def remove_unit(store: Path) -> None:
    shutil.rmtree(store / "units/000001")


def remove_array(store: Path) -> None:
    shutil.rmtree(store / "units/000001/z")


def remove_metadata(store: Path) -> None:
    (store / "units/000001/z/zarr.json").unlink()


def remove_unit_metadata(store: Path) -> None:
    (store / "units/000001/zarr.json").unlink()


def spoil_unit_metadata(store: Path) -> None:
    (store / "units/000001/zarr.json").write_text("{")


def remove_statistic(store: Path) -> None:
    shutil.rmtree(store / "units/000001/statistics")


def remove_weights(store: Path) -> None:
    shutil.rmtree(store / "weights")


def remove_vocabulary(store: Path) -> None:
    (store / "vocabulary.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (remove_unit, "units/000001"),
        (remove_array, "z"),
        (remove_metadata, "z: zarr.json"),
        (remove_unit_metadata, "units/000001"),
        (spoil_unit_metadata, "units/000001"),
        (remove_statistic, "pattern.rows"),
        (remove_weights, "W_O"),
        (remove_vocabulary, "vocabulary"),
    ],
)
def test_whatever_is_missing_is_named(
    store: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(store)
    with pytest.raises(DamagedStoreError, match=named):
        open_store(store)
    assert any(named in str(p) for p in verify(store))


def test_a_damaged_twin_is_found_from_the_store(store: Path, pristine: Path) -> None:
    shutil.copytree(pristine, store / "twins/000")
    shutil.copytree(pristine, store / "corpora/repeated-random")
    assert verify(store, deep=True) == []
    opened = open_store(store)
    assert len(opened.twins) == 1
    assert opened.corpus("repeated-random").path == store / "corpora/repeated-random"
    remove_unit(store / "twins/000")
    assert [p.where for p in verify(store)] == ["twins/000/units/000001"]
    with pytest.raises(DamagedStoreError, match="twins"):
        open_store(store)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (0, "0"),
        ("attnlens/0", "attnlens/0"),
        ("attnlens/99", "attnlens/99"),
        (None, "names no version"),
    ],
)
def test_other_versions_are_refused(store: Path, schema: object, said: str) -> None:
    """CASES G05."""
    file = store / "manifest.json"
    manifest = json.loads(file.read_text())
    if schema is None:
        del manifest["schema"]
    else:
        manifest["schema"] = schema
    file.write_text(json.dumps(manifest))
    for act in (open_store, verify, store_info):
        with pytest.raises(StoreVersionError) as caught:
            act(store)
        assert said in str(caught.value)
        assert "attnlens/1" in str(caught.value)
    if schema == "attnlens/99":
        assert "Update attnlens" in str(caught.value)
        assert "by attnlens 0.1.0" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "attnlens/1"}', "\xff"])
def test_a_spoilt_manifest(store: Path, text: str) -> None:
    (store / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match="manifest"):
        open_store(store)


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no store"):
        open_store(tmp_path / "nothing")
    with pytest.raises(StoreError, match="no attnlens store"):
        open_store(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        open_store(tmp_path / "file")


def test_a_run_folder_is_pointed_out(tmp_path: Path) -> None:
    RECIPE.write(tmp_path / "store.attn")
    with pytest.raises(StoreError, match=r"store\.attn"):
        open_store(tmp_path)


def test_an_unfinished_store_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x.attn"
    with StoreWriter.create(folder, RECIPE.manifest) as writer:
        first = writer.missing_units()[0]
        with writer.unit(first) as out:
            RECIPE.fill(out)
    with pytest.raises(IncompleteStoreError, match="1 of 2 units") as caught:
        open_store(folder)
    assert "--resume" in str(caught.value)
    assert "not finished" in str(verify(folder)[0])
    assert store_info(folder)["units"] == {"planned": 2, "present": 1}


def test_objects_and_pickles_are_refused(store: Path) -> None:
    """CASES G06: there are no pickles in the format, and none is read."""
    place = store / "units/000001/z"
    metadata = json.loads((place / "zarr.json").read_text())
    for dtype, codecs in (
        ("variable_length_bytes", [{"name": "vlen-bytes"}]),
        ("variable_length_utf8", [{"name": "vlen-utf8"}]),
        ({"name": "numpy.object"}, [{"name": "numcodecs.pickle"}]),
    ):
        changed = {**metadata, "data_type": dtype, "codecs": codecs, "fill_value": ""}
        (place / "zarr.json").write_text(json.dumps(changed))
        assert verify(store)
        with pytest.raises(StoreError):
            _ = Store.open(store)["z"].values


def test_a_unit_of_another_capture_is_noticed(store: Path) -> None:
    shutil.rmtree(store / "units/000001")
    shutil.copytree(store / "units/000000", store / "units/000001")
    assert "holds the prompts [0, 1], not [2]" in " ".join(map(str, verify(store)))
