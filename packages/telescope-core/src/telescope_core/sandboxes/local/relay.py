"""Forward connections to a listening socket in a sandbox to one address outside.

The socket belongs to the network namespace of the sandbox, the process that answers it does not. So
programs inside reach this one address, and have no route to any other.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

_CHUNK = 64 << 10
_MAX_CONNECTIONS = 64
"""Most connections of a sandbox at once; further ones are closed, which saves our files."""
_CONNECT_S = 30.0


@asynccontextmanager
async def relayed(descriptor: int, host: str, port: int) -> AsyncGenerator[None]:
    """Serve the listening socket `descriptor` during a block; then close all connections."""
    relay = _Relay(host, port)
    # Who is cancelled while a server starts has no server to close, so it is made first.
    server = await asyncio.start_server(
        relay.carry, sock=socket.socket(fileno=descriptor), start_serving=False
    )
    try:
        await server.start_serving()
        yield
    finally:
        server.close()
        await relay.end()


class _Relay:
    """The connections of one listening socket."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._carrying: set[asyncio.Task[None]] = set()

    def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side ends it."""
        if len(self._carrying) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._carried(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def end(self) -> None:
        """End every connection."""
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _carried(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                behind, to_behind = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copied(reader, to_behind))
                group.create_task(_copied(behind, writer))
        finally:
            to_behind.transport.abort()
            writer.transport.abort()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy data until its end, and pass on the end."""
    with contextlib.suppress(OSError):
        while part := await reader.read(_CHUNK):
            writer.write(part)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
