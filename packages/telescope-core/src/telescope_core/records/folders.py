"""Atomic files and folders: written under a temporary name, then renamed.

`whole_file` and `whole_folder` are for one writer; `claimed` decides who that is. A folder that
several processes fill is written to `partial_folder` and then renamed by `put_in_place`. After a
crash the old content is still there, and beside it may be leftovers whose names begin with a dot,
which readers ignore.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from telescope_core.base import interrupts
from telescope_core.base.folders import make_folder
from telescope_core.records.room import room_for


@contextmanager
def claimed(folder: Path) -> Generator[None]:
    """Hold a lock, so that nobody else begins in `folder` while the block decides whether it may.

    A file system that has no locks of folders, such as NFS, does without.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path, *, needed_bytes: int | None = None) -> Generator[Path]:
    """Yield a temporary path that is renamed to `path` when the block ends without an error.

    Creates the parent folder of `path`. Readers see the old file or the new one, never a part.
    `needed_bytes`: size of the new one, if known. An OSError of the temporary path names `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with room_for(path, needed_bytes=needed_bytes):
            make_folder(path.parent)
            yield temporary
            os.replace(temporary, path)
    except OSError as error:
        # A message names the file that somebody knows.
        if error.filename == str(temporary):
            error.filename = str(path)
        raise
    finally:
        # The first signal may be why it ends, and a second one must not leave it here.
        with interrupts.held():
            temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """Yield an empty folder that replaces `path` when the block ends without an error.

    After an error `path` is unchanged, and the new files are deleted.
    """
    partial = partial_folder(path)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with room_for(path):
            partial.mkdir(parents=True)
            yield partial
            put_in_place(path)
    finally:
        with interrupts.held():
            shutil.rmtree(partial, ignore_errors=True)


def partial_folder(path: Path) -> Path:
    """Return the temporary path of the folder `path` until it is complete."""
    return path.with_name(f".{path.name}.partial")


def put_in_place(path: Path) -> None:
    """Rename the finished partial folder to `path`, and replace an older folder there."""
    partial, old = partial_folder(path), path.with_name(f".{path.name}.old")
    open_as_folder(partial)
    sync_folder(partial)
    # A signal between the two renames would leave no folder of that name, and a later one the old.
    with interrupts.held():
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def end_replacing(folder: Path) -> None:
    """Finish replacements in `folder` that a crash interrupted between two renames.

    No process may be writing there.
    """
    for old in folder.glob(".*.old"):
        path = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        # The old one loses its name only once the new one is finished.
        if not path.exists() and partial_folder(path).is_dir():
            partial_folder(path).rename(path)


def open_as_folder(folder: Path) -> None:
    """Let everybody who may read or write the new `folder` do so with the files in it.

    safetensors creates files for their owner alone, whatever the umask, which the folder shows.
    """
    granted = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) and granted & ~mode:
            path.chmod(stat.S_IMODE(mode) | granted)


def sync_folder(folder: Path) -> None:
    """Flush every file to disk, so that a crash cannot keep the rename but lose the contents."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def sweep(folder: Path) -> None:
    """Delete leftovers of crashes in `folder`, where no process may be writing."""
    end_replacing(folder)
    for leftover in ("partial", "old", "removed"):
        for path in folder.glob(f".*.{leftover}"):
            shutil.rmtree(path)


def remove_folder(path: Path) -> None:
    """Delete a folder; it is renamed first, so that readers never see it half deleted."""
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)
