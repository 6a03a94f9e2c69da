"""Forward connections to a listening socket in a sandbox to one address outside.

The socket belongs to the network namespace of the sandbox, the process that answers it does not. So
programs inside reach this one address, and have no route to any other.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Reach = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Streams | None]]
"""Returns the streams to which a connection is forwarded; None after it ended the connection."""
CONNECT_S = 30.0
"""Longest wait for a connection to what is outside."""
_CHUNK = 64 << 10
_MAX_CONNECTIONS = 64
"""Most connections at once; further ones are closed, which saves our files."""


@asynccontextmanager
async def relayed(descriptor: int, host: str, port: int) -> AsyncGenerator[None]:
    """Serve the listening socket `descriptor` during a block; then close all connections."""

    async def reach(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Streams | None:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return None

    async with forwarding(reach, sock=socket.socket(fileno=descriptor)):
        yield


@asynccontextmanager
async def forwarding(reach: Reach, **listening: Any) -> AsyncGenerator[asyncio.Server]:
    """Forward the connections of a server during a block; then close all of them.

    `listening`: arguments of `asyncio.start_server`.
    """
    carrying: set[asyncio.Task[None]] = set()

    def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(carrying) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(_carried(reach, reader, writer))
        carrying.add(task)
        task.add_done_callback(carrying.discard)

    # Who is cancelled while a server starts has no server to close, so it is made first.
    server = await asyncio.start_server(carry, start_serving=False, **listening)
    try:
        await server.start_serving()
        yield server
    finally:
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def _carried(
    reach: Reach, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Forward one connection until either side ends it."""
    reached = await reach(reader, writer)
    if reached is None:
        return
    behind, to_behind = reached
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_copied(reader, to_behind))
            group.create_task(_copied(behind, writer))
        # A client that reads slowly still gets the last bytes.
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
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
