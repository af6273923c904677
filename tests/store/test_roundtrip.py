"""What was written is what is read, whatever the shapes, lengths, dtypes and selections."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlens.activations import ACTIVATIONS
from attnlens.errors import DamagedStoreError
from attnlens.store import ActivationSpec, Store, layout, open_store, verify
from attnlens.store.layout import Layout

from .making import Recipe

SLOW = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

STORED = [name for name, a in ACTIVATIONS.items() if not a.derived_from]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    names = draw(st.lists(st.sampled_from(STORED), min_size=1, max_size=3, unique=True))
    activations = {}
    for name in names:
        layers = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
        positions = draw(st.sampled_from([None, None, [-1], [0, 3], [-2, 1]]))
        heads = draw(st.sampled_from([None, None, [1], [1, 0]]))
        activations[name] = ActivationSpec(
            dtype=draw(st.sampled_from(["float16", "float32", "float64"])),
            layers=layers,
            heads=heads if ACTIVATIONS[name].head_dim else None,
            positions=positions,
        )
    return Recipe(
        lengths=draw(st.lists(st.integers(2, 9), min_size=1, max_size=7)),
        activations=activations,
        heads=draw(st.integers(2, 3)),
        width=draw(st.integers(1, 5)),
        d_model=draw(st.integers(1, 7)),
        batch_size=draw(st.integers(1, 4)),
        unit_size=draw(st.integers(1, 5)),
    )


@SLOW
@given(recipe=recipes(), data=st.data())
def test_every_store_reads_back(
    tiny_chunks: None, tmp_path: Path, recipe: Recipe, data: st.DataObject
) -> None:
    folder = tmp_path / "x.attn"
    shutil.rmtree(folder, ignore_errors=True)
    store = recipe.write(folder)
    assert verify(folder, deep=True) == []
    for prompt, length in enumerate(recipe.lengths):
        assert store.tokens.values[prompt, :length].tolist() == recipe.tokens(prompt).tolist()
        assert (store.tokens.values[prompt, length:] == -1).all()
    for name, spec in recipe.activations.items():
        array, expected = store[name], recipe.expected(name)
        assert array.dims == ACTIVATIONS[name].dims
        assert array.dtype == ("float64" if spec.dtype == "float64" else "float32")
        np.testing.assert_array_equal(array.values, expected)
        assert array.layer.values.tolist() == spec.layers
        assert array.prompt.values.tolist() == list(range(len(recipe.lengths)))
        assert array.length.values.tolist() == list(recipe.lengths)
        key = tuple(data.draw(_index(n), label=f"index {name}") for n in array.shape)
        np.testing.assert_array_equal(
            array[key].values,
            expected[
                np.ix_(
                    *[
                        np.atleast_1d(np.arange(n)[k])
                        for k, n in zip(key, expected.shape, strict=True)
                    ]
                )
            ].squeeze(axis=tuple(i for i, k in enumerate(key) if isinstance(k, int))),
        )
        for unit in store.units():
            for row, prompt in enumerate(unit.prompt_ids):
                for i, layer in enumerate(spec.layers):
                    got = unit[name].values[row, i]
                    np.testing.assert_array_equal(got, recipe.value(name, prompt, layer))


def _index(size: int) -> st.SearchStrategy[Any]:
    one = st.integers(0, size - 1)
    return st.one_of(
        one,
        st.lists(one, min_size=1, max_size=4),
        st.tuples(one, st.integers(1, size)).map(lambda t: slice(t[0], t[0] + t[1])),
        st.just(slice(None)),
        st.just(slice(None, None, -1)),
    )


@SLOW
@given(recipe=recipes())
def test_plain_zarr_and_xarray_read_the_units(
    tiny_chunks: None, tmp_path: Path, recipe: Recipe
) -> None:
    """zarr-python is the oracle for the shards, which are not written through it."""
    folder = tmp_path / "x.attn"
    shutil.rmtree(folder, ignore_errors=True)
    store = recipe.write(folder)
    for unit in store.units():
        place = folder / "units" / unit.spec.folder
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dataset = xr.open_zarr(place, chunks=None)
        assert dataset["tokens"].dims == ("prompt", "pos")
        assert dataset["tokens"].dtype == np.int32
        assert dataset["prompt_id"].values.tolist() == unit.prompt_ids
        for name, spec in recipe.activations.items():
            expected = np.stack(
                [[recipe.value(name, p, layer) for layer in spec.layers] for p in unit.prompt_ids]
            )
            np.testing.assert_array_equal(dataset[name].values, expected)
            labelled = unit[name]
            for own, stored in zip(labelled.dims, dataset[name].dims, strict=True):
                if own in labelled.indexes:
                    assert dataset.indexes[stored].tolist() == labelled.indexes[own].tolist()
            array = zarr.open_array(place / name, mode="r")
            np.testing.assert_array_equal(array[...], expected)
            assert array.attrs["layers"] == spec.layers


def test_dimension_names_on_disk(tmp_path: Path) -> None:
    Recipe().write(tmp_path / "x.attn")
    dataset = xr.open_zarr(tmp_path / "x.attn/units/000000", chunks=None)
    assert dataset["pattern"].dims == ("prompt", "layer", "head", "query_pos", "key_pos")
    assert dataset["z"].dims == ("prompt", "layer", "pos", "head", "d_head")


def test_prompts_may_arrive_in_any_split_and_order(tiny_chunks: None, tmp_path: Path) -> None:
    recipe = Recipe(lengths=[6] * 7, unit_size=7)
    from attnlens.store import StoreWriter

    with StoreWriter.create(tmp_path / "x.attn", recipe.manifest) as writer:
        (unit,) = writer.missing_units()
        with writer.unit(unit) as out:
            out.tokens(np.zeros((7, 6)))
            for part in ([5, 6], [0], [1, 2, 3, 4]):
                for name in ("z", "pattern"):
                    for layer in (1, 0):
                        value = np.stack([recipe.value(name, p, layer) for p in part])
                        out.write(name, layer, slice(part[0], part[-1] + 1), value)
        store = writer.seal()
    for name in ("z", "pattern"):
        np.testing.assert_array_equal(store[name].values, recipe.expected(name))


def test_one_unit_may_be_wider_than_planned(tmp_path: Path) -> None:
    """float16 was planned, but this unit's values do not fit."""
    from attnlens.store import StoreWriter

    recipe = Recipe(activations={"z": ActivationSpec(dtype="float16", layers=[0])})
    with StoreWriter.create(tmp_path / "x.attn", recipe.manifest) as writer:
        for unit in writer.missing_units():
            with writer.unit(unit) as out:
                shape = (len(unit.prompts), unit.length, 4, 3)
                out.tokens(np.zeros(shape[:2]))
                if unit.id == 0:
                    out.write("z", 0, slice(None), np.full(shape, 1e6, dtype=np.float32))
                else:
                    out.write("z", 0, slice(None), np.ones(shape, dtype=np.float16))
        store = writer.seal()
    assert verify(tmp_path / "x.attn", deep=True) == []
    assert store["z"].dtype == np.float32
    assert float(store["z"].max()) == 1e6


def test_reading_is_lazy_and_survives_pickling(tmp_path: Path) -> None:
    recipe = Recipe()
    store = recipe.write(tmp_path / "x.attn")
    array = pickle.loads(pickle.dumps(store["pattern"].isel(layer=1)))
    # Only now are the chunks of layer 0 spoilt: layer 1 must not need them.
    for file in (tmp_path / "x.attn").glob("units/*/pattern/c.*.0.*.*.*"):
        file.write_bytes(b"")
    np.testing.assert_array_equal(array.values, recipe.expected("pattern")[:, 1])
    with pytest.raises(DamagedStoreError):
        _ = store["pattern"].isel(layer=0).values


@given(
    name=st.sampled_from(STORED),
    prompts=st.integers(1, 3000),
    length=st.integers(1, 5000),
    heads=st.integers(1, 64),
    width=st.integers(1, 256),
    batch=st.integers(1, 64),
    dtype=st.sampled_from(["float16", "float32"]),
)
def test_chunks_and_shards_keep_their_sizes(
    name: str, prompts: int, length: int, heads: int, width: int, batch: int, dtype: str
) -> None:
    activation = ACTIVATIONS[name]
    sizes = {"prompt": prompts, "layer": 12, "head": heads, "kv_head": heads, "d_head": width}
    sizes |= {"pos": length, "query_pos": length, "key_pos": length, "d_model": width * heads}
    plan = Layout.plan(activation, [sizes[d] for d in activation.dims], dtype, batch)
    item = np.dtype(dtype).itemsize
    assert all(s % c == 0 for s, c in zip(plan.shards, plan.chunks, strict=True))
    assert plan.chunks[1] == plan.shards[1] == 1
    if activation.head_dim:
        at = activation.dims.index(activation.head_dim)
        assert plan.chunks[at] == 1
        assert plan.shards[at] == heads
    row = item * int(
        np.prod(
            [
                c
                for d, c in zip(activation.dims, plan.chunks, strict=True)
                if d in ("key_pos", "d_head", "d_model")
            ]
        )
    )
    assert np.prod(plan.chunks) * item <= layout.CHUNK_BYTES + row
    assert np.prod(plan.shards) * item <= max(layout.SHARD_BYTES, heads * layout.CHUNK_BYTES + row)
    # Nothing is padded by more than half.
    stored = [s * -(-n // s) for n, s in zip(plan.shape, plan.shards, strict=True)]
    assert np.prod(stored[2:]) <= 2 * np.prod(plan.shape[2:])


def test_ten_thousand_prompts_are_few_files() -> None:
    plan = Layout.plan(ACTIVATIONS["pattern"], (10000, 12, 12, 16, 16), "float16", 1)
    shards = np.prod([-(-n // s) for n, s in zip(plan.shape, plan.shards, strict=True)])
    chunks = np.prod([-(-n // c) for n, c in zip(plan.shape, plan.chunks, strict=True)])
    assert shards == 12
    assert chunks < 40000


def test_memory_stores_read_alike(tmp_path: Path) -> None:
    recipe = Recipe(weights=True)
    disk = recipe.write(tmp_path / "x.attn")
    memory = Store.from_arrays(
        pattern=disk["pattern"],
        z=disk["z"],
        tokens=disk.tokens,
        lengths=disk.lengths,
        weights={"W_O": recipe.w_o()},
    )
    for name in ("pattern", "z", "result", "pattern.entropy", "z.second_moment"):
        xr.testing.assert_allclose(memory[name], disk[name], rtol=1e-12)
    saved = memory.save(tmp_path / "y.attn")
    xr.testing.assert_identical(saved["pattern"], disk["pattern"])
    xr.testing.assert_identical(open_store(tmp_path / "y.attn").tokens, disk.tokens)
