"""`LineTail`: the new complete lines of a file since the last read, with bounded memory.

A file that was replaced, cut or rewritten is read again from its beginning.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from telescope_core.records.files import json_row

_CHUNK_BYTES = 2**16
"""What a processor's cache holds: larger chunks are read and decoded at half the speed."""
_KNOWN_BYTES = 64
"""Bytes before the end of the read part, by which a rewritten file is detected."""


class LineTail:
    """Reads a file line by line as it grows; not for several threads at once.

    Ask `is_rewritten` each time before the lines are read.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_line_bytes: int = sys.maxsize,
        max_file_bytes: int = sys.maxsize,
    ) -> None:
        """Longer lines are skipped; of a longer file, only the beginning is read."""
        self.path = path
        self._max_line_bytes = max_line_bytes
        self._max_file_bytes = max_file_bytes
        self._offset = 0
        """Position after the last complete line."""
        self._inode = 0
        self._known = b""
        self._is_skipping = False
        self.num_skipped = 0
        """Number of lines that were too long."""

    @property
    def is_cut(self) -> bool:
        """Whether the file is longer than the part that is read."""
        return self._offset >= self._max_file_bytes

    @property
    def problems(self) -> list[str]:
        """A sentence about each part of the file that is left out."""
        name, found = self.path.name, list[str]()
        if self.num_skipped or self._is_skipping:
            long = f"a line of more than {self._max_line_bytes // 2**20} MiB"
            found.append(f"{name} has {long}, which is left out")
        if self.is_cut:
            found.append(
                f"{name} is read up to {self._max_file_bytes // 2**20} MiB; the rest is not"
            )
        return found

    def is_rewritten(self) -> bool:
        """Return whether the read part of the file has changed; forgets it in that case."""
        if self._offset and not self._is_the_same():
            self.__init__(
                self.path,
                max_line_bytes=self._max_line_bytes,
                max_file_bytes=self._max_file_bytes,
            )
            return True
        return False

    def _is_the_same(self) -> bool:
        try:
            with self.path.open("rb") as stream:
                found = os.fstat(stream.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    return False
                stream.seek(self._offset - len(self._known))
                return stream.read(len(self._known)) == self._known
        except OSError:
            return False

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the objects among the lines that were not read yet."""
        for line in self.lines():
            if (row := json_row(line)) is not None:
                yield row

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines that were not read yet; an incomplete last one waits."""
        for block in self.blocks():
            yield from block.split(b"\n")

    def blocks(self) -> Iterator[bytes]:
        """Yield the same lines, several at once, without the last newline of a block."""
        try:
            stream = self.path.open("rb")
        except OSError:
            return
        with stream:
            inode = os.fstat(stream.fileno()).st_ino
            if self._offset and inode != self._inode:
                # Replaced since `is_rewritten` was asked, which says so the next time.
                return
            self._inode = inode
            stream.seek(self._offset)
            rest = b""
            while not self.is_cut and (chunk := stream.read(_CHUNK_BYTES)):
                whole, newline, rest = (rest + chunk).rpartition(b"\n")
                if self._is_skipping and newline:
                    _, newline, whole = whole.partition(b"\n")
                    self.num_skipped += 1
                    self._is_skipping = False
                if newline:
                    yield whole
                if self._is_skipping or len(rest) > self._max_line_bytes:
                    rest, self._is_skipping = b"", True
                self._offset = stream.tell() - len(rest)
            start = max(0, self._offset - _KNOWN_BYTES)
            stream.seek(start)
            self._known = stream.read(self._offset - start)
