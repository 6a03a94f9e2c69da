"""A full disk, a quota or a limit on file sizes as an error that says where to make room."""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from telescope_core.errors import NoRoomError

_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "the file would be larger than this process may write (ulimit -f)",
}


@contextmanager
def room_for(path: Path, *kinds: type[Exception]) -> Generator[None]:
    """Raise NoRoomError for `path` when what is written in this block finds no room.

    `kinds`: what a library raises for it in place of OSError.
    """
    try:
        yield
    except (OSError, *kinds) as error:
        code = _code_of(error)
        if code is None:
            raise
        raise NoRoomError(
            f"cannot write {path}: {_NO_ROOM[code]} ({_free(path)}). Nothing there is half "
            "written. Make room, for example by removing checkpoints that nobody needs, and "
            "go on: for `telescope train`, with --resume"
        ) from error


def _code_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno if error.errno in _NO_ROOM else None
    return next((code for code in _NO_ROOM if f"os error {code}" in str(error)), None)


def _free(path: Path) -> str:
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free_mb = shutil.disk_usage(folder).free / 2**20
    return f"{free_mb:,.0f} MiB are free in {os.path.abspath(folder)}"
