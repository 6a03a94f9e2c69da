"""Connections through one stream of bytes: exact, bounded, and without trust in the other end."""

import asyncio
import contextlib
import random

import pytest

from telescope_core.sandboxes.tunnel import (
    _CLOSED,
    _DATA,
    _END,
    _HEAD,
    _OPEN,
    _ROOM,
    MAX_CHANNELS,
    WINDOW,
    Tunnel,
    TunnelError,
)


def piecewise(end: Tunnel, data: bytes, draw: random.Random) -> None:
    while data:
        size = draw.choice((1, 3, 50, 5000, len(data)))
        asyncio.get_running_loop().call_soon(end.feed, data[:size])
        data = data[size:]


@contextlib.asynccontextmanager
async def tunneled(answer, *, seed: int = 0):
    """Yield the port of a server whose connections reach `answer` through two tunnels.

    What passes between them arrives in pieces of random sizes.
    """
    draw, tasks = random.Random(seed), set()

    def carry(channel, reader, writer):
        task = asyncio.create_task(channel.carry(reader, writer))
        tasks.add(task)

    async def answered(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            await answer(reader, writer)
        finally:
            writer.transport.abort()

    def opened(channel):
        async def connect():
            carry(channel, *await asyncio.open_connection("127.0.0.1", behind))

        tasks.add(asyncio.create_task(connect()))

    def connected(reader, writer):
        channel = ends["inside"].open()
        if channel is None:
            writer.transport.abort()
        else:
            carry(channel, reader, writer)

    ends = {}
    ends["inside"] = Tunnel(lambda data: piecewise(ends["outside"], data, draw))
    ends["outside"] = Tunnel(lambda data: piecewise(ends["inside"], data, draw), opened)
    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    front = await asyncio.start_server(connected, "127.0.0.1", 0)
    behind = server.sockets[0].getsockname()[1]
    try:
        yield front.sockets[0].getsockname()[1]
    finally:
        for end in ends.values():
            end.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        front.close()
        # Sockets that were aborted are closed in the loop's next turn.
        await asyncio.sleep(0)


async def echo(reader, writer):
    while part := await reader.read(70_000):
        writer.write(part)
        await writer.drain()
    writer.write_eof()
    await asyncio.Event().wait()


@pytest.mark.parametrize("seed", range(3))
async def test_bytes_arrive_exactly_each_way_and_the_end_of_one_way_passes(seed):
    wanted = [random.Random(seed * 10 + n).randbytes(3 * WINDOW // (n + 1)) for n in range(4)]

    async def there_and_back(port: int, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def send():
            writer.write(data)
            await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        came = await reader.read(-1)
        await sending
        writer.close()
        return came

    async with tunneled(echo, seed=seed) as port, asyncio.timeout(60):
        assert await asyncio.gather(*(there_and_back(port, data) for data in wanted)) == wanted


async def test_one_that_nobody_reads_does_not_hold_up_another():
    async def flood(reader, writer):
        if await reader.read(1) == b"f":
            with contextlib.suppress(OSError):
                while True:
                    writer.write(bytes(65536))
                    await writer.drain()
        writer.write(b"answer")
        writer.write_eof()
        await asyncio.Event().wait()

    async with tunneled(flood) as port, asyncio.timeout(60):
        slow = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        slow[1].write(b"f")
        assert len(await slow[0].readexactly(WINDOW)) == WINDOW
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"a")
        assert await reader.read(-1) == b"answer"
        for each in (writer, slow[1]):
            each.transport.abort()


async def test_no_more_connections_than_may_be():
    async def hold(reader, writer):
        await reader.read()

    async with tunneled(hold) as port, asyncio.timeout(60):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CHANNELS)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        for _, each in (*held, (reader, writer)):
            each.transport.abort()


def message(kind: int, number: int, data: bytes = b"") -> bytes:
    return _HEAD.pack(kind, number, len(data)) + data


@pytest.mark.parametrize(
    "wrong",
    [
        _HEAD.pack(_DATA, 1, WINDOW + 1),
        message(77, 1),
        message(_OPEN, 1),
        message(_DATA, 1, bytes(WINDOW)) + message(_DATA, 1, b"x"),
        message(_END, 1) + message(_DATA, 1, b"x"),
        message(_ROOM, 1, (WINDOW + 1).to_bytes(4, "big")),
        message(_ROOM, 1, b""),
    ],
)
async def test_what_breaks_the_rules_is_refused(wrong):
    sent, opened = [], []
    tunnel = Tunnel(sent.append, opened.append)
    tunnel.feed(message(_OPEN, 1))
    assert len(opened) == 1
    with pytest.raises(TunnelError):
        tunnel.feed(wrong)


async def test_the_end_outside_carries_no_more_than_so_many_and_opens_none_unasked():
    sent, opened = [], []
    tunnel = Tunnel(sent.append, opened.append)
    for number in range(1, MAX_CHANNELS + 6):
        tunnel.feed(message(_OPEN, number))
    assert len(opened) == MAX_CHANNELS
    assert sent == [message(_CLOSED, MAX_CHANNELS + n) for n in range(1, 6)]
    tunnel.feed(message(_DATA, 12345, b"for nobody"))
    with pytest.raises(TunnelError):
        Tunnel(sent.append).feed(message(_OPEN, 1))
