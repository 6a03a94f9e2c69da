"""A time limit for a whole request, because timeouts of single reads do not bound its length.

A server that sends one byte every few seconds, in the headers or the body, can keep each read below
its timeout forever. When the limit is reached the sockets are shut down, which ends the read.
"""

import socket
from contextlib import suppress
from threading import Timer
from types import TracebackType
from typing import Any


class Watchdog:
    """Ends the reads in its `with` block after `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self.has_barked = False
        self._sockets: list[socket.socket] = []
        self._timer = Timer(limit_s, self._bark)
        self._timer.daemon = True

    def __enter__(self) -> "Watchdog":
        """Start the timer."""
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def trace(self, event: str, details: dict[str, Any]) -> None:
        """Remember the socket of each new connection; httpx's `trace` extension calls this."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            found = details["return_value"].get_extra_info("socket")
            if found is not None:
                self._sockets.append(found)

    def _bark(self) -> None:
        self.has_barked = True
        for found in self._sockets:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
