"""Bytes that no client of OpenAI sends are refused in its form, by the gateway and by the shim."""

import asyncio
import gzip
import json
import logging
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from telescope_adapters.requests import Requests
from telescope_adapters.verifiers_tasks import Playing, PolicyShim
from telescope_core.environments import Episode
from telescope_core.gateway import Gateway, listener
from telescope_core.gateway.messages import MAX_MESSAGES
from telescope_core.gateway.refusal import MAX_SHOWN
from telescope_core.gateway.request import ChatRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion, Example, Message, Sampling

ASK = [{"role": "user", "content": "1+1="}]
GOOD = json.dumps({"model": "policy", "messages": ASK}).encode()
SAMPLING = Sampling(max_tokens=8, temperature=1.0)


class Two:
    """Answers every request with 2."""

    async def answer(self, request: ChatRequest) -> Completion:
        return Completion(message=Message(role="assistant", content="2"), finish_reason="stop")


@pytest.fixture(params=["gateway", "shim"])
async def door(request: pytest.FixtureRequest) -> AsyncIterator[SimpleNamespace]:
    """A listening server: its port, the path of its rollout, and the header that opens it."""
    if request.param == "gateway":
        server, two = Gateway(model="policy"), Two()
        await server.start()
        session = server.open(two, SAMPLING)
        url = urlsplit(session.endpoint.base_url)
        header = b"Authorization", b"Bearer " + session.endpoint.api_key.encode()
        kept: list[object] = [two, session]
    else:
        server = PolicyShim("X-Session")
        await server.start()
        url, header = urlsplit(server.base_url), (b"X-Session", b"mine")
        policy = ScriptedClient(["2"]).policy("r")
        episode = Episode(Example(id="e", prompt=""), [], policy=policy, sampling=SAMPLING)
        kept = [Playing(requests=Requests(episode))]
        server.playing["mine"] = kept[0]
    path = f"{url.path}/chat/completions".encode()
    yield SimpleNamespace(port=url.port, path=path, header=header, kept=kept, kind=request.param)
    await server.close()


def request_of(door, body=GOOD, *, line=None, length=None, key=None, more=(), chunked=False):
    name, value = door.header
    return b"\r\n".join(
        [
            line or b"POST " + door.path + b" HTTP/1.1",
            b"Host: x",
            b"Connection: close",
            b"Transfer-Encoding: chunked"
            if chunked
            else b"Content-Length: %d" % (len(body) if length is None else length),
            name + b": " + (value if key is None else key),
            *more,
            b"",
            body,
        ]
    )


async def answered(door, *sent: bytes) -> tuple[int, dict]:
    """Send each part once the one before is on its way, and return what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        async with asyncio.timeout(60):
            for part in sent:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            status, length = 0, None
            while line := (await reader.readline()).strip():
                if line.startswith(b"HTTP/"):
                    status = int(line.split()[1])
                    if status == 100:
                        await reader.readline()
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            return status, json.loads(await reader.readexactly(length or 0))
    finally:
        writer.close()


async def require_told(door, *sent: bytes, may_pass: bool = True) -> str:
    """Check that the answer is one of OpenAI's API, and return the code of its refusal."""
    status, body = await answered(door, *sent)
    if may_pass and status == 200:
        assert body["choices"][0]["message"]["content"] == "2"
        return ""
    assert 400 <= status < 500, (status, body)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(json.dumps(error)) < 8 * MAX_SHOWN, "it does not repeat what was sent"
    return str(error["code"])


NAMES = [
    *(b"Host", b"Authorization", b"X-Session", b"Content-Length", b"Content-Type"),
    *(b"Content-Encoding", b"Transfer-Encoding", b"Connection", b"Expect", b"Upgrade"),
    *(b"Accept", b"Accept-Encoding", b"Cookie", b"Range", b"User-Agent", b"X-Anything"),
]
VALUES = [
    *(b"", b"\xff\xfe", b"\xc3", b"\xc3\xbc", b"\x00", b"\x7f", b"\t", b"a\rb", b"a\nb", b"\r\n b"),
    *(b"-1", b"0", b"9" * 30, b"a" * 9000, b"=?", b"gzip", b"br", b"chunked, gzip", b"websocket"),
    *(b"100-continue", b"200-ok", b"identity", b"text/html; charset=\xff", b"Bearer \xed\xa0\x80"),
]


@pytest.mark.slow
async def test_odd_bytes_in_any_header_are_refused_as_openai_refuses(door, caplog):
    drawn = random.Random(0)
    values = [*VALUES, *(drawn.randbytes(drawn.randrange(1, 20)) for _ in range(10))]
    with caplog.at_level(logging.INFO):
        for name in NAMES:
            for value in values:
                # A second one, an only one, and one with a broken name.
                await require_told(door, request_of(door, more=[name + b": " + value]))
            line = name + drawn.randbytes(2) + b": x"
            await require_told(door, request_of(door, more=[line]))
        for value in values:
            await require_told(door, request_of(door, key=value), may_pass=False)
    assert caplog.records == [], "no traceback in the log of the run"


LINES = [
    *(b"PO\xffST / HTTP/1.1", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9"),
    *(
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1",
        b"GET /\xff\xfe HTTP/1.1",
        b"GET http://[::1/ HTTP/1.1",
    ),
    *(b"GET /%ff%00 HTTP/1.1", b"OPTIONS * HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"GET /", b"GET"),
    *(b"GET /rollouts/%ff/v1/models/%ff HTTP/1.1", b"PRI * HTTP/2.0", b"DELETE /v1 HTTP/1.1", b" "),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line[:20]))
async def test_a_line_that_is_no_request_of_the_api_is_refused_in_its_form(door, line, caplog):
    await require_told(door, request_of(door, line=line), may_pass=False)
    assert caplog.records == []


def deep(text: bytes, depth: int) -> bytes:
    return b'{"model": "policy", "messages": 1, "x": ' + text * depth + b"}"


BODIES = {
    "deep": b'{"model": "policy", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep field": b'{"model": "policy", "messages": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    "no text": b"\xff\xfe",
    "only open": b"[" * 100_000,
    "long integer": GOOD[:-1] + b', "temperature": ' + b"9" * 5000 + b"}",
    "too large a float": GOOD[:-1] + b', "temperature": 1e999}',
    "no number": GOOD[:-1] + b', "temperature": NaN}',
    "long model": json.dumps({"model": "x" * 10**6, "messages": ASK}).encode(),
    "long name": json.dumps({"model": "policy", "messages": ASK, "x" * 10**6: 1}).encode(),
    "long role": json.dumps({"model": "policy", "messages": [{"role": "x" * 10**6}]}).encode(),
    "long field": json.dumps(
        {"model": "policy", "messages": [{**ASK[0], "y" * 10**6: 1}]}
    ).encode(),
    "long part": json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": [{"type": "z" * 10**6}]}]}
    ).encode(),
    "nothing": b"",
    "null": b"null",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_body_that_is_no_chat_request_is_refused_briefly(door, body, caplog):
    await require_told(door, request_of(door, body), may_pass=False)
    assert caplog.records == []


@pytest.mark.parametrize("half", [b"\\ud83d", b"\\udc22 x", b"x\\ud83dx", b"\xed\xa0\xbd"])
async def test_half_of_a_surrogate_pair_is_taken_as_the_sign_for_no_character(door, half):
    asked = b'{"model": "policy", "messages": [{"role": "user", "content": "%s"}]}' % half
    status, body = await answered(door, request_of(door, asked))
    assert (status, body["choices"][0]["message"]["content"]) == (200, "2")


async def test_any_change_of_a_body_is_answered(door, caplog):
    drawn = random.Random(1)
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"model": "policy", "messages": [*ASK, message], "tools": tools, "stop": ["a"]}
    whole = json.dumps(asked).encode()
    for _ in range(150):
        place, length = drawn.randrange(len(whole)), drawn.randrange(6)
        odd = drawn.choice([drawn.randbytes(drawn.randrange(4)), b'"', b"[{", b"null", b"\\u0000"])
        await require_told(door, request_of(door, whole[:place] + odd + whole[place + length :]))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ([{"more": [b"Content-Encoding: gzip"]}], "invalid_http"),
        ([{"more": [b"Content-Encoding: deflate"], "body": b"\xff" * 40}], "invalid_http"),
        ([{"chunked": True, "body": b"zz\r\n"}], "invalid_http"),
        ([{"chunked": True, "body": b""}, b"zz\r\n"], "invalid_http"),
        ([{"more": [b"Content-Encoding: gzip"], "body": gzip.compress(GOOD)}], ""),
        (
            [{"more": [b"Content-Encoding: gzip"], "body": gzip.compress(b"[" * (65 << 20), 1)}],
            "request_too_large",
        ),
    ],
    ids=["no gzip", "no deflate", "no chunk", "no later chunk", "gzip", "bomb"],
)
async def test_a_body_that_cannot_be_decoded_is_refused(door, sent, code, caplog):
    parts = [request_of(door, **one) if isinstance(one, dict) else one for one in sent]
    assert await require_told(door, *parts) == code
    assert caplog.records == []


@pytest.mark.parametrize("key", [b"\xff\xfe", b"\xc3", b"\xc3\xbc", b"wrong"])
async def test_a_wrong_key_is_refused_before_the_body_comes(door, key):
    status, _ = await answered(door, request_of(door, b"", length=10**6, key=key))
    assert status == (401 if door.kind == "gateway" else 404)


@pytest.mark.parametrize("scheme", [b"bearer ", b"BEARER "])
async def test_the_scheme_of_the_key_may_be_written_in_any_case(door, scheme):
    key = scheme + door.header[1].removeprefix(b"Bearer ")
    status, _ = await answered(door, request_of(door, key=key))
    assert status == (200 if door.kind == "gateway" else 404), "the shim takes a name, not a key"


async def test_a_body_that_is_too_large_is_refused_before_it_comes(door):
    length = listener.MAX_REQUEST_BYTES + 1
    status, body = await answered(door, request_of(door, b"", length=length))
    assert (status, body["error"]["code"]) == (413, "request_too_large")


async def test_more_messages_than_any_rollout_has_are_refused(door):
    messages = [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    status, answer = await answered(door, request_of(door, body))
    assert (status, answer["error"]["param"]) == (413, "messages")


@pytest.mark.slow
async def test_connections_over_which_nothing_comes_are_closed(door, monkeypatch):
    monkeypatch.setattr(listener, "MAX_SECONDS_IDLE", 1.0)
    silent, begun, asked = [
        await asyncio.open_connection("127.0.0.1", port) for port in [door.port] * 3
    ]
    begun[1].write(b"POST /rollouts/x/v1/chat/completions HT")
    asked[1].write(request_of(door).replace(b"Connection: close\r\n", b""))
    async with asyncio.timeout(60):
        assert await silent[0].read() == b""
        await begun[0].read()
        assert (await asked[0].read()).startswith(b"HTTP/1.1 200")
    for _, writer in (silent, begun, asked):
        writer.close()


@pytest.mark.slow
async def test_a_body_that_does_not_come_is_given_up(door, monkeypatch):
    monkeypatch.setattr(listener, "MAX_SECONDS_IDLE", 1.0)
    status, body = await answered(door, request_of(door, GOOD[:3], length=len(GOOD)))
    assert (status, body["error"]["code"]) == (408, "request_timeout")
