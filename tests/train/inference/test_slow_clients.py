"""A client that is busy for a while keeps its WebSocket, and with it all of its requests."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import pytest
import uvicorn

from telescope_train.inference.vllm_plugin import http_server

PING_EVERY_S = 0.02
NUM_MISSED = 5
DEADLINE_S = 120.0


async def answer_one(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer the first message of a WebSocket."""
    assert scope["type"] == "websocket"
    await receive()
    await send({"type": "websocket.accept"})
    if (await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": "answer"})
        await receive()


@pytest.mark.slow
async def test_a_client_that_answers_no_ping_for_long_is_still_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What takes uvicorn 20 s takes it 0.02 s here: one missed ping is already too many.
    strict = partial(uvicorn.Config, ws_ping_interval=PING_EVERY_S, ws_ping_timeout=PING_EVERY_S)
    monkeypatch.setattr(uvicorn, "Config", strict)
    http_server.install("")
    config = uvicorn.Config(answer_one, lifespan="off", log_level="error")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
                connected = await until_listening(session, address)
                for _ in range(NUM_MISSED):
                    message = await connected.receive()
                    assert message.type is aiohttp.WSMsgType.PING, message
                await connected.send_str("request")
                while (message := await connected.receive()).type is aiohttp.WSMsgType.PING:
                    pass
                assert message.data == "answer", message
                await connected.close()
        finally:
            server.should_exit = True
            await serving


async def until_listening(
    session: aiohttp.ClientSession, address: str
) -> aiohttp.ClientWebSocketResponse:
    """Connect without answering pings, as soon as the server listens."""
    while True:
        try:
            return await session.ws_connect(address, autoping=False)
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0)
