"""Turn a full disk, a quota or a limit on files into an error that says where to make room.

Other refusals of a file system become an error that names the path.
"""

import errno
import os
import resource
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from telescope_core.base.errors import NoRoomError, NotWrittenError
from telescope_core.base.open_files import advice_for

_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
}
_OF_DISK = (errno.EROFS, errno.EIO, errno.ESTALE)
"""`errno` of a file system that fails, whatever the path is."""
_OF_PATH = (
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)
"""`errno` that tells of a path; without one it may be of something else, such as a process."""


@contextmanager
def room_for(
    path: Path, *kinds: type[Exception], needed_bytes: int | None = None
) -> Generator[None]:
    """Raise NoRoomError for `path` if a write in this block fails for lack of room.

    `kinds`: exceptions that a library raises in place of OSError. `needed_bytes`: size of the data,
    if known.
    """
    try:
        yield
    except (OSError, *kinds) as error:
        lack = lack_of_room(path, error, needed_bytes=needed_bytes)
        if lack is None:
            raise
        raise lack from error


def lack_of_room(
    path: Path, error: BaseException, *, needed_bytes: int | None = None
) -> NoRoomError | None:
    """Return `error` of a write to `path` as a NoRoomError; None if it has another cause.

    Libraries hide the system's error. One of theirs counts as a lack of room if there is less than
    `needed_bytes`.
    """
    if too_many := advice_for(error):
        return NoRoomError(f"cannot write {path}: {too_many}. Nothing there is half written")
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    code = _code_of(error)
    if code == errno.EFBIG:
        return NoRoomError(f"cannot write {path}: {too_large()}. Nothing there is half written")
    is_short = not isinstance(error, OSError) and free_bytes < (needed_bytes or 0)
    if code is None and not is_short:
        return None
    needed = "" if needed_bytes is None else f", {_size(needed_bytes)} are needed"
    return NoRoomError(
        f"cannot write {path}: {_NO_ROOM[code or errno.ENOSPC]} ({_size(free_bytes)} are free in "
        f"{os.path.abspath(folder)}{needed}). Nothing there is half written. Make room, for "
        "example by removing files that nobody needs, such as checkpoints of earlier runs"
    )


def not_written(error: OSError) -> NotWrittenError | None:
    """Return the refusal of a file system to work that has begun; None if `error` is another."""
    # A stream that is written to has a number in place of a path.
    path = error.filename2 or error.filename
    place = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    if error.errno in NoRoomError.CODES:
        lack = lack_of_room(Path(place), error) if place else None
        return lack or NoRoomError(f"cannot write a file: {error.strerror}")
    if error.errno in _OF_DISK or (place and error.errno in _OF_PATH):
        return NotWrittenError(f"cannot use {place or 'a file'}: {error.strerror}")
    return None


def too_large() -> str:
    """Return why a file cannot become as large as it would be, and what to do."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most == resource.RLIM_INFINITY:
        return "it would be larger than a file may be there; name a place on another file system"
    return (
        f"it would be larger than this process may write ({_size(most)}); raise the limit with "
        "ulimit -f"
    )


def _code_of(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno if error.errno in NoRoomError.CODES else None
    return next((code for code in NoRoomError.CODES if f"os error {code}" in str(error)), None)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,} bytes"
