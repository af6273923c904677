"""Datasets: local files through the datasets library; the hub through a stand-in."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnlens.corpora import CorpusSpec, Prompts, load_prompts
from attnlens.corpora.data import parse_name
from attnlens.errors import CorpusError

ROWS: list[dict[str, Any]] = [
    {"text": "w1 w2", "title": "w9", "year": 1},
    {"text": "", "title": "w8", "year": 2},
    {"text": None, "title": "w7", "year": 3},
    {"text": "w3", "title": "w6", "year": 4},
]


def load(tokenizer: Any, facts: Any, source: object, **fields: Any) -> Prompts:
    spec = CorpusSpec("dataset", source=str(source), **fields)
    return load_prompts(spec, tokenizer=tokenizer, facts=facts)


def ids(prompts: Prompts) -> list[list[int]]:
    return [p.tolist() for p in prompts.tokens]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    frame = pd.DataFrame(rows)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".csv":
            frame.to_csv(path, index=False)
        case ".tsv":
            frame.to_csv(path, index=False, sep="\t")
        case ".parquet":
            frame.to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_local_files(tmp_path: Path, word_tokenizer: Any, tiny: Any, suffix: str) -> None:
    path = write(tmp_path / f"rows.{suffix}", ROWS)
    prompts = load(word_tokenizer, tiny, path)
    assert ids(prompts) == [[41, 2, 3], [41, 4]]
    assert prompts.notes == ("2 empty rows skipped.",)
    assert ids(load(word_tokenizer, tiny, f"{path}:train:title", samples=2)) == [[41, 10], [41, 9]]


def test_a_folder_with_colons_in_its_name(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    folder = tmp_path / "a:b ü"
    folder.mkdir()
    path = write(folder / "rows.jsonl", ROWS)
    assert len(load(word_tokenizer, tiny, path)) == 2
    assert len(load(word_tokenizer, tiny, f"{path}::title")) == 4


def test_saved_datasets(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "several"))
    assert len(load(word_tokenizer, tiny, tmp_path / "one")) == 2
    assert len(load(word_tokenizer, tiny, tmp_path / "several")) == 2
    assert len(load(word_tokenizer, tiny, f"{tmp_path / 'several'}:test:title")) == 4


def test_an_unknown_column_lists_the_columns(
    tmp_path: Path, word_tokenizer: Any, tiny: Any
) -> None:
    path = write(tmp_path / "rows.csv", ROWS)
    with pytest.raises(CorpusError, match="no column 'titel'") as caught:
        load(word_tokenizer, tiny, f"{path}:train:titel")
    assert caught.value.hint == "Did you mean 'title'? Columns: text, title, year."


def test_an_unknown_split_lists_the_splits(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    path = write(tmp_path / "rows.csv", ROWS)
    with pytest.raises(CorpusError, match="no split 'title'") as caught:
        load(word_tokenizer, tiny, f"{path}:title")
    assert "Splits: train. Write NAME:split or NAME:split:column." in str(caught.value.hint)


def test_the_only_column_of_text_is_taken_else_one_must_be_named(
    tmp_path: Path, word_tokenizer: Any, tiny: Any
) -> None:
    one = write(tmp_path / "one.jsonl", [{"n": 1, "body": "w1"}])
    assert ids(load(word_tokenizer, tiny, one)) == [[41, 2]]
    two = write(tmp_path / "two.jsonl", [{"a": "w1", "b": "w2"}])
    with pytest.raises(CorpusError, match="several that hold text") as caught:
        load(word_tokenizer, tiny, two)
    assert "Columns: a, b" in str(caught.value.hint)
    none = write(tmp_path / "none.jsonl", [{"n": 1}])
    with pytest.raises(CorpusError, match="none that holds text"):
        load(word_tokenizer, tiny, none)


def test_a_column_that_is_not_text(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    path = write(tmp_path / "rows.parquet", ROWS)
    with pytest.raises(CorpusError, match=r"Column 'year' .* holds 1 in row 0, which is no text"):
        load(word_tokenizer, tiny, f"{path}:train:year")


def test_only_what_is_needed_is_read(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    path = write(tmp_path / "rows.jsonl", [{"text": f"w{i % 40}"} for i in range(50)])
    prompts = load(word_tokenizer, tiny, path)
    assert len(prompts) == 32
    assert prompts.notes == ("Only the first 32 rows were taken.",)
    assert len(load(word_tokenizer, tiny, path, samples=40)) == 40


def test_rows_as_running_text(tmp_path: Path, word_tokenizer: Any, tiny: Any) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert ids(load(word_tokenizer, tiny, path, chunk=3)) == [[41, 2, 3]]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", '{"text": "w1"', "cannot be read"),
        ("rows.json", "[]", "no rows|cannot be read"),
        ("rows.csv", "", "no rows|cannot be read"),
        ("rows.csv", "text\n", "no rows"),
        ("rows.parquet", "nonsense", "cannot be read"),
        ("rows.xlsx", "nonsense", "suffix is '.xlsx'"),
        ("rows.txt", "w1", "suffix is '.txt'"),
    ],
)
def test_files_that_are_no_dataset(
    tmp_path: Path,
    word_tokenizer: Any,
    tiny: Any,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: str,
    said: str,
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(CorpusError, match=said):
        load(word_tokenizer, tiny, path)
    assert not [r for r in caplog.records if r.name.startswith("datasets")]


def test_missing_files_and_odd_names(word_tokenizer: Any, tiny: Any) -> None:
    with pytest.raises(CorpusError, match=r"no file 'none\.jsonl'"):
        load(word_tokenizer, tiny, "none.jsonl")
    for name in ("a:b:c:d", ":train"):
        with pytest.raises(CorpusError, match="does not name a dataset"):
            load(word_tokenizer, tiny, name)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("imdb", ("imdb", None, None)),
        ("owner/name:test", ("owner/name", "test", None)),
        ("owner/name:test:body", ("owner/name", "test", "body")),
        ("owner/name::body", ("owner/name", None, "body")),
        (r"C:\data\x.csv:train:a", (r"C:\data\x.csv", "train", "a")),
    ],
)
def test_names(text: str, parts: tuple[str, str | None, str | None]) -> None:
    assert parse_name(text) == parts


# --- the hub, by a stand-in for datasets.load_dataset ---


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    import datasets

    calls: list[tuple[Any, ...]] = []

    def answer_with(answer: Any) -> list[tuple[Any, ...]]:
        def load_dataset(*args: Any, **options: Any) -> Any:
            calls.append((*args, options))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return answer_with


def test_a_dataset_of_the_hub_is_streamed(hub: Any, word_tokenizer: Any, tiny: Any) -> None:
    def endless() -> Any:
        while True:
            yield {"text": "w1"}

    calls = hub({"test": [{"text": "w2"}], "train": endless()})
    assert len(load(word_tokenizer, tiny, "owner/name", samples=3)) == 3
    assert ids(load(word_tokenizer, tiny, "owner/name/config:test")) == [[41, 3]]
    assert calls == [
        ("owner/name", None, {"streaming": True}),
        ("owner/name", "config", {"streaming": True}),
    ]


def test_several_splits_without_train(hub: Any, word_tokenizer: Any, tiny: Any) -> None:
    hub({"a": [], "b": []})
    with pytest.raises(CorpusError, match="several splits") as caught:
        load(word_tokenizer, tiny, "owner/name")
    assert "Splits: a, b" in str(caught.value.hint)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'owner/name' on the Hub (OfflineModeIsEnabled)"),
        ValueError("Config name is missing.\nPlease pick one among the available configs: ['a']"),
        RuntimeError("Dataset scripts are no longer supported, but found name.py"),
        OSError(),
    ],
)
def test_whatever_the_hub_answers_is_one_error(
    hub: Any, word_tokenizer: Any, tiny: Any, error: Exception
) -> None:
    hub(error)
    with pytest.raises(CorpusError, match="'owner/name' cannot be read: ") as caught:
        load(word_tokenizer, tiny, "owner/name")
    assert caught.value.exit_code == 2
    assert str(error).split("\n")[0] in caught.value.message
    assert logging.getLogger("datasets").level != logging.CRITICAL


def test_importing_corpora_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    script = (
        "import sys, attnlens.corpora, attnlens.demo; heavy = 'torch transformers datasets pandas';"
        "print([m for m in heavy.split() if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr
