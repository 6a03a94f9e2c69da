"""Control calls between steps, against servers and networks that drop some of them."""

import asyncio

import pytest
from tests.ports import free_port

from telescope_core.errors import EndpointError
from telescope_train.inference.client import TokenClient
from telescope_train.inference.generation import ServerLostError
from telescope_train.inference.wire import ONCE_HEADER

REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
DEADLINE_S = 120.0


async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the first request of a connection, and close it when the second one begins."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    await reader.readexactly(length)
    writer.write(REPLY)
    await writer.drain()
    await reader.read(1)
    writer.transport.abort()


async def test_a_call_never_meets_a_connection_that_the_server_is_closing():
    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = TokenClient(f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                await client.control("/pause")
    finally:
        await client.close()
        server.close()


class DroppingServer:
    """Reads each request and drops the connection, until it has done so `num_dropped` times."""

    def __init__(self, num_dropped: int) -> None:
        self.num_dropped = num_dropped
        self.num_requests = 0
        self.numbers: list[str] = []
        """What says of each request that it is to be done once."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        number = head.partition(f"{ONCE_HEADER}: ")[2].partition("\r\n")[0]
        self.numbers.append(number)
        if self.num_requests > self.num_dropped:
            writer.write(REPLY)
            await writer.drain()
        else:
            writer.transport.abort()


async def called(path: str, answer: DroppingServer, *, is_repeatable: bool) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = TokenClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        async with asyncio.timeout(DEADLINE_S):
            await client.control(path, is_repeatable=is_repeatable)
    finally:
        await client.close()
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_repeatable", [True, False])
async def test_a_lost_answer_is_asked_for_again(is_repeatable: bool) -> None:
    answer = DroppingServer(num_dropped=2)
    await called("/update_weights", answer, is_repeatable=is_repeatable)
    assert answer.num_requests == 3
    # Only what must not be done twice has a number, which is that of all tries.
    assert len({*answer.numbers}) == 1
    assert (answer.numbers[0] == "") is is_repeatable


@pytest.mark.slow
async def test_a_server_that_is_always_silent_is_given_up():
    answer = DroppingServer(num_dropped=100)
    with pytest.raises(EndpointError, match="/pause"):
        await called("/pause", answer, is_repeatable=True)
    assert answer.num_requests == 4


@pytest.mark.slow
async def test_what_never_reached_the_server_is_sent_again():
    port = free_port()
    client = TokenClient(f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(DEADLINE_S):
            calling = asyncio.create_task(client.control("/update_weights"))
            refused, _ = await asyncio.wait([calling], timeout=0.1)
            assert not refused
            server = await asyncio.start_server(answer_once, "127.0.0.1", port)
            await calling
            server.close()
    finally:
        await client.close()


@pytest.mark.parametrize("deadline_s", [None, 600.0])
async def test_a_call_ends_when_its_server_is_lost(deadline_s: float | None) -> None:
    """As with a machine that is gone: the connection stays open, and nothing comes."""
    asked, requests = asyncio.Event(), list[bytes]()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    client = TokenClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        async with asyncio.timeout(DEADLINE_S):
            calling = asyncio.create_task(client.control("/update_weights", deadline_s=deadline_s))
            await asked.wait()
            await client.drop("its machine is gone")
            with pytest.raises(ServerLostError, match=r"/update_weights.*its machine is gone"):
                await calling
        assert len(requests) == 1, "it is not asked again"
    finally:
        await client.close()
        server.close()


async def test_a_call_that_the_caller_gives_up_is_no_loss_of_the_server() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    client = TokenClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.control("/update_weights", deadline_s=None)
        await client.drop("later")
    finally:
        await client.close()
        server.close()
