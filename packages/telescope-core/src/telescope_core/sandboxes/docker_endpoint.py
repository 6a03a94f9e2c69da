"""Open one address to a container without a network, through the streams of a command in it.

A program in the container listens on its loopback and carries what connects over its standard
input and output, which the service brings to this process; only this process connects further, and
to nothing but the one address. So it needs no network, no mounted folder and no port, and works
with a service on another machine as well.
"""

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

from telescope_core.sandboxes.protocol import SandboxError
from telescope_core.sandboxes.tunnel import (
    FAREWELL,
    MAX_CHANNELS,
    WINDOW,
    Channel,
    Tunnel,
    TunnelError,
)

PROGRAM = ("python3", "-c", Path(__file__).with_name("tunnel.py").read_text())
"""Program that listens inside the container."""
_START_S = 30.0
_END_S = 5.0
_CONNECT_S = 30.0
_MAX_WAITING_BYTES = 2 * MAX_CHANNELS * WINDOW
_CHUNK = 1 << 16
_STANDARD_OUTPUT = 1


@contextlib.asynccontextmanager
async def opened(start: Callable[[], Awaitable[Any]], host: str, port: int) -> AsyncGenerator[str]:
    """Open `host:port` for a block; yields the address that programs inside have for it.

    `start` starts `PROGRAM` in the container and returns the SDK's object for its streams.
    """
    stream = _Stream(await start())
    relay = _EndpointRelay(stream, host, port)
    try:
        stream.write(b"\1")
        try:
            async with asyncio.timeout(_START_S):
                inside = await relay.port()
        except (TimeoutError, EOFError):
            said = stream.errors.decode(errors="replace")[-300:]
            raise SandboxError(f"the container cannot listen for {host}:{port}: {said}") from None
        yield f"127.0.0.1:{inside}"
    finally:
        await asyncio.shield(asyncio.ensure_future(relay.end()))


class _Stream:
    """Both streams of a command in a container, in threads because the SDK's sockets block."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._connection = getattr(stream, "_sock", stream)
        self._loop = asyncio.get_running_loop()
        self._to_write: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._num_waiting_bytes = 0
        self._on_data: Callable[[bytes], None] = lambda data: None
        self.has_ended = asyncio.Event()
        self.errors = b""
        """The end of its standard error."""
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read, self._write)
        ]

    def begin(self, on_data: Callable[[bytes], None]) -> None:
        """Pass the command's output to `on_data`, and b"" at its end."""
        self._on_data = on_data
        for thread in self._threads:
            thread.start()

    def write(self, data: bytes) -> None:
        """Send to the command; one that reads nothing for long is given up."""
        self._num_waiting_bytes += len(data)
        if self._num_waiting_bytes > _MAX_WAITING_BYTES:
            self.stop()
        elif not self.has_ended.is_set():
            self._to_write.put(data)

    def stop(self) -> None:
        """End both streams, whatever state they are in. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Let the command end, and close the streams."""
        self._to_write.put(FAREWELL)
        self._to_write.put(b"")
        try:
            async with asyncio.timeout(_END_S):
                await self.has_ended.wait()
        except TimeoutError:
            self.stop()
        await asyncio.to_thread(self._joined)
        self._stream.close()
        self._connection.close()

    def _joined(self) -> None:
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        frames = _Frames()
        while True:
            try:
                data = self._connection.recv(_CHUNK)
            except OSError:
                data = b""
            for kind, part in frames.of(data):
                if part and kind == _STANDARD_OUTPUT:
                    self._tell(self._on_data, part)
                else:
                    self.errors = (self.errors + part)[-2000:]
            if not data:
                break
        self._tell(self.has_ended.set)
        self._tell(self._on_data, b"")
        self._to_write.put(b"")

    def _write(self) -> None:
        while data := self._to_write.get():
            try:
                self._connection.sendall(data)
            except OSError:
                return
            self._tell(self._written, len(data))

    def _written(self, size: int) -> None:
        self._num_waiting_bytes -= size

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        # A loop that has closed has nobody left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


class _Frames:
    """Parses the frames in which the service sends output: a stream number, a size, the bytes."""

    def __init__(self) -> None:
        self._held = b""

    def of(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return stream and content of each frame that `data` completes."""
        self._held += data
        found: list[tuple[int, bytes]] = []
        while len(self._held) >= 8:
            size = int.from_bytes(self._held[4:8], "big")
            if len(self._held) < 8 + size:
                break
            found.append((self._held[0], self._held[8 : 8 + size]))
            self._held = self._held[8 + size :]
        return found


class _EndpointRelay:
    """The outer end: reads the port, then carries connections to one address."""

    def __init__(self, stream: _Stream, host: str, port: int) -> None:
        self._stream = stream
        self._host = host
        self._port = port
        self._tunnel = Tunnel(stream.write, self._carry)
        self._carrying: set[asyncio.Task[None]] = set()
        self._first = b""
        self._inside: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stream.begin(self._took)

    async def port(self) -> int:
        """Return the port inside; raises EOFError if the program ended before it named one."""
        return await self._inside

    async def end(self) -> None:
        """End every connection and the program."""
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        if self._inside.done():
            self._inside.exception()
        await self._stream.close()

    def _took(self, data: bytes) -> None:
        if not self._inside.done():
            self._first += data
            if len(self._first) >= 2:
                self._inside.set_result(int.from_bytes(self._first[:2], "big"))
                data = self._first[2:]
            elif data:
                return
            else:
                self._inside.set_exception(EOFError())
        if not data:
            if self._stream.has_ended.is_set():
                self._tunnel.close()
            return
        try:
            self._tunnel.feed(data)
        except TunnelError:
            # A program inside wrote in the place of ours: it has cut itself off.
            self._tunnel.close()
            self._stream.stop()

    def _carry(self, channel: Channel) -> None:
        task = asyncio.create_task(self._carried(channel))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carried(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError):
            channel.refuse()
            return
        await channel.carry(reader, writer)
