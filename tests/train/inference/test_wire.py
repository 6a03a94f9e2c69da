"""The token plane's frames: bounded in size, answered or refused one by one, closed when lost."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.base.chains import Routes
from telescope_core.errors import EndpointError
from telescope_core.types import Sampling
from telescope_train.inference import client as client_module
from telescope_train.inference.client import TokenClient
from telescope_train.inference.generation import Generation, Request, ServerLostError, Span
from telescope_train.inference.wire import (
    FRAME_BYTES,
    TOKEN_PLANE_PATH,
    CancelRequest,
    ClientFrame,
    TokenReply,
    TokenRequest,
    VersionSpan,
    column,
    frames,
)

DEADLINE_S = 60.0
UVICORN_LIMIT_BYTES = 16 * 2**20
PARAMS = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 7, "stop": ["a", "\u00e9"]}))

Serve = Callable[[web.WebSocketResponse], Awaitable[None]]


def request(number: int, length: int) -> TokenRequest:
    ids = array("i", [1] * length).tobytes()
    return TokenRequest(number, ids, PARAMS, cache_salt="v\u00e9", priority=-3)


def reply(number: int, length: int = 1, **others: object) -> TokenReply:
    values = {"finish_reason": "stop", "versions": (VersionSpan("default", 0),), **others}
    ids, logprobs = array("i", [2] * length), array("f", [-1.0] * length)
    return TokenReply(number, ids.tobytes(), logprobs.tobytes(), **values)  # type: ignore[arg-type]


@given(lengths=st.lists(st.integers(0, 400), max_size=40), limit=st.integers(1, 3_000))
def test_frames_hold_all_items_in_order_and_stay_below_their_limit(
    lengths: list[int], limit: int
) -> None:
    items = [request(number, length) for number, length in enumerate(lengths)]
    found = list(frames(items, max_bytes=limit))
    assert [item for frame in found for item in frame] == items
    assert all(found)
    for frame in found:
        assert len(frame) == 1 or sum(item.num_bytes for item in frame) <= limit


@pytest.mark.parametrize(
    "item",
    [
        request(2**40, 0),
        request(3, 70_000),
        CancelRequest(2**40),
        reply(2**40, 70_000),
        reply(1, 0, error="\u20ac" * 900, finish_reason=""),
        reply(1, 9, versions=tuple(VersionSpan(str(2**40 + n), 2**30) for n in range(50))),
    ],
)
def test_an_item_says_at_least_its_size_on_the_wire(
    item: TokenRequest | CancelRequest | TokenReply,
) -> None:
    # The frame adds its own head, of at most 5 bytes.
    assert len(msgspec.msgpack.encode([item])) - 5 <= item.num_bytes


@asynccontextmanager
async def plane_server(
    serve: Serve, *, limit: int, expects_routes: bool = False
) -> AsyncIterator[TokenClient]:
    """A server whose token plane is `serve`, and a client of it."""

    async def handle(http: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=limit)
        await socket.prepare(http)
        await serve(socket)
        return socket

    app = web.Application()
    app.router.add_get(TOKEN_PLANE_PATH, handle)
    server = TestServer(app)
    await server.start_server()
    client = TokenClient(f"http://127.0.0.1:{server.port}", expects_routes=expects_routes)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client
    finally:
        await client.close()
        await server.close()


async def answer_all(socket: web.WebSocketResponse) -> None:
    decoder = msgspec.msgpack.Decoder(ClientFrame)
    async for message in socket:
        frame = decoder.decode(message.data)
        done = [reply(item.id) for item in frame if isinstance(item, TokenRequest)]
        await socket.send_bytes(msgspec.msgpack.encode(done))


async def sample(client: TokenClient, prompt_length: int) -> Generation:
    return await client.generate(
        Request(prompt_ids=[1] * prompt_length, sampling=Sampling(max_tokens=4), cache_salt="v0")
    )


async def test_three_hundred_long_prompts_at_once_are_all_answered() -> None:
    # 300 prompts of 16k tokens are 19 MiB, more than a server of uvicorn takes in one frame.
    async with plane_server(answer_all, limit=UVICORN_LIMIT_BYTES) as client:
        found = await asyncio.gather(*(sample(client, 16_384) for _ in range(300)))
    assert len(found) == 300
    assert FRAME_BYTES < UVICORN_LIMIT_BYTES


async def test_a_prompt_above_the_limit_is_refused_for_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "MAX_FRAME_BYTES", 8_000)
    async with plane_server(answer_all, limit=UVICORN_LIMIT_BYTES) as client:
        small = [sample(client, 100) for _ in range(5)]
        results = await asyncio.gather(sample(client, 5_000), *small, return_exceptions=True)
    assert isinstance(results[0], EndpointError)
    assert "5000 tokens" in str(results[0])
    assert all(isinstance(one, Generation) for one in results[1:])


def part(number: int, ids: list[int], spans: list[tuple[str, int]], **fields: Any) -> TokenReply:
    return TokenReply(
        number,
        token_ids=array("i", ids).tobytes(),
        logprobs=array("f", [-0.5] * len(ids)).tobytes(),
        versions=tuple(VersionSpan(*span) for span in spans),
        **fields,
    )


PARTS = [
    part(0, [1, 2], [("default", 0)]),
    part(0, [3], [("default", 0), ("1", 2)]),
    part(0, [4, 5], [("default", 0), ("1", 2), ("2", 4)], finish_reason="stop"),
]


@pytest.mark.parametrize("routes", [Routes(experts=b"abcd", num_layers=2, num_chosen=1), None])
async def test_routes_come_with_the_last_part_or_are_missed(routes: Routes | None) -> None:
    async def in_parts(socket: web.WebSocketResponse) -> None:
        async for _ in socket:
            for one in [*PARTS[:-1], msgspec.structs.replace(PARTS[-1], routes=routes)]:
                await socket.send_bytes(msgspec.msgpack.encode([one]))

    async with plane_server(in_parts, limit=UVICORN_LIMIT_BYTES, expects_routes=True) as client:
        if routes is None:
            with pytest.raises(EndpointError, match="did not say which experts computed"):
                await sample(client, 3)
        else:
            assert (await sample(client, 3)).routes == routes


async def test_an_answer_that_arrives_in_parts_is_one_answer() -> None:
    async def in_parts(socket: web.WebSocketResponse) -> None:
        async for _ in socket:
            for one in PARTS:
                await socket.send_bytes(msgspec.msgpack.encode([one]))

    async with plane_server(in_parts, limit=UVICORN_LIMIT_BYTES) as client:
        found = await sample(client, 3)
    assert list(found.token_ids) == [1, 2, 3, 4, 5]
    assert len(found.logprobs) == 5
    assert found.spans == (Span(0, 2), Span(1, 2), Span(2, 1))
    assert found.finish_reason == "stop"


@pytest.mark.parametrize("end", ["closed", "dead"])
async def test_a_server_that_goes_away_leaves_what_has_arrived(end: str) -> None:
    async def leave(socket: web.WebSocketResponse) -> None:
        async for _ in socket:
            await socket.send_bytes(msgspec.msgpack.encode(PARTS[:2]))
            if end == "closed":
                await socket.close()
            else:
                dead = TokenReply(0, error="EngineDeadError: it is dead", is_dead=True)
                await socket.send_bytes(msgspec.msgpack.encode([dead]))

    async with plane_server(leave, limit=UVICORN_LIMIT_BYTES) as client:
        with pytest.raises(ServerLostError) as lost:
            await sample(client, 3)
    begun = lost.value.begun
    assert begun is not None
    assert list(begun.token_ids) == [1, 2, 3]
    assert begun.spans == (Span(0, 2), Span(1, 1))


async def test_a_request_goes_on_after_what_it_had() -> None:
    asked: list[TokenRequest] = []

    async def rest(socket: web.WebSocketResponse) -> None:
        async for message in socket:
            asked.extend(msgspec.msgpack.Decoder(list[TokenRequest]).decode(message.data))
            ended = part(asked[-1].id, [4], [("2", 0)], finish_reason="length")
            await socket.send_bytes(msgspec.msgpack.encode([ended]))

    begun = Generation(
        token_ids=array("i", [1, 2, 3]),
        logprobs=array("f", [-0.5] * 3),
        finish_reason="length",
        spans=(Span(1, 3),),
    )
    async with plane_server(rest, limit=UVICORN_LIMIT_BYTES) as client:
        request = Request(
            prompt_ids=[9, 9],
            sampling=Sampling(max_tokens=4),
            stop_token_ids=[7],
            cache_salt="v2",
            begun=begun,
        )
        found = await client.generate(request)
        ids = list(found.token_ids)
        already = await client.generate(replace(request, sampling=Sampling(max_tokens=3)))
    assert ids == [1, 2, 3, 4]
    assert found.spans == (Span(1, 3), Span(2, 1))
    assert list(column("i", asked[0].prompt_ids)) == [9, 9, 1, 2, 3]
    assert msgspec.msgpack.decode(bytes(asked[0].sampling))["max_tokens"] == 1
    assert (len(asked), already.finish_reason) == (1, "length")


async def test_a_reply_that_names_no_weights_is_an_error_of_the_server() -> None:
    async def forget_versions(socket: web.WebSocketResponse) -> None:
        async for message in socket:
            (item,) = msgspec.msgpack.Decoder(ClientFrame).decode(message.data)
            await socket.send_bytes(msgspec.msgpack.encode([reply(item.id, versions=())]))

    async with plane_server(forget_versions, limit=UVICORN_LIMIT_BYTES) as client:
        with pytest.raises(EndpointError, match="which weights"):
            await sample(client, 3)


async def test_a_lost_connection_is_closed_before_it_is_replaced() -> None:
    opened: list[web.WebSocketResponse] = []

    async def text_first(socket: web.WebSocketResponse) -> None:
        opened.append(socket)
        if len(opened) > 1:
            await answer_all(socket)
            return
        await socket.receive()
        await socket.send_str("hello")
        assert (await socket.receive()).type in (WSMsgType.CLOSE, WSMsgType.CLOSING)

    async with plane_server(text_first, limit=UVICORN_LIMIT_BYTES) as client:
        with pytest.raises(EndpointError, match="it sent a TEXT message"):
            await sample(client, 3)
        first = client._plane
        assert first is not None
        await sample(client, 3)
        assert client._plane is not first
        assert first._socket.closed
        assert all(task.done() for task in first._tasks)
        assert opened[0].closed


async def test_a_frame_above_the_limit_fails_what_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer_at_length(socket: web.WebSocketResponse) -> None:
        async for message in socket:
            (item,) = msgspec.msgpack.Decoder(ClientFrame).decode(message.data)
            await socket.send_bytes(msgspec.msgpack.encode([reply(item.id, 4_000)]))

    monkeypatch.setattr(client_module, "MAX_FRAME_BYTES", 8_000)
    async with plane_server(answer_at_length, limit=UVICORN_LIMIT_BYTES) as client:
        with pytest.raises(EndpointError):
            await sample(client, 3)
        assert client._plane is None or client._plane._socket.closed
