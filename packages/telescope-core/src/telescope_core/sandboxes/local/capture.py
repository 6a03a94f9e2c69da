"""Read the output of a program: keep the beginning, count the rest, never make it wait."""

import asyncio
import os

_CHUNK_BYTES = 1 << 16


class Capture:
    """A pipe that the event loop empties while a program writes to it."""

    def __init__(self, max_bytes: int) -> None:
        """Open the pipe; `max_bytes` are kept."""
        self._loop = asyncio.get_running_loop()
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.num_dropped_bytes = 0
        self._is_open = True
        self._loop.add_reader(self._reader, self._read_some)

    def finish(self) -> bytes:
        """Read the rest of the pipe, close it, and return the output that was kept."""
        while self._is_open and self._read_some():
            pass
        self.close()
        return bytes(self._kept)

    def close_writer(self) -> None:
        """Close our copy of the writing end; only the program's own then keeps the pipe open."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self.close_writer()
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._reader)
            os.close(self._reader)

    def _read_some(self) -> bool:
        """Read once, and return whether there was data."""
        try:
            data = os.read(self._reader, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        room = self._max_bytes - len(self._kept)
        self._kept += data[: max(0, room)]
        self.num_dropped_bytes += max(0, len(data) - max(0, room))
        return True
