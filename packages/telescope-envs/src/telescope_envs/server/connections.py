"""Limits on connections, so that none of them keeps others from being served.

A connection must send the complete head of a request soon after it was opened and after each
response, must read its responses, and counts toward a limit per address. When the server is full,
the connection that has waited longest without a request is closed for a new one.
"""

import asyncio
import ipaddress
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from telescope_envs.server.refusals import address_of, shared_address

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits on the connections of a server."""

    at_once: int = 512
    """Open connections of all addresses together."""
    per_address: int = 64
    """Open connections of one IPv4 address or one IPv6 network; proxies have no such limit."""
    request_head_s: float = 20.0
    """Time for the head of a request, from the opening of the connection or the last response."""
    stalled_s: float = 60.0
    """Time after which a client that has not read its response is dropped."""


class Connections:
    """The open connections of one server, for use on its event loop."""

    def __init__(self, limits: ConnectionLimits, proxies: tuple[Network, ...] = ()) -> None:
        self.limits = limits
        self._proxies = proxies
        self._open: dict[object, Connection] = {}
        self._waiting: dict[Connection, None] = {}
        self._of_address: Counter[str] = Counter()

    def tracked(self, app: ASGIApp) -> ASGIApp:
        """Return `app` wrapped so that a connection with a running request is not timed out."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self._open.get(scope.get("client"))
            if connection is None:
                await app(scope, receive, send)
                return
            connection.begin_request()
            try:
                await app(scope, receive, send)
            finally:
                connection.end_request()

        return run

    def admit(self, connection: "Connection") -> str:
        """Count a new connection; returns why it must be refused, or an empty string."""
        address = connection.address
        if self._of_address[address] >= self.limits.per_address and not connection.is_proxy:
            return f"more than {self.limits.per_address} connections from {address}"
        if len(self._open) >= self.limits.at_once:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return f"more than {self.limits.at_once} connections"
            longest.drop()
        self._open[connection.peer] = connection
        self._of_address[address] += 1
        return ""

    def leave(self, connection: "Connection") -> None:
        """Forget a connection that is closed; calling it twice is fine."""
        self.stop_waiting(connection)
        if self._open.get(connection.peer) is connection:
            del self._open[connection.peer]
            self._of_address[connection.address] -= 1
            if not self._of_address[connection.address]:
                del self._of_address[connection.address]

    def wait(self, connection: "Connection") -> None:
        """Record that a connection has no request now."""
        self._waiting[connection] = None

    def stop_waiting(self, connection: "Connection") -> None:
        """Record that a connection has a request, or is closed."""
        self._waiting.pop(connection, None)

    def is_proxy(self, host: str) -> bool:
        """Return whether `host` is a trusted proxy."""
        address = address_of(host)
        return address is not None and any(address in proxy for proxy in self._proxies)


class Connection(asyncio.Protocol):
    """One connection: passes data to the protocol that speaks HTTP, within the limits.

    States: waiting for a request (a timer runs), in a request, in a request whose client does not
    read (a timer runs), closed.
    """

    def __init__(self, connections: Connections, make_http: Callable[[], asyncio.Protocol]) -> None:
        self._connections = connections
        self._make_http = make_http
        self._http: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_requests = 0
        self.peer: object = None
        self.address = ""
        self.is_proxy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection, or answer with the reason against it and close it."""
        assert isinstance(transport, asyncio.Transport), "HTTP needs a stream"
        self._transport = transport
        name: tuple[Any, ...] | None = transport.get_extra_info("peername")
        self.peer = (str(name[0]), int(name[1])) if name else None
        host = str(name[0]) if name else ""
        self.address, self.is_proxy = shared_address(host), self._connections.is_proxy(host)
        refused = self._connections.admit(self)
        if refused:
            transport.write(_refusal(refused))
            transport.close()
            return
        self._http = self._make_http()
        self._http.connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        self._connections.leave(self)
        if self._http is not None:
            self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on received bytes; they do not extend the time for the head."""
        if self._http is not None:
            self._http.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on that the client will send no more."""
        return self._http.eof_received() if self._http is not None else None

    def pause_writing(self) -> None:
        """Start the time limit for the client to read the data sent to it."""
        self._watch_reading()
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        """Record that the client has read most of the data."""
        if self._http is not None:
            self._http.resume_writing()
        self._has_read()

    def begin_request(self) -> None:
        """Record that the head of a request is complete."""
        self._num_requests += 1
        self._connections.stop_waiting(self)
        if self._num_unread():
            self._watch_reading()
        else:
            self._stop_timer()

    def end_request(self) -> None:
        """Record that a request was answered."""
        self._num_requests -= 1
        if not self._num_requests:
            self._wait()

    def drop(self) -> None:
        """Close the connection at once."""
        self._connections.leave(self)
        if self._transport is None:
            return
        if self._num_unread():
            # Otherwise the system would keep what the client does not read.
            own = self._transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _wait(self) -> None:
        if self._num_unread() and self._timer is not None:
            return  # it is still reading the response, which is watched
        if self._transport is not None and not self._transport.is_closing():
            self._connections.wait(self)
            self._start_timer(self._connections.limits.request_head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._num_unread():
            self._watch_reading()
        else:
            self.drop()

    def _watch_reading(self) -> None:
        """Drop the client unless it reads something in time; repeats for the remaining data."""
        before = self._num_unread()

        def check() -> None:
            left = self._num_unread()
            if left and left >= before:
                self.drop()
            elif left:
                self._watch_reading()
            else:
                self._has_read()

        self._start_timer(self._connections.limits.stalled_s, check)

    def _has_read(self) -> None:
        self._stop_timer()
        if not self._num_requests:
            self._wait()

    def _num_unread(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _start_timer(self, limit_s: float, late: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(limit_s, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refusal(why: str) -> bytes:
    status = HTTPStatus.SERVICE_UNAVAILABLE
    body = json.dumps({"error": why, "what_to_do": "close connections, or try again later"})
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 5\r\nConnection: close\r\n\r\n{body}"
    ).encode()
