"""Datasets: of the Hugging Face hub, streamed, and local json, csv and parquet files."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attnlens.activations import nearest
from attnlens.errors import CorpusError

#: Builder of the datasets library by file suffix, with its options.
_BUILDERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"delimiter": "\t"}),
    ".parquet": ("parquet", {}),
}
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def parse_name(text: str) -> tuple[str, str | None, str | None]:
    """Split ``NAME[:split[:column]]``; a colon inside an existing path does not split.

    Returns
    -------
    name : str
    split, column : str or None
    """
    parts = text.split(":")
    for n in range(len(parts), 0, -1):
        if Path(":".join(parts[:n])).exists():
            parts[:n] = [":".join(parts[:n])]
            break
    else:
        if _DRIVE.match(text):
            parts[:2] = [":".join(parts[:2])]
    if len(parts) > 3 or not parts[0]:
        raise CorpusError(
            f"{text!r} does not name a dataset.",
            hint="Write NAME, NAME:split or NAME:split:column.",
        )
    name, split, column = (*parts, "", "")[:3]
    return name, split or None, column or None


def read_rows(source: str) -> Generator[str | None]:
    """Yield the text of each row of ``NAME[:split[:column]]``; None where a row has none.

    NAME is a dataset of the hub (``owner/name``, or ``owner/name/config`` where it has several),
    a json, jsonl, csv, tsv or parquet file, or a folder of such files. Nothing of the dataset's
    is executed.

    Raises
    ------
    CorpusError
        If it cannot be had, or has no such split or column: then with those it has.
    """
    name, split, column = parse_name(source)
    with _quiet(), _reported(name):
        splits = _load(name)
        rows = splits[_choose_split(name, split, list(splits))]
        iterator = iter(rows)
        first = next(iterator, None)
        if first is None:
            raise CorpusError(f"The dataset {name!r} has no rows.")
        chosen = _choose_column(name, column, first, getattr(rows, "features", None))
        row: Mapping[str, Any] | None = first
        number = 0
        while row is not None:
            value = row[chosen]
            if value is not None and not isinstance(value, str):
                raise CorpusError(
                    f"Column {chosen!r} of the dataset {name!r} holds {value!r:.40} in row "
                    f"{number}, which is no text.",
                    hint=f"Columns: {', '.join(map(str, row))}. Write NAME:split:column.",
                )
            yield value
            row = next(iterator, None)
            number += 1


def _load(name: str) -> Mapping[str, Any]:
    import datasets

    path = Path(name)
    suffix = path.suffix.lower()
    if path.is_file() or (suffix in _BUILDERS and "://" not in name):
        if suffix not in _BUILDERS:
            raise CorpusError(
                f"The file {name!r} is not a dataset: its suffix is {suffix!r}.",
                hint=f"Known: {', '.join(_BUILDERS)}. Plain text is read with --text-file.",
            )
        if not path.is_file():
            raise CorpusError(f"There is no file {name!r}.", hint="Check the path.")
        builder, options = _BUILDERS[suffix]
        loaded = datasets.load_dataset(builder, data_files=name, streaming=True, **options)
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = datasets.load_from_disk(name)
    elif path.is_dir():
        loaded = datasets.load_dataset(name, streaming=True)
    else:
        owner_and_name, config = name, None
        if name.count("/") == 2:
            owner_and_name, _, config = name.rpartition("/")
        loaded = datasets.load_dataset(owner_and_name, config, streaming=True)
    splits: Mapping[str, Any] = loaded if isinstance(loaded, dict) else {"train": loaded}
    return splits


def _choose_split(name: str, split: str | None, known: list[str]) -> str:
    if split is None and ("train" in known or len(known) == 1):
        return "train" if "train" in known else known[0]
    if split in known:
        assert split is not None
        return split
    said = f"has no split {split!r}" if split else "has several splits, and none is chosen"
    raise CorpusError(
        f"The dataset {name!r} {said}.",
        hint=f"Splits: {', '.join(known)}. Write NAME:split or NAME:split:column.",
    )


def _choose_column(
    name: str, column: str | None, first: Mapping[str, Any], features: Mapping[str, Any] | None
) -> str:
    known = list(first)
    if column is not None:
        if column in known:
            return column
        near = nearest(column, known)
        raise CorpusError(
            f"The dataset {name!r} has no column {column!r}.",
            hint=(f"Did you mean {near!r}? " if near else "") + f"Columns: {', '.join(known)}.",
        )

    def is_text(key: str) -> bool:
        kind = getattr((features or {}).get(key), "dtype", None)
        return kind in ("string", "large_string") if kind else isinstance(first[key], str)

    texts = [key for key in known if is_text(key)]
    if "text" in texts or len(texts) == 1:
        return "text" if "text" in texts else texts[0]
    raise CorpusError(
        f"The dataset {name!r} has no column 'text', and "
        + ("several that hold text." if texts else "none that holds text."),
        hint=f"Columns: {', '.join(known)}. Write NAME:split:column.",
    )


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    """Turn whatever the datasets library raises into one sentence."""
    try:
        yield
    except CorpusError:
        raise
    except Exception as error:
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        raise CorpusError(
            f"The dataset {name!r} cannot be read: {said or type(error).__name__}",
            hint="Check the name, the network and HF_HUB_OFFLINE; a dataset with several "
            "configurations is written owner/name/config. Local json, jsonl, csv and parquet "
            "files need no network.",
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the datasets library from printing what is raised anyway."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
