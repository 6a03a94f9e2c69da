"""A disk cache of fetched files: one cache file per URL, verified whenever it is read.

An entry is a line of JSON followed by the body. It is written atomically, so a process may be
killed at any moment and several may write at once. An entry that does not match its first line is
ignored and fetched again. The file's modification time is when the server last confirmed it.
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from telescope_core.base.decoders import json_decoder
from telescope_envs.records.files import read_file, sha256_of

_LONGEST_HEAD_BYTES = 16 * 1024
_LEFT_BEHIND_S = 3600.0
_UNFINISHED = ".part-"


class _CachedHead(msgspec.Struct, kw_only=True):
    url: str
    status: int
    etag: str
    last_modified: str
    sha256: str
    size: int


class CachedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The server's response for one URL."""

    status: int
    """200; 404 if the file does not exist; 304 if the cached file is still valid."""
    body: bytes = b""
    etag: str = ""
    last_modified: str = ""
    confirmed_at: float = msgspec.field(default_factory=time.time)
    """Seconds since the epoch."""


class HttpCache:
    """Cached files of the registry at `address`, stored below `folder`."""

    def __init__(self, folder: Path, address: str, tell: Callable[[str], None]) -> None:
        self._folder = folder / sha256_of(address)
        self._tell = tell
        self._has_told = False

    def get(self, url: str, *, max_bytes: int) -> CachedFile | None:
        """Return the cached entry of `url`; None if there is none or it fails verification."""
        path = self._path(url)
        try:
            data = read_file(path, max_bytes=max_bytes + _LONGEST_HEAD_BYTES)
            line, _, body = data.partition(b"\n")
            confirmed_at = path.stat().st_mtime
            head = json_decoder(_CachedHead).decode(line)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        is_whole = len(body) == head.size <= max_bytes and sha256_of(body) == head.sha256
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
        """Replace the entry of `url`."""
        head = _CachedHead(
            url=url,
            status=found.status,
            etag=found.etag,
            last_modified=found.last_modified,
            sha256=sha256_of(found.body),
            size=len(found.body),
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._replace(self._path(url), msgspec.json.encode(head) + b"\n" + found.body)
        except OSError as error:
            self._say(error)

    def confirm(self, url: str) -> None:
        """Record that the server has just confirmed `url` as unchanged."""
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
        """Remove unfinished files left by killed processes."""
        oldest = time.time() - _LEFT_BEHIND_S
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _say(self, error: OSError) -> None:
        if not self._has_told:
            reason = os.strerror(error.errno or 0)
            self._tell(f"{self._folder} cannot be written ({reason}), so nothing is cached")
        self._has_told = True

    def _path(self, url: str) -> Path:
        return self._folder / sha256_of(url)
