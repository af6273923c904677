"""Text files: UTF-8, with errors that say where and how to mend it."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from attnlens.errors import CorpusError

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 file without their ends; a leading byte-order mark is dropped.

    Lines end at ``\n``, ``\r\n`` or ``\r`` and nowhere else.

    Raises
    ------
    CorpusError
        If the file cannot be read, or is not UTF-8: then with the offset of the first wrong byte.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise _wrong_encoding(path) from error
    except OSError as error:
        raise CorpusError(
            f"The text file {str(path)!r} cannot be read: {error.strerror or error}.",
            hint="Check the path.",
        ) from error


def _wrong_encoding(path: Path) -> CorpusError:
    """Find the first byte that is not UTF-8, counted from the file's start."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = 0
    with path.open("rb") as file:
        head = file.read(2)
        file.seek(0)
        while True:
            block = file.read(1 << 20)
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = before - held + error.start
                byte = error.object[error.start]
                break
            before += len(block)
    guess = "UTF-16" if head in _UTF16 else "WINDOWS-1252"
    return CorpusError(
        f"The text file {str(path)!r} is not UTF-8: byte 0x{byte:02x} at offset {offset}.",
        hint=f"Convert it, for instance: iconv -f {guess} -t UTF-8 '{path}' > converted.txt",
    )
