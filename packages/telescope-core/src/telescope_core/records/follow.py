"""`FollowedLines`: the objects in a file of JSON lines that another process appends to."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, cast


class Appended(NamedTuple):
    """Lines appended to a file since it was last read."""

    rows: list[dict[str, Any]]
    """The new objects, without lines that are no object."""
    is_anew: bool
    """Whether the file was rewritten, so that `rows` replace everything read before."""


class FollowedLines:
    """Reads a file that grows and may be replaced by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._inode: int | None = None

    def read(self) -> Appended:
        """Return the lines appended since the last call; none while there is no file.

        A line whose end has not been written yet is left for the next call.
        """
        rows: list[dict[str, Any]] = []
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            is_anew, self._position, self._inode = self._position > 0, 0, None
            return Appended(rows, is_anew)
        with stream:
            found = _identity(stream)
            is_anew = self._position > 0 and (
                found.inode != self._inode or found.size < self._position
            )
            if is_anew:
                self._position = 0
            self._inode = found.inode
            stream.seek(self._position)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                rows += _object(line)
        return Appended(rows, is_anew)


class _Identity(NamedTuple):
    inode: int
    size: int


def _identity(stream: Any) -> _Identity:
    found = os.fstat(stream.fileno())
    return _Identity(found.st_ino, found.st_size)


def _object(line: bytes) -> list[dict[str, Any]]:
    """Return the object of a line in a list; an empty list for other lines."""
    try:
        row: object = json.loads(line)
    except ValueError:
        return []
    return [cast(dict[str, Any], row)] if isinstance(row, dict) else []
