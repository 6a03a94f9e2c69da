"""Many connections over one stream of bytes, each with its own flow control; same at both ends.

The end inside a sandbox gets this file as its program, so it needs nothing but the standard
library of Python 3.8. The end outside trusts nothing that comes: what breaks the rules ends all.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from typing import Callable, Dict, Optional, Set  # noqa: UP035 - see the version above

WINDOW = 1 << 18
"""Bytes of one connection that may be in transit in one direction."""
MAX_CHANNELS = 64
"""Most connections at once; further ones are closed, which saves our files."""
_CHUNK = 1 << 15
_HEAD = struct.Struct(">BII")
_OPEN, _DATA, _ROOM, _END, _CLOSED = range(5)
_MAX_NUMBER = 1 << 31
FAREWELL = _HEAD.pack(255, 0, 0)
"""Last message of the outer end; `feed` accepts no such type."""


class TunnelError(Exception):
    """A frame arrived that violates the protocol."""


class Channel:
    """One connection of a tunnel."""

    def __init__(self, tunnel: Tunnel, number: int) -> None:
        """Belong to `tunnel` as its connection `number`."""
        self._tunnel = tunnel
        self._number = number
        self._room = WINDOW
        self._came = bytearray()
        self._has_ended = False
        self._has_sent_all = False
        self._is_closed = False
        self._changed = asyncio.Event()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes in both directions until `reader` and the far end have ended."""
        ways = [
            asyncio.ensure_future(self._send(reader)),
            asyncio.ensure_future(self._give(writer)),
        ]
        try:
            # A way that fails fails the connection; one that ends leaves the other.
            await asyncio.gather(*ways)
        except (OSError, EOFError):
            return
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.transport.abort()
            self._tunnel.forget(self._number)

    def refuse(self) -> None:
        """Close it without having carried anything."""
        self._tunnel.forget(self._number)

    def take(self, kind: int, data: bytes) -> None:
        """Receive data for it; raises TunnelError for more than its window."""
        if kind == _DATA:
            if len(self._came) + len(data) > WINDOW or self._has_ended:
                raise TunnelError("more came for a connection than it has room for")
            self._came += data
        elif kind == _ROOM:
            self._room += int.from_bytes(data[:4], "big")
            if len(data) != 4 or self._room > WINDOW:
                raise TunnelError("more room was given for a connection than there is")
        elif kind == _END:
            self._has_ended = True
        else:
            self.close()
        self._changed.set()

    def close(self) -> None:
        """Handle the end of the other side."""
        self._is_closed = True
        self._changed.set()

    async def _send(self, reader: asyncio.StreamReader) -> None:
        while True:
            while self._room == 0:
                await self._change()
            part = await reader.read(min(_CHUNK, self._room))
            if not part:
                self._tunnel.put(_END, self._number)
                self._has_sent_all = True
                self._changed.set()
                return
            self._room -= len(part)
            self._tunnel.put(_DATA, self._number, part)

    async def _give(self, writer: asyncio.StreamWriter) -> None:
        while True:
            while not self._came and not self._has_ended:
                await self._change()
            part = bytes(self._came)
            del self._came[:]
            if not part:
                writer.write_eof()
                # The other end may go before this one has sent all.
                while not self._has_sent_all:
                    await self._change()
                return
            writer.write(part)
            await writer.drain()
            self._tunnel.put(_ROOM, self._number, len(part).to_bytes(4, "big"))

    async def _change(self) -> None:
        if self._is_closed:
            raise EOFError
        self._changed.clear()
        await self._changed.wait()


class Tunnel:
    """One end of a stream that carries connections."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        on_open: Optional[Callable[[Channel], None]] = None,  # noqa: UP045
    ) -> None:
        """`write` sends bytes to the other end; `on_open` gets each Channel that it opens.

        Without `on_open` the other end may open none.
        """
        self._write = write
        self._on_open = on_open
        self._channels: Dict[int, Channel] = {}  # noqa: UP006
        self._next = 0
        self._held = bytearray()

    def open(self) -> Optional[Channel]:  # noqa: UP045
        """Return a new Channel, or None where there are as many as may be."""
        if len(self._channels) >= MAX_CHANNELS or self._next >= _MAX_NUMBER:
            return None
        self._next += 1
        self._channels[self._next] = channel = Channel(self, self._next)
        self.put(_OPEN, self._next)
        return channel

    def feed(self, data: bytes) -> None:
        """Receive bytes; raises TunnelError for invalid frames."""
        self._held += data
        at = 0
        while len(self._held) - at >= _HEAD.size:
            kind, number, size = _HEAD.unpack_from(self._held, at)
            if size > WINDOW or kind > _CLOSED:
                raise TunnelError("what came through a tunnel is not of its form")
            if len(self._held) - at - _HEAD.size < size:
                break
            at += _HEAD.size
            self._take(kind, number, bytes(self._held[at : at + size]))
            at += size
        del self._held[:at]

    def put(self, kind: int, number: int, data: bytes = b"") -> None:
        """Send one message of an open connection."""
        if number in self._channels:
            self._write(_HEAD.pack(kind, number, len(data)) + data)

    def forget(self, number: int) -> None:
        """Close a connection at this end, and notify the other."""
        self.put(_CLOSED, number)
        self._channels.pop(number, None)

    def close(self) -> None:
        """Notify every connection that the other end has gone."""
        for channel in list(self._channels.values()):
            channel.close()

    def _take(self, kind: int, number: int, data: bytes) -> None:
        if kind == _OPEN:
            if self._on_open is None or number in self._channels:
                raise TunnelError("a connection was opened that may not be")
            self._channels[number] = channel = Channel(self, number)
            if len(self._channels) > MAX_CHANNELS:
                channel.refuse()
            else:
                self._on_open(channel)
        elif number in self._channels:
            # Data still on its way to a channel that is closed here is dropped.
            self._channels[number].take(kind, data)


async def _inside() -> None:
    """Listen on a free port of the sandbox, and forward connections over standard input and output.

    The other end speaks first, with one byte, and gets the port; the end of its words ends this.
    """
    loop = asyncio.get_event_loop()
    words = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    out, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(1, "wb", 0))
    tunnel = Tunnel(out.write)
    carrying: Set[asyncio.Future[None]] = set()  # noqa: UP006

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = tunnel.open()
        if channel is None:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(channel.carry(reader, writer))
        carrying.add(task)
        task.add_done_callback(carrying.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    await words.readexactly(1)
    out.write(server.sockets[0].getsockname()[1].to_bytes(2, "big"))
    while True:
        data = await words.read(1 << 16)
        try:
            tunnel.feed(data)
        except TunnelError:
            data = b""
        if not data:
            os._exit(0)


if __name__ == "__main__":
    asyncio.run(_inside())
