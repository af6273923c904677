"""What a store gives beyond its raw arrays."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import load_file

from attnlens.errors import NeedError, OptionError, OutputError
from attnlens.statistics import STATISTICS, Statistic
from attnlens.store import ActivationSpec, Store, export, open_store, store_info
from attnlens.store.lazy import Joined

from .making import Recipe

RECIPE = Recipe(
    statistics=["pattern.entropy", "pattern.by_offset"],
    weights=True,
    vocabulary=[f"<{i}>" for i in range(50)],
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read") / "x.attn"
    RECIPE.write(folder)
    return folder


@pytest.fixture
def store(path: Path) -> Store:
    return open_store(path)


# ---- statistics ------------------------------------------------------------------------------


def test_stored_and_computed_statistics_agree(store: Store) -> None:
    p = RECIPE.expected("pattern")
    memory = Store.from_arrays(pattern=p.astype("f2"), lengths=RECIPE.lengths)
    for name in ("pattern.entropy", "pattern.by_offset"):
        xr.testing.assert_allclose(store[name], memory[name], rtol=1e-12)
    entropy = store["pattern.entropy"]
    assert entropy.prompt.values.tolist() == [0, 1, 2, 3, 4]
    assert entropy.length.values.tolist() == list(RECIPE.lengths)
    for prompt, length in enumerate(RECIPE.lengths):
        rows = p[prompt, :, :, :length, :length]
        plain = -np.sum(rows * np.log(np.where(rows > 0, rows, 1)), -1).mean(-1)
        np.testing.assert_allclose(entropy.sel(prompt=prompt).values, plain, rtol=1e-5)


def test_a_statistic_that_is_not_stored_is_computed(store: Store) -> None:
    assert "pattern.max" in store
    assert "pattern.max" not in store.manifest.statistics
    expected = np.stack(
        [
            RECIPE.expected("pattern")[p, :, :, :n, :n].max(-1).mean(-1)
            for p, n in enumerate(RECIPE.lengths)
        ]
    )
    np.testing.assert_allclose(store["pattern.max"].values, expected, rtol=1e-6)
    assert "q.mean" not in store
    with pytest.raises(NeedError, match=r"q\.mean"):
        _ = store["q.mean"]


class RowCount(Statistic):
    """How many query rows there are."""

    name = "pattern.rows"
    of = "pattern"
    dims = ("layer",)

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rows = np.zeros(len(self.layers))

    def update(self, layer: int, value: Any, prompts: slice) -> None:
        self.rows[self.layers.index(layer)] += (prompts.stop - prompts.start) * self.length

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows}

    @classmethod
    def merge(cls, states: Any) -> dict[str, Any]:
        return {"rows": np.sum([s["rows"] for s in states], axis=0)}

    @classmethod
    def finalize(cls, state: Any) -> xr.DataArray:
        return xr.DataArray(state["rows"], dims=("layer",))


def test_statistics_that_analyses_bring(path: Path, tmp_path: Path) -> None:
    own = {"pattern.rows": RowCount}
    store = open_store(path, statistics=own)
    assert store["pattern.rows"].values.tolist() == [sum(RECIPE.lengths)] * 2

    Recipe(statistics=["pattern.rows"]).write(tmp_path / "y.attn")
    assert "pattern.rows" in open_store(tmp_path / "y.attn").names()
    with pytest.raises(NeedError, match="not known here"):
        _ = open_store(tmp_path / "y.attn")["pattern.rows"]
    stored = Store.open(tmp_path / "y.attn", statistics=own)["pattern.rows"]
    assert stored.values.tolist() == [sum(RECIPE.lengths)] * 2


def test_no_statistics_of_chosen_positions(tmp_path: Path) -> None:
    recipe = Recipe(
        activations={"pattern": ActivationSpec(dtype="float16", layers=[0], positions=[-1])}
    )
    store = recipe.write(tmp_path / "x.attn")
    assert "pattern.entropy" not in store
    assert store["pattern"].query_pos.values.tolist() == [-1]
    with pytest.raises(NeedError, match="positions"):
        store.attention(0)


def test_every_builtin_statistic_has_its_name_here() -> None:
    from attnlens.needs import BUILTIN_STATISTICS

    assert set(STATISTICS) == BUILTIN_STATISTICS
    assert all(name.partition(".")[0] == kind.of for name, kind in STATISTICS.items())


def test_every_builtin_statistic_is_described_as_its_class_is() -> None:
    from attnlens.needs import STATISTICS_DESCRIBED

    said = {
        name: (kind.dims, " ".join((kind.__doc__ or "").partition("\n\n")[0].split()))
        for name, kind in STATISTICS.items()
    }
    assert said == STATISTICS_DESCRIBED


# ---- attention, results, weights, tokens -----------------------------------------------------


def test_attention_of_store_and_units(store: Store) -> None:
    expected = np.nan_to_num(RECIPE.expected("pattern"))
    for layer in (0, 1):
        np.testing.assert_allclose(store.attention(layer).to_dense(), expected[:, layer])
        for unit in store.units():
            n, ids = unit.length, unit.prompt_ids
            np.testing.assert_allclose(
                unit.attention(layer).to_dense(), expected[ids, layer, :, :n, :n]
            )
    with pytest.raises(NeedError, match="layer 2"):
        store.attention(2)


def test_result_is_computed_for_what_is_asked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = np.einsum("plthd,lhdm->plthm", RECIPE.expected("z"), RECIPE.w_o())
    np.testing.assert_allclose(store["result"].values, expected, rtol=1e-4, atol=1e-5)
    seen = []
    whole = Joined.read

    def read(self: Joined, selection: Any) -> Any:
        seen.append([len(i) for i in selection])
        return whole(self, selection)

    monkeypatch.setattr(Joined, "read", read)
    array = store["result"].isel(layer=1, head=[0, 2])
    assert seen == []
    np.testing.assert_allclose(array.values, expected[:, 1][:, :, [0, 2]], rtol=1e-4, atol=1e-5)
    assert seen == [[5, 1, 7, 2, 3]]


def test_weights_are_labelled(store: Store) -> None:
    assert store.has_weights
    assert store.weights["W_O"].dims == ("layer", "head", "d_head", "d_model")
    np.testing.assert_array_equal(store.weights["W_O"].values, RECIPE.w_o())


def test_tokens_and_their_texts(store: Store) -> None:
    assert store.tokens.dtype == np.int32
    assert store.lengths.values.tolist() == list(RECIPE.lengths)
    for prompt in range(5):
        ids = RECIPE.tokens(prompt)
        assert store.token_strings(prompt) == [f"<{i}>" for i in ids]
    for unit in store.units():
        assert unit.tokens.values.tolist() == [RECIPE.tokens(p).tolist() for p in unit.prompt_ids]


def test_any_text_survives_the_vocabulary(tmp_path: Path) -> None:
    texts = ["東京", "😀", "עברית", "\n", "\x00", "\ud83d", '"', "Ġ", "<0x0A>", ""]
    store = Recipe(vocabulary=texts).write(tmp_path / "x.attn")
    assert store.vocabulary == texts


def test_a_missing_name_and_its_nearest(store: Store) -> None:
    with pytest.raises(NeedError) as caught:
        _ = store["patern"]
    assert "Did you mean 'pattern'" in str(caught.value)
    with pytest.raises(KeyError):
        _ = store["patern"]
    assert store.get("nothing") is None


def test_a_store_is_a_mapping(store: Store) -> None:
    assert list(store) == store.names()
    assert len(store) == len(store.names())
    assert {"pattern", "z", "result", "pattern.entropy"} <= set(store)
    assert store == store
    assert store != open_store(store.path or "")
    assert isinstance(hash(store), int)


def test_facts_of_the_model() -> None:
    from attnlens.models import ModelFacts

    assert Store.from_arrays(z=np.zeros((1, 1, 2, 2, 2))).facts is None
    assert hasattr(ModelFacts, "from_json")


# ---- without torch ---------------------------------------------------------------------------


def test_reading_imports_no_torch(path: Path) -> None:
    script = (
        "import sys\n"
        "from attnlens.store import open_store, verify, store_info, export\n"
        "store = open_store(sys.argv[1])\n"
        "repr(store), store._repr_html_(), store_info(sys.argv[1]), verify(sys.argv[1], True)\n"
        "store['pattern'].values, store['result'].isel(layer=0).values, store.tokens\n"
        "store.token_strings(0), store.weights.load(), list(store.units())[0]['z'].values\n"
        "export(store, 'z', sys.argv[2])\n"
        "print(sorted({'torch', 'transformer_lens', 'matplotlib', 'dask'} & set(sys.modules)))\n"
    )
    out = path.parent / "z.npy"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stderr == ""
    assert done.stdout == "[]\n"


# ---- as people see it ------------------------------------------------------------------------


def test_repr_names_what_is_there(store: Store, path: Path) -> None:
    text = repr(store)
    for part in (str(path), "5 of 5 to 7 tokens", "pattern", "head 4", "result", "W_O", "text"):
        assert part in text


def test_html_is_a_labelled_table_and_escaped(tmp_path: Path) -> None:
    store = Store.from_arrays(z=np.zeros((1, 1, 2, 2, 2)), model={"name": "<script>alert(1)"})
    html = store._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert html.count("<table") == html.count("</table>") == 2
    assert "scope='col'" in html
    assert "head outputs before W_O" in html


def test_html_tells_the_size_of_a_statistic_and_what_it_is(store: Store) -> None:
    html = store._repr_html_()
    for name in store.names():
        row = html.partition(f"<code>{name}</code>")[2].partition("</tr>")[0]
        assert "<td></td>" not in row, name
    for name in ("pattern.entropy", "z.second_moment"):
        size = ", ".join(f"{d} {n}" for d, n in store[name].sizes.items())
        assert f"<td>{size}</td>" in html
    assert "<td>Shannon entropy of attention, mean over query rows, in nats.</td>" in html


def test_store_info_is_plain_data(path: Path) -> None:
    import json

    info = store_info(path)
    assert json.loads(json.dumps(info)) == info
    assert info["sealed"]
    assert info["units"] == {"planned": 2, "present": 2}
    assert info["bytes"] == sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert [row["name"] for row in info["arrays"]] == [
        "pattern",
        "z",
        "pattern.entropy",
        "pattern.by_offset",
    ]


def test_stores_can_be_pickled(store: Store) -> None:
    again = pickle.loads(pickle.dumps(store["z"]))
    xr.testing.assert_identical(again, store["z"])


# ---- exporting -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pattern", "result", "pattern.entropy", "pattern.by_offset"])
def test_exported_values_are_those_of_the_store(store: Store, tmp_path: Path, name: str) -> None:
    expected = store[name].values
    npy = export(store, name, tmp_path / "x.npy")
    np.testing.assert_array_equal(np.load(npy, allow_pickle=False), expected)
    assert np.load(npy).dtype == expected.dtype
    tensors = load_file(export(store, name, tmp_path / "x.bin", "safetensors"))
    np.testing.assert_array_equal(tensors[name], expected)
    np.testing.assert_array_equal(tensors["tokens"], store.tokens.values)
    np.testing.assert_array_equal(tensors["lengths"], store.lengths.values)


def test_exporting_keeps_modes_and_links(store: Store, tmp_path: Path) -> None:
    """CASES, fact 8."""
    mask = os.umask(0o022)
    try:
        for ending in ("npy", "safetensors"):
            real = tmp_path / f"real.{ending}"
            export(store, "z", real)
            assert real.stat().st_mode & 0o777 == 0o644
            real.chmod(0o664)
            link = tmp_path / f"link.{ending}"
            link.symlink_to(real)
            export(store, "pattern", link, overwrite=True)
            assert link.is_symlink()
            assert real.stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(mask)
    np.testing.assert_array_equal(np.load(tmp_path / "real.npy"), store["pattern"].values)


def test_what_cannot_be_exported(store: Store, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'csv'"):
        export(store, "z", tmp_path / "x.csv")
    with pytest.raises(NeedError):
        export(store, "zz", tmp_path / "x.npy")
    (tmp_path / "x.npy").write_text("mine")
    with pytest.raises(OutputError, match="already"):
        export(store, "z", tmp_path / "x.npy")
    assert (tmp_path / "x.npy").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]
