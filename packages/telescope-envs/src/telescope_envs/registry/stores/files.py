"""Atomic file changes: a reader sees either the complete old file or the complete new one.

`locked` excludes other writers, in this process and in others. The lock is released when its
process ends in any way, so a killed writer never blocks others.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from telescope_core.errors import RegistryError

_PAUSE_S = 0.02


@contextmanager
def locked(path: Path, *, wait_s: float, what: str) -> Generator[None]:
    """Hold the lock file at `path`; raises RegistryError when others hold it for `wait_s`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for(descriptor, wait_s=wait_s, what=what)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, scratch: Path) -> None:
    """Write `data` to `path` atomically, and sync it to disk before returning.

    `scratch` is a folder on the same file system; a killed writer leaves its partial files there.
    """
    aside = scratch / f"{os.getpid()}-{path.name}"
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _make_folders(path.parent)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file if it exists, and sync the removal to disk."""
    path.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _wait_for(descriptor: int, *, wait_s: float, what: str) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
                raise RegistryError(
                    f"{what} has been locked by another process (id {holder}) for more than "
                    f"{wait_s:g} s; try again when that process has ended"
                ) from None
            time.sleep(_PAUSE_S)
        else:
            return


def _make_folders(folder: Path) -> None:
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
