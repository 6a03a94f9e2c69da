"""One connection of the environment protocol: bytes to frames and back, on an asyncio transport.

Frames that are sent in one iteration of the event loop are written together. A thread may send as
well while the loop is blocked, which is how a worker reports that it is stuck.
"""

import asyncio
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from telescope_core.base.terminal import foreign
from telescope_core.processes.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    HostFrame,
    ProtocolError,
    WorkerFrame,
    length_of,
    to_bytes,
)

Incoming = TypeVar("Incoming")
_THREAD_SEND_S = 1.0


class Connection(asyncio.Protocol, Generic[Incoming]):
    """Decodes incoming frames for `on_frame`; calls `on_lost` with the reason when it ends.

    `on_frame` must not block. A frame that cannot be decoded ends the connection.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[Incoming]",
        *,
        on_frame: Callable[[Incoming], None],
        on_lost: Callable[[str], None],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._decoder = decoder
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._received = bytearray()
        self._pending: list[bytes] = []
        self._write_lock = threading.Lock()
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._why = ""
        self._is_lost = False

    @property
    def is_open(self) -> bool:
        """Whether frames can still be sent."""
        transport = self._transport
        return transport is not None and not transport.is_closing()

    def send(self, frame: HostFrame | WorkerFrame) -> None:
        """Send a frame from the event loop; does nothing once the connection has ended."""
        data = to_bytes(frame)
        if not self.is_open:
            return
        if not self._pending:
            assert self._loop is not None, "an open connection has a loop"
            self._loop.call_soon(self.flush)
        self._pending.append(data)

    def flush(self) -> None:
        """Write the pending frames now."""
        pending, self._pending = self._pending, []
        if pending and self._transport is not None and self.is_open:
            with self._write_lock:
                self._transport.write(b"".join(pending))

    def send_from_thread(self, frame: HostFrame | WorkerFrame) -> None:
        """Send a small frame from a thread, even while the event loop is blocked.

        The frame is dropped when earlier bytes are still unsent, because a frame in the middle of
        another would break both.
        """
        data = to_bytes(frame)
        with self._write_lock:
            transport = self._transport
            if transport is None or transport.is_closing() or transport.get_write_buffer_size():
                return
            handle: socket.socket = transport.get_extra_info("socket")
            try:
                _write_all(handle.fileno(), data)
            except OSError:
                return

    def close(self, why: str = "") -> None:
        """Send the pending frames, then end the connection."""
        self._why = self._why or why
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def abort(self, why: str) -> None:
        """End the connection now; pending frames are lost."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        assert isinstance(transport, asyncio.Transport), "the protocol needs a stream"
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        # No flow control: everything in flight is kept in memory anyway.
        transport.set_write_buffer_limits(high=2**62)

    def data_received(self, data: bytes) -> None:
        """Pass on every complete frame."""
        self._received += data
        try:
            self._read_frames()
        except ProtocolError as error:
            self.abort(str(error))

    def _read_frames(self) -> None:
        start, end = 0, len(self._received)
        try:
            while end - start >= LENGTH_BYTES and not self._why:
                header = start + LENGTH_BYTES
                length = length_of(self._received[start:header])
                if length > self.max_frame_bytes:
                    raise ProtocolError(
                        f"a message of {length} bytes was announced, above the limit of "
                        f"{self.max_frame_bytes} bytes; the other side does not use this protocol, "
                        "or sends too much at once"
                    )
                if end - header < length:
                    break
                start = header + length
                self._on_frame(self._decode(bytes(self._received[header:start])))
        finally:
            del self._received[:start]

    def _decode(self, body: bytes) -> Incoming:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"a malformed message of {len(body)} bytes arrived ({foreign(str(error), 300)})"
            ) from error

    def connection_lost(self, exc: Exception | None) -> None:
        """Report why the connection ended, once."""
        if not self._is_lost:
            self._is_lost = True
            reason = f"{type(exc).__name__}: {exc}" if exc is not None else "the connection closed"
            self._on_lost(self._why or reason)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data` to a nonblocking socket, or nothing when it stays full for too long."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            ready: Any = select.select([], [descriptor], [], _THREAD_SEND_S)[1]
            if not ready and len(view) == len(data):
                return
