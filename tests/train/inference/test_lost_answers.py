"""Control calls of an update whose answer is lost: each is made once, and no server is lost."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from telescope_core.records.servers import ServerState
from telescope_train.inference.client import TokenClient
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.vllm_plugin.http_server import MOST_REMEMBERED, Once
from telescope_train.inference.wire import ENGINE_PATH, PAUSE_PATH
from telescope_train.simulation.trainer import SimulatedRanks, TrainerSpeed
from telescope_train.weights.publish import WeightPublisher

DEADLINE_S = 120.0
CALLS = (
    "/init_weight_transfer_engine",
    PAUSE_PATH,
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/resume",
)


class Strict:
    """An ASGI application that refuses what vLLM refuses, such as to begin an update twice."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        self.ranks = ranks
        self.made: list[str] = []
        self.version = "default"
        self._is_open = False
        self._received = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = json.loads(message["body"] or b"{}")
        path = scope["path"]
        self.made.append(path)
        status, answer = self._do(path, body)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _do(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/start_weight_update":
            if self._is_open:
                return 500, {"error": "an update is going on"}
            self._is_open = True
        if path in ("/update_weights", "/finish_weight_update") and not self._is_open:
            return 500, {"error": "no update was begun"}
        if path == "/update_weights":
            self._received = self.ranks.digest
        if path == "/finish_weight_update":
            self._is_open = False
            self.version = body["weight_version"]
        if path == "/collective_rpc":
            return 200, {"results": [self._received]}
        return 200, {}


class Losing:
    """Serves an ASGI application over HTTP, and loses the first answer to some paths."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.loses: list[str] = []
        self.stays_open = False
        """Whether the connection is still there when an answer is lost."""
        self.num_lost = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request, *lines = head.strip().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines)
        asked = [await reader.readexactly(int(headers.get("content-length", 0)))]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": asked.pop(), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        path = request.split()[1].partition("?")[0]
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._app({"type": "http", "path": path, "headers": pairs}, receive, send)
        if path in self.loses:
            self.loses.remove(path)
            self.num_lost += 1
            if self.stays_open:
                await reader.read()  # until the other side gives up
            writer.transport.abort()
            return
        body = b"".join(one.get("body", b"") for one in sent)
        kind = "content-type: application/json\r\nconnection: close"
        status = sent[0]["status"]
        writer.write(
            f"HTTP/1.1 {status} X\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        )
        writer.write(body)
        await writer.drain()
        writer.close()


class World:
    """Two servers, over real connections."""

    def __init__(self) -> None:
        self.ranks = SimulatedRanks(1, TrainerSpeed(send_s=0.0))
        self.engines = [Strict(self.ranks), Strict(self.ranks)]
        self.servers = [Losing(Once(engine)) for engine in self.engines]
        self.pool = ServerPool([])
        self.publisher = WeightPublisher(self.pool, self.ranks, in_flight="pause")


@asynccontextmanager
async def opened(*, answer_within_s: float = DEADLINE_S) -> AsyncIterator[World]:
    world = World()
    listening = [await asyncio.start_server(one, "127.0.0.1", 0) for one in world.servers]
    ports = [one.sockets[0].getsockname()[1] for one in listening]
    clients = [
        TokenClient(f"http://127.0.0.1:{port}", answer_within_s=answer_within_s) for port in ports
    ]
    world.pool = ServerPool(clients)
    world.publisher = WeightPublisher(world.pool, world.ranks, in_flight="pause")
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield world
    finally:
        await world.pool.close()
        for one in listening:
            one.close()


@pytest.mark.slow
async def test_a_lost_answer_loses_no_server() -> None:
    await asyncio.gather(*(lose_one_answer(path) for path in CALLS))


async def lose_one_answer(path: str) -> None:
    async with opened() as world:
        world.servers[1].loses = [path]
        await world.publisher.connect()
        await world.publisher.publish(1)
        await world.publisher.publish(2)
        assert world.servers[1].num_lost == 1
        assert [server.state for server in world.pool.servers] == [ServerState.SERVING] * 2
        assert [server.version for server in world.pool.servers] == [2, 2]
        assert [engine.version for engine in world.engines] == ["2", "2"]
        for once in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            assert world.engines[1].made.count(once) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stays_open", [False, True])
async def test_answers_to_everything_may_be_lost_in_one_update(stays_open: bool) -> None:
    # Those that wait for all others have no deadline: whoever sends notices when nothing moves.
    collective = ("/init_weight_transfer_engine", "/update_weights" if stays_open else "")
    async with opened(answer_within_s=0.2 if stays_open else DEADLINE_S) as world:
        await world.publisher.connect()
        for server in world.servers:
            server.stays_open = stays_open
            server.loses = [path for path in CALLS if path not in collective]
        await world.publisher.publish(1)
        assert [server.state for server in world.pool.servers] == [ServerState.SERVING] * 2
        assert [engine.version for engine in world.engines] == ["1", "1"]


async def test_a_sign_of_life_is_asked_for_at_the_engine() -> None:
    async with opened() as world:
        assert await world.pool.clients[0].is_alive()
        assert world.engines[0].made == [ENGINE_PATH]


async def called(once: Once, number: str | None, parts: Sequence[dict[str, Any]]) -> list[Any]:
    sent: list[Any] = []
    left = list(parts)

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [] if number is None else [(b"x-telescope-once", number.encode())]
    await once({"type": "http", "headers": headers}, receive, send)
    return sent


async def test_calls_are_told_apart_by_their_number_and_forgotten_in_time() -> None:
    made: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        made.append((await receive())["body"])
        await send({"type": "http.response.body", "body": str(len(made)).encode()})

    once = Once(app)
    parts = [
        {"type": "http.request", "body": b"a", "more_body": True},
        {"type": "http.request", "body": b"b"},
    ]
    first = await called(once, "1", parts)
    assert made == [b"ab"]
    assert await called(once, "1", parts) == first
    assert await called(once, "2", [{"type": "http.disconnect"}]) == []
    assert made == [b"ab"]
    assert await called(once, "2", parts) != first
    for _ in range(2):
        await called(once, None, parts[1:])
    assert len(made) == 4
    for number in range(3, 3 + 2 * MOST_REMEMBERED):
        await called(once, str(number), parts)
    assert len(once._calls) <= MOST_REMEMBERED + 1
    assert await called(once, "1", parts) != first


async def test_a_call_goes_on_when_its_caller_has_left_and_is_answered_when_it_asks_again() -> None:
    may_end, has_begun = asyncio.Event(), asyncio.Event()
    num_made = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_made
        num_made += 1
        has_begun.set()
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"done"})

    once = Once(app)
    parts = [{"type": "http.request", "body": b""}]
    asking = asyncio.create_task(called(once, "1", parts))
    async with asyncio.timeout(DEADLINE_S):
        await has_begun.wait()
    asking.cancel()
    await asyncio.wait([asking])
    again = asyncio.create_task(called(once, "1", parts))
    may_end.set()
    async with asyncio.timeout(DEADLINE_S):
        assert (await again)[0]["body"] == b"done"
    assert num_made == 1
