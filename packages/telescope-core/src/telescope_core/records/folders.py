"""Files and folders that appear whole or not at all: written beside their name, then renamed.

`whole_file` is for one file. A folder that several processes fill is written to `partial_folder`
and then `put_in_place`. A crash leaves what was there before, and something that begins with a dot
beside it, which no reader takes for the real thing.
"""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """Give a path to write to; it becomes `path` when the block ends without an error.

    Creates the folder of `path`. Readers see the old file or the new one, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def partial_folder(path: Path) -> Path:
    """Return where the folder `path` is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


def put_in_place(path: Path) -> None:
    """Rename the finished partial folder of `path` to it; an older one there is replaced."""
    partial, old = partial_folder(path), path.with_name(f".{path.name}.old")
    sync_folder(partial)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush the contents of every file to disk, so that a rename cannot arrive before them."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def sweep(folder: Path) -> None:
    """Delete what crashes left in `folder`; nobody may be writing there."""
    for leftover in ("partial", "old", "removed"):
        for path in folder.glob(f".*.{leftover}"):
            shutil.rmtree(path)


def remove_folder(path: Path) -> None:
    """Delete a folder; its name is gone before its first file is."""
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)
