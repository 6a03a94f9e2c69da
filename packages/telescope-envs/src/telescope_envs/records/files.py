"""The data folder, reads of others' files, locks, atomic writes, and folders of any depth.

A reader sees either the whole old file or the whole new one, however the writer ended.
"""

import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path

from telescope_core.base.errors import ConfigError, NoRoomError, RegistryError, TelescopeError
from telescope_core.base.folders import make_folder
from telescope_core.base.interrupts import raise_in_thread_if_asked

VARIABLE = "TELESCOPE_HOME"


def sha256_of(data: bytes | str) -> str:
    """Return the digest of bytes, or of a text in UTF-8, as hexadecimal digits."""
    # Imported only now: lists need no digests, and loading OpenSSL takes longer than a small list.
    hashes = import_module("hashlib")
    return hashes.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def data_folder() -> Path:
    """Return `$TELESCOPE_HOME`, or else a folder of this interpreter, so each has its own."""
    chosen = os.environ.get(VARIABLE, "")
    if not chosen:
        return Path(sys.prefix) / "share" / "telescope"
    # Without `..`, so that what leads out of the folder can be told by its path.
    return Path(os.path.normpath(Path(chosen).expanduser().absolute()))


MAX_FILE_BYTES = 64 * 1024 * 1024
"""Most bytes of a file that is read as a whole, unless another limit is given."""
_CHUNK_BYTES = 64 * 1024
_NOT_PLAIN = "it is no plain file: a link, a named pipe, a device or a socket"
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


def read_file(
    path: str | Path, *, max_bytes: int = MAX_FILE_BYTES, follows_link: bool = False
) -> bytes:
    """Return the bytes of a file that somebody else may have created.

    Raises OSError for a named pipe, a device or a socket, which may never open or never end, for
    more than `max_bytes`, and for a link unless `follows_link`.
    """
    # Half the time of `open`, which matters for the thousands of files of a registry.
    try:
        descriptor = os.open(path, _READING | (0 if follows_link else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ELOOP):
            raise
        raise OSError(error.errno, _NOT_PLAIN, str(path)) from None
    try:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, _NOT_PLAIN, str(path))
        chunks: list[bytes] = []
        left = max_bytes + 1 if about.st_size <= max_bytes else 0
        while left and (chunk := os.read(descriptor, min(left, _CHUNK_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
    finally:
        os.close(descriptor)
    if not left:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", str(path))
    return b"".join(chunks)


def unwritable(what: str, error: OSError, advice: str) -> TelescopeError:
    """Return the error for `what` that cannot be written: there is no room, or no right to."""
    is_full = error.errno in (*NoRoomError.CODES, errno.EROFS)
    kind = NoRoomError if is_full else ConfigError
    return kind(f"{what} cannot be written: {error.strerror}; {advice}")


_POLL_S = 0.02
WAIT_LIMIT_S = 1800.0


@contextmanager
def locked(
    path: Path,
    *,
    what: str,
    wait_s: float = WAIT_LIMIT_S,
    progress: Callable[[str], None] = lambda step: None,
) -> Generator[int]:
    """Hold the lock on `path`, a file to create or an existing folder; yields its descriptor.

    The system releases it when its owner ends, even by kill -9. If child processes inherited the
    descriptor, the lock is held until they have ended as well. `what` tells waiting users what its
    owner is doing. Raises RegistryError when others hold it for `wait_s`.
    """
    descriptor = _opened(path)
    try:
        give_up_s = time.monotonic() + wait_s
        has_told = False
        while not _try(path, descriptor):
            if time.monotonic() >= give_up_s:
                raise RegistryError(
                    f"{what}: another process (id {holder_of(path)}) has held {path} for more "
                    f"than {wait_s:g} s; wait for it or end it, then try again"
                )
            if not has_told:
                progress(f"waiting for another process: {what}")
                has_told = True
            raise_in_thread_if_asked()
            time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked_if_free(path: Path) -> Generator[bool]:
    """Hold the lock on `path` if nobody else does; yields whether it is held."""
    descriptor = _opened(path)
    try:
        yield _try(path, descriptor)
    finally:
        os.close(descriptor)


def holder_of(path: Path) -> str:
    """Return the id of the process that holds or last held the lock on the file `path`."""
    try:
        return path.read_text(errors="replace").strip()[:20] or "unknown"
    except OSError:  # a folder
        return "unknown"


def _opened(path: Path) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY)
    make_folder(path.parent)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _try(path: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with _named(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return True


@contextmanager
def _named(path: Path) -> Generator[None]:
    """Give `path` to an OSError without one: a full disk refuses a write without a name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, data: bytes) -> None:
    """Write a file, and the folders above it; an OSError names it."""
    make_folder(path.parent)
    with _named(path):
        path.write_bytes(data)


@contextmanager
def filled(folder: Path) -> Generator[None]:
    """Fill a new or empty folder; on any error in the block, it is left as it was."""
    was_there = folder.exists()
    try:
        yield
    except BaseException:
        for path in list(folder.iterdir()) if was_there else [folder]:
            remove_tree(path)
        raise


def replace_file(path: Path, data: bytes, *, scratch: Path) -> None:
    """Write `data` to `path` atomically, and sync it to disk before returning.

    `scratch` is a folder on the same file system; a killed writer leaves its partial files there.
    """
    _replace(path, data, aside=scratch / f"{os.getpid()}-{path.name}")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file of this user in the same way, in a folder that may be new."""
    make_folder(path.parent)
    _replace(path, data, aside=path.with_name(f".{path.name}.{os.getpid()}.part"))


def _replace(path: Path, data: bytes, *, aside: Path) -> None:
    try:
        with _named(path), aside.open("wb") as file:
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


_MOVED = ".moved-"


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder`, in order within each folder; links are not followed."""
    pending = [folder]
    while pending:
        here = pending.pop()
        with os.scandir(here) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            else:
                yield Path(entry.path)


def remove_tree(folder: Path) -> bool:
    """Remove a folder, a file or a link, and all below it; returns whether it is gone.

    Files that cannot be removed stay, without an error. Folders are first moved up to the top, so
    if this process is killed, the next call continues with the rest.
    """
    if folder.is_symlink() or not folder.is_dir():
        with suppress(OSError):
            folder.unlink(missing_ok=True)
        return not os.path.lexists(folder)
    numbers = count()
    pending = [folder]
    emptied: list[Path] = []
    while pending:
        here = pending.pop()
        emptied.append(here)
        for entry in _entries(here):
            if entry.is_dir(follow_symlinks=False):
                pending.append(_moved_up(Path(entry.path), folder, numbers))
            else:
                with suppress(OSError):
                    os.unlink(entry.path)
    for one in reversed(emptied):
        with suppress(OSError):
            one.rmdir()
    return not folder.exists()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the content of `folder`, made writable for its owner; empty if that fails."""
    with suppress(OSError):
        folder.chmod(0o700)
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _moved_up(inner: Path, top: Path, numbers: "count[int]") -> Path:
    """Move a folder to the top; returns its new place, or its old one if that fails."""
    if inner.parent == top:
        return inner
    with suppress(OSError):
        inner.chmod(0o700)  # moving a folder changes it: its parent is another
    for number in numbers:
        target = top / f"{_MOVED}{number}"
        if os.path.lexists(target):
            continue
        try:
            inner.rename(target)
        except OSError:
            return inner
        return target
    raise AssertionError("there are always more numbers")
