"""Bytes that no client of OpenAI sends are refused before they cost the event loop anything."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest
from test_openai_client import ASK

from telescope_core.gateway import server
from telescope_core.gateway.messages import MAX_MESSAGES

GOOD = json.dumps({"model": "policy", "messages": ASK}).encode()


def head(endpoint, *, length: int, key: bytes | None = None, more: bytes = b"") -> bytes:
    path = urlsplit(endpoint.base_url).path
    given = endpoint.api_key.encode() if key is None else key
    return (
        (
            f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
            "Authorization: Bearer "
        ).encode()
        + given
        + more
        + b"\r\n\r\n"
    )


async def connect(endpoint):
    url = urlsplit(endpoint.base_url)
    return await asyncio.open_connection(url.hostname, url.port)


async def answered(endpoint, sent: bytes) -> tuple[int, dict]:
    reader, writer = await connect(endpoint)
    try:
        async with asyncio.timeout(60):
            writer.write(sent)
            status = int((await reader.readline()).split()[1])
            headers = await reader.readuntil(b"\r\n\r\n")
            length = int(headers.lower().partition(b"content-length:")[2].split()[0])
            return status, json.loads(await reader.readexactly(length))
    finally:
        writer.close()


@pytest.mark.parametrize("key", [b"\xff\xfe", b"\xc3", b"\xc3\xbc", b"sk-wrong"])
async def test_a_key_of_any_bytes_is_a_wrong_key(serve, key):
    opened = serve("hi")
    endpoint = opened.endpoint
    status, body = await answered(endpoint, head(endpoint, length=len(GOOD), key=key) + GOOD)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


NESTED = [
    b'{"model": "policy", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model": "policy", "messages": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    b"\xff\xfe",
    b"[" * 100_000,
]


@pytest.mark.parametrize("body", NESTED)
async def test_json_that_is_nested_too_deep_is_no_json(serve, body):
    opened = serve("hi")
    endpoint = opened.endpoint
    status, answer = await answered(endpoint, head(endpoint, length=len(body)) + body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large_is_refused_before_it_comes(serve):
    opened = serve("hi")
    endpoint = opened.endpoint
    status, body = await answered(endpoint, head(endpoint, length=server.MAX_REQUEST_BYTES + 1))
    assert (status, body["error"]["code"]) == (413, "request_too_large")


async def test_a_wrong_key_is_refused_before_the_body_comes(serve):
    opened = serve("hi")
    endpoint = opened.endpoint
    status, _ = await answered(endpoint, head(endpoint, length=10**6, key=b"sk-wrong"))
    assert status == 401


async def test_more_messages_than_any_rollout_has_are_refused(serve):
    opened = serve("hi")
    endpoint = opened.endpoint
    messages = [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    status, answer = await answered(endpoint, head(endpoint, length=len(body)) + body)
    assert (status, answer["error"]["param"]) == (413, "messages")


async def test_connections_over_which_nothing_comes_are_closed(monkeypatch):
    monkeypatch.setattr(server, "MAX_SECONDS_IDLE", 0.2)
    monkeypatch.setattr(server, "_LOOK_EVERY_S", 0.05)
    gateway = server.Gateway(model="policy")
    await gateway.start()
    try:
        ports = [gateway._port] * 2
        silent, begun = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
        begun[1].write(b"POST /rollouts/x/v1/chat/completions HT")
        async with asyncio.timeout(60):
            assert await silent[0].read() == b""
            await begun[0].read()
        for _, writer in (silent, begun):
            writer.close()
    finally:
        await gateway.close()


async def test_a_body_that_does_not_come_is_given_up(serve, monkeypatch):
    monkeypatch.setattr(server, "MAX_SECONDS_IDLE", 0.2)
    opened = serve("hi")
    endpoint = opened.endpoint
    status, body = await answered(endpoint, head(endpoint, length=len(GOOD)) + GOOD[:3])
    assert (status, body["error"]["code"]) == (408, "request_timeout")
