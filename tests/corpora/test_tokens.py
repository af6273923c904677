"""Token ids as given, and what prompts promise: hash, groups, plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlens.corpora import CorpusSpec, Prompts, as_corpus, load_prompts
from attnlens.errors import CorpusError

from .conftest import facts_of


def load(value: Any, **fields: Any) -> Prompts:
    return load_prompts(as_corpus(value, **fields), tokenizer=None, facts=facts_of())


def saved(tmp_path: Path, array: Any) -> Path:
    path = tmp_path / "ids.npy"
    np.save(path, array)
    return path


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16", "int8", ">i4", "uint64"])
def test_file_of_ids_exactly_as_given(tmp_path: Path, dtype: str) -> None:
    array = np.array([[0, 0, 7], [49, 3, 0]], dtype)
    prompts = load(saved(tmp_path, array))
    assert [p.tolist() for p in prompts.tokens] == array.tolist()
    assert prompts.bos == "as given" and prompts.notes == ()
    assert all(p.dtype == np.int32 and not p.flags.writeable for p in prompts.tokens)


def test_one_dimension_is_one_prompt(tmp_path: Path) -> None:
    assert load(saved(tmp_path, np.arange(5))).lengths == (5,)
    assert load(saved(tmp_path, np.array([3]))).lengths == (1,)


@pytest.mark.parametrize(
    "value",
    [
        np.array([[1, 2], [3, 4]]),
        [[1, 2], [3, 4]],
        torch.tensor([[1, 2], [3, 4]]),
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        [np.array([1, 2]), (3, 4)],
    ],
)
def test_arrays_tensors_and_lists(value: Any) -> None:
    assert [p.tolist() for p in load(value).tokens] == [[1, 2], [3, 4]]


def test_ragged_sequences_of_ids() -> None:
    assert load([[1, 2, 3], np.array([4])]).lengths == (3, 1)


def test_the_callers_array_is_not_touched() -> None:
    given_ids = np.array([[1, 2]], np.int32)
    prompts = load(given_ids)
    given_ids[0, 0] = 5
    assert prompts.tokens[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        ([[1, 2, 3], [4, 50, -7]], r"Token id 50 at prompt 1, position 1 .* vocabulary of 50"),
        ([[1, -1], [4, 50]], r"Token id -1 at prompt 0, position 1"),
        (np.array([[2**63]], np.uint64), r"Token id 9223372036854775808"),
        ([[1.0, 2.0]], "must be integers, but these are float64"),
        ([[True, False]], "must be integers, but these are bool"),
        ([[["a"]]], "must be integers"),
        (np.zeros((2, 2, 2), int), "1 or 2 dimensions, but these have 3"),
        (np.array(3), "1 or 2 dimensions, but these have 0"),
        (np.zeros((0, 4), int), r"empty: its shape is \(0, 4\)"),
    ],
)
def test_ids_that_cannot_be_used(tmp_path: Path, array: Any, said: str) -> None:
    with pytest.raises(CorpusError, match=said) as caught:
        load(saved(tmp_path, np.asarray(array)))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", [[[1, 2], []], [], [[[1, 2], [3, 4]], [5]], {"a": 1}, 3.5, [1.5]])
def test_python_values_that_are_no_corpus(value: Any) -> None:
    with pytest.raises(CorpusError):
        load(value)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "exploded").touch, ())

    path = tmp_path / "ids.npy"
    np.save(path, np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(CorpusError, match=r"not a \.npy file of integers"):
        load(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("content", [b"", b"hello world", b"\x93NUMPY\x01\x00v\x00", b"PK\x03\x04"])
def test_files_that_are_not_npy(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    with pytest.raises(CorpusError):
        load(path)


def test_npz_and_missing_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", a=np.arange(3))
    with pytest.raises(CorpusError, match="several arrays"):
        load(CorpusSpec("tokens", source=str(tmp_path / "ids.npz")))
    with pytest.raises(CorpusError, match="cannot be read"):
        load(tmp_path / "none.npy")


def test_long_rows_are_cut_to_the_context_and_said() -> None:
    prompts = load([list(range(20)), [1]])
    assert prompts.lengths == (16, 1)
    assert prompts.notes == ("1 of 2 prompts had more than 16 tokens and was cut to 16.",)


def test_length_samples_and_chunk() -> None:
    array = np.arange(40).reshape(4, 10)
    assert load(array, length=3, samples=2).lengths == (3, 3)
    assert load(np.arange(11), chunk=5).lengths == (5, 5)
    assert load(np.arange(3), chunk=5).lengths == (3,)


def test_a_choice_of_bos_is_said_to_have_no_effect() -> None:
    assert "as given" in load([[1]], bos=True).notes[0]


# --- prompts ---

SEQUENCES = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=12), min_size=1, max_size=12)


@given(SEQUENCES)
def test_groups_hold_every_prompt_once_at_its_length(sequences: list[list[int]]) -> None:
    prompts = load(sequences)
    groups = prompts.by_length()
    lengths = [length for length, _ in groups]
    assert lengths == sorted(set(lengths))
    assert sorted(i for _, members in groups for i in members) == list(range(len(sequences)))
    for length, members in groups:
        assert all(len(sequences[i]) == length for i in members)
        assert list(members) == sorted(members)


@given(SEQUENCES, SEQUENCES)
def test_hash_is_equal_just_where_the_prompts_are(a: list[list[int]], b: list[list[int]]) -> None:
    assert (load(a).hash == load(b).hash) == (a == b)


def test_hash_sees_where_prompts_end_and_their_order() -> None:
    assert len({load(v).hash for v in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]])}) == 3
    # Held fixed, because stores keep it.
    assert load([[1, 2], [3]]).hash.startswith("5d278c6dc55c9b0d")


def test_plain_data_round_trips_and_has_no_tokens() -> None:
    prompts = load([[1, 2], [3]], seed=5)
    data = json.loads(json.dumps(prompts.to_json()))
    assert data["name"] == "tokens" and data["seed"] == 5 and data["hash"] == prompts.hash
    assert data["bos_policy"] == "as given" and data["prompts"] == 2
    assert "tokens" not in data


def test_summary_is_for_people() -> None:
    assert load([[1, 2], [3]]).summary == "2 prompts of 1 to 2 tokens from 'tokens', BOS as given"
    assert load([[1]]).summary == "1 prompt of 1 token from 'tokens', BOS as given"


# --- specs ---


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "repeted-random"}, "no corpus 'repeted-random'"),
        ({"samples": 0}, "samples is 0"),
        ({"length": -1}, "length is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"name": "text"}, "No text"),
        ({"name": "file"}, "does not say what to read"),
        ({"name": "dataset"}, "does not say what to read"),
        ({"name": "tokens"}, "No token ids"),
    ],
)
def test_specs_that_contradict_themselves(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CorpusError, match=said) as caught:
        CorpusSpec(**fields)
    if fields.get("name") == "repeted-random":
        assert "Did you mean 'repeated-random'" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "default"),
        ("default", "default"),
        ("repeated-random", "repeated-random"),
        ("some text", "text"),
        (["a", "b"], "text"),
        (Path("a.txt"), "file"),
        (Path("a.NPY"), "tokens"),
        (Path("a.jsonl"), "dataset"),
        (np.array([1]), "tokens"),
        (CorpusSpec("text", texts=("a",)), "text"),
    ],
)
def test_what_a_value_means_as_a_corpus(value: Any, name: str) -> None:
    spec = as_corpus(value, seed=3)
    assert spec.name == name and spec.seed == 3
    json.dumps(spec.to_json())
