"""The one place that knows that a store is a folder on a local disk.

Committing, locking and sweeping live here. On an object store, where renaming is not atomic, the
same functions would write a marker object last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from attnlens.errors import StoreError, StoreLockedError

#: Prefix of what is being written; swept when a writer starts.
TEMPORARY: Final = ".writing-"

_LOCK: Final = ".lock"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def clear_errors(place: Path) -> Iterator[None]:
    """Turn what the operating system says while writing into one :class:`StoreError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = (
            "Free some space or write elsewhere; then finish with --resume."
            if error.errno in _FULL
            else "Check the folder and its permissions; then finish with --resume."
        )
        raise StoreError(f"{place} cannot be written: {reason}.", hint=hint) from error


def fsync_file(path: Path) -> None:
    """Force a file's content to the disk."""
    _fsync(path)


def fsync_folder(path: Path) -> None:
    """Force a folder's entries to the disk; nothing on systems that cannot."""
    if os.name == "posix":
        _fsync(path)


def _fsync(path: Path) -> None:
    # Windows syncs only what is open for writing.
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Force everything under `folder` to the disk.

    All at once: file systems gather the waiting, so that many files take little longer than one.
    """
    entries = list(folder.rglob("*"))
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(fsync_file, [p for p in entries if p.is_file()]))
        list(pool.map(fsync_folder, [folder, *(p for p in entries if p.is_dir())]))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, force it to the disk, and rename it into place."""
    with clear_errors(path):
        temporary = path.with_name(TEMPORARY + path.name)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Build a folder under a temporary name; on success it gets its own name, whole.

    Yields
    ------
    Path
        The temporary folder. It is removed if the block raises.
    """
    temporary = path.with_name(TEMPORARY + path.name)
    with clear_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        # Errors of the block itself are not about writing, and pass as they are.
        yield temporary
        with clear_errors(path):
            fsync_tree(temporary)
            temporary.rename(path)
            fsync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sweep(folder: Path) -> None:
    """Remove what an interrupted writer left under a temporary name."""
    if not folder.is_dir():
        return
    with clear_errors(folder):
        for stray in folder.glob(TEMPORARY + "*"):
            remove(stray)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class WriterLock:
    """Held by the one process that writes a store; the system drops it when the process dies.

    Parameters
    ----------
    folder : Path
        The store.

    Raises
    ------
    StoreLockedError
        If another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / _LOCK
        self._lock = FileLock(self._file, timeout=0, thread_local=False)
        with clear_errors(folder):
            try:
                self._lock.acquire()
                while not self._file.exists():
                    # Its last holder removed it just before this lock was taken.
                    self._lock.release()
                    self._lock.acquire()
            except Timeout:
                raise StoreLockedError(
                    f"Another process is writing {folder}.",
                    hint="Wait until it has finished, or write to another folder.",
                ) from None

    def release(self) -> None:
        """Let others write."""
        # While it is still held: whoever waits for it notices that the file has gone, and begins
        # with a new one.
        self._file.unlink(missing_ok=True)
        self._lock.release()

    def covers(self, path: Path) -> bool:
        """Whether `path` is the lock's own file."""
        return path.name == _LOCK
