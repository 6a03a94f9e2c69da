"""A limit on the time of a whole request, which timeouts of single reads do not give.

A server that sends one byte every few seconds keeps each read below its timeout for ever, in the
headers as in the body. When the time is over the sockets are shut down, so the read ends.
"""

import socket
from contextlib import suppress
from threading import Timer
from types import TracebackType
from typing import Any


class Watchdog:
    """Ends what is read in its `with` block after `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self.has_barked = False
        self._sockets: list[socket.socket] = []
        self._timer = Timer(limit_s, self._bark)
        self._timer.daemon = True

    def __enter__(self) -> "Watchdog":
        """Begin to wait."""
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop waiting."""
        self._timer.cancel()

    def trace(self, event: str, details: dict[str, Any]) -> None:
        """Note the socket of each connection made: the `trace` extension of httpx calls this."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            found = details["return_value"].get_extra_info("socket")
            if found is not None:
                self._sockets.append(found)

    def _bark(self) -> None:
        self.has_barked = True
        for found in self._sockets:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
