"""What was fetched over HTTP, on disk: one file for each address, checked whenever it is read.

An entry is a line of JSON and the bytes. It is written whole or not at all, so a process may be
killed at any moment and several may write at once; one that is not what its first line says counts
for nothing and is fetched again. The file's time is when the server last confirmed it.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

_LONGEST_HEAD_BYTES = 16 * 1024
_LEFT_BEHIND_S = 3600.0
_UNFINISHED = ".part-"


class _Head(msgspec.Struct, kw_only=True):
    url: str
    status: int
    etag: str
    last_modified: str
    sha256: str
    size: int


class CachedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One address as the server answered it."""

    status: int
    """200, or 404: there is nothing."""
    body: bytes
    etag: str
    last_modified: str
    confirmed_at: float
    """Seconds since the epoch."""


class HttpCache:
    """The files of the registry at `address`, below `folder`."""

    def __init__(self, folder: Path, address: str, tell: Callable[[str], None]) -> None:
        self._folder = folder / _digest(address.encode())
        self._tell = tell
        self._has_told = False

    def get(self, url: str, *, max_bytes: int) -> CachedFile | None:
        """Return what is known of `url`; None for nothing, or nothing that can be trusted."""
        path = self._path(url)
        try:
            if path.stat().st_size > max_bytes + _LONGEST_HEAD_BYTES:
                return None
            line, _, body = path.read_bytes().partition(b"\n")
            confirmed_at = path.stat().st_mtime
            head = msgspec.json.decode(line, type=_Head)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        is_whole = len(body) == head.size <= max_bytes and _digest(body) == head.sha256
        if head.url != url or not is_whole:
            return None
        return CachedFile(
            status=head.status,
            body=body,
            etag=head.etag,
            last_modified=head.last_modified,
            confirmed_at=confirmed_at,
        )

    def put(self, url: str, found: CachedFile) -> None:
        """Replace what is known of `url`."""
        head = _Head(
            url=url,
            status=found.status,
            etag=found.etag,
            last_modified=found.last_modified,
            sha256=_digest(found.body),
            size=len(found.body),
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._replace(self._path(url), msgspec.json.encode(head) + b"\n" + found.body)
        except OSError as error:
            self._say(error)

    def confirm(self, url: str) -> None:
        """Note that the server says that `url` is unchanged."""
        with suppress(OSError):
            os.utime(self._path(url))

    def _replace(self, path: Path, data: bytes) -> None:
        descriptor, scratch = tempfile.mkstemp(prefix=_UNFINISHED, dir=self._folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(scratch, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(scratch)
            raise

    def _sweep(self) -> None:
        """Remove what processes that were killed left unfinished."""
        oldest = time.time() - _LEFT_BEHIND_S
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _say(self, error: OSError) -> None:
        if not self._has_told:
            reason = os.strerror(error.errno or 0)
            self._tell(f"{self._folder} cannot be written ({reason}), so nothing is kept for later")
        self._has_told = True

    def _path(self, url: str) -> Path:
        return self._folder / _digest(url.encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
