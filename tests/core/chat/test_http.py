"""The pool of connections against small servers on loopback that speak bytes."""

import asyncio
import errno
import socket
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from tests.core.one_rollout import let_time_pass
from tests.ports import free_port

from telescope_core.base.terminal import acts_on_terminals
from telescope_core.chat import http
from telescope_core.chat.http import HttpPool, RequestLimits
from telescope_core.errors import EndpointError

PATIENT = RequestLimits(request_timeout_s=600.0, retry_budget_s=60.0)


def answer(status=200, body=b"fine", **headers):
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Server:
    """Answers each request with the next of `script`, the last one for ever; None = silence."""

    def __init__(self, script):
        self.script = list(script)
        self.arrived = asyncio.Event()
        self.closed = asyncio.Event()
        self.num_connections = 0
        self.heads = []
        self.times = []

    async def serve(self, reader, writer):
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                self.times.append(time.monotonic())
                if "Content-Length: " in head:
                    size = head.partition("Content-Length: ")[2].split("\r\n")[0]
                    await reader.readexactly(int(size))
                self.arrived.set()
                action = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                if action is not None:
                    writer.write(action)
                    if b"Connection: close" in action:
                        return
        except asyncio.IncompleteReadError:
            self.closed.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(*script):
    server = Server(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=512)
    server.port = listener.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{server.port}/v1/x"
    pool = HttpPool()
    try:
        yield server, lambda **options: fetch(pool, url, **options)
    finally:
        await pool.close()
        listener.close()


async def fetch(pool, url, *, limits=PATIENT, method="POST", body=b"{}"):
    reply = await pool.request(method, url, body, headers={"X-Mine": "1"}, limits=limits)
    return reply.content


async def test_connections_are_kept_and_as_many_as_needed_are_opened():
    async with serving(answer()) as (server, ask):
        assert [await ask() for _ in range(3)] == [b"fine"] * 3
        assert server.num_connections == 1
        await asyncio.gather(*(ask() for _ in range(150)))
        assert server.num_connections > 100
    assert "X-Mine: 1" in server.heads[0]


@pytest.mark.slow
async def test_the_server_says_how_long_to_wait():
    async with serving(answer(429, Retry_After="0.2"), answer()) as (server, ask):
        assert await ask() == b"fine"
    assert server.times[1] - server.times[0] >= 0.2


@pytest.mark.parametrize("form", ["120", "date"])
async def test_a_wait_beyond_the_budget_is_not_waited_for(form):
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=120), usegmt=True)
    wait = later if form == "date" else form
    async with serving(answer(503, b"busy", Retry_After=wait)) as (server, ask):
        with pytest.raises(EndpointError, match=rf"503: busy; .*Retry-After {wait}"):
            await ask()
    assert len(server.heads) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422])
async def test_other_refusals_are_not_repeated(status):
    async with serving(answer(status, b"no")) as (server, ask):
        with pytest.raises(EndpointError, match=f"/v1/x answered {status}: no; "):
            await ask()
    assert len(server.heads) == 1


async def test_refusals_are_shown_without_passwords_keys_and_controls():
    body = b'{"error": "wrong key: sk-abc123def \x1b]0;owned\x07"}'
    script = answer(400, body, Location="http://a:movedpw@h/v2?api_key=qqqqqq\x1b[2J")
    async with serving(script) as (server, _):
        pool = HttpPool()
        told = []
        for user, headers in (
            ("me:hunter2pw@", {}),
            ("", {"Authorization": "Bearer sk-abc123def"}),
        ):
            url = f"http://{user}127.0.0.1:{server.port}/v1/x?token=ttttttt"
            with pytest.raises(EndpointError) as refused:
                await pool.request("GET", url, headers=headers, limits=PATIENT)
            told.append(str(refused.value))
        await pool.close()
    for text in (*told, refused.value.answer):
        assert not acts_on_terminals(text)
        for secret in ("hunter2pw", "ttttttt", "movedpw", "qqqqqq"):
            assert secret not in text
    assert "sk-abc123def" not in told[1] + refused.value.answer
    assert f"127.0.0.1:{server.port}/v1/x" in str(refused.value)
    assert "wrong key" in str(refused.value)


@pytest.mark.parametrize(
    ("location", "base"),
    [
        ("http://elsewhere/v1", "http://elsewhere/v1"),
        ("http://elsewhere/v1/chat/completions", "http://elsewhere/v1"),
        ("https://elsewhere/v1/models?page=1", "https://elsewhere/v1"),
        ("/v2/chat/completions", r"http://127.0.0.1:\d+/v2"),
    ],
)
async def test_a_redirect_is_named_as_a_base_url_and_not_followed(location, base):
    async with serving(answer(307, b"", Location=location)) as (server, ask):
        with pytest.raises(EndpointError, match=f"has moved: use {base} as the base URL"):
            await ask()
    assert len(server.heads) == 1


_BROKEN = [
    b"HTTP/1.1 200 x\r\nContent-Length: 900\r\nConnection: close\r\n\r\nhalf",
    b"nonsense\r\n\r\nConnection: close",
    b"Connection: close",
]


@pytest.mark.parametrize("broken", _BROKEN)
async def test_a_line_that_breaks_is_tried_again(broken):
    async with serving(broken, answer()) as (server, ask):
        assert await ask() == b"fine"
    assert len(server.heads) == 2


@pytest.mark.parametrize("broken", _BROKEN)
async def test_a_server_that_answers_in_part_is_not_said_to_be_out_of_reach(broken):
    async with serving(broken) as (_, ask):
        with pytest.raises(EndpointError, match=r"/v1/x did not answer in full \(.*its log"):
            await ask(limits=RequestLimits(retry_budget_s=0.0))


@pytest.mark.parametrize(
    ("file", "facts"),
    [("", r"over TLS .*SSL_CERT_FILE .*use http://"), ("/nowhere.pem", r"'/nowhere.pem', which")],
)
async def test_a_server_without_tls_is_not_asked_again_and_again(monkeypatch, file, facts):
    monkeypatch.setenv("SSL_CERT_FILE", file)
    num_connections = 0

    async def plain(reader, writer):
        nonlocal num_connections
        num_connections += 1
        writer.write(answer(400))
        writer.close()

    listener = await asyncio.start_server(plain, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    pool = HttpPool()
    with pytest.raises(EndpointError, match=facts):
        await fetch(pool, f"https://127.0.0.1:{port}/v1/x")
    await pool.close()
    listener.close()
    assert num_connections == 1


async def test_a_refused_connection_says_so_plainly():
    pool = HttpPool()
    limits = RequestLimits(retry_budget_s=0.0)
    url = f"http://127.0.0.1:{free_port()}/v1/x"
    with pytest.raises(EndpointError, match=rf"{url}.*Errno 111|{url}.*refused") as refused:
        await fetch(pool, url, limits=limits)
    assert refused.value.status is None
    await pool.close()


async def test_too_many_connections_are_not_taken_for_a_server_that_is_gone(monkeypatch):
    def no_socket(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    pool = HttpPool()
    monkeypatch.setattr(socket, "socket", no_socket)
    with pytest.raises(EndpointError, match=r"open files.*lower --concurrency") as refused:
        await fetch(pool, "http://127.0.0.1:9/v1/x", limits=RequestLimits(retry_budget_s=0.0))
    assert "check the address" not in str(refused.value)
    await pool.close()


async def test_silence_ends_at_the_deadline_and_is_not_tried_again():
    async with serving(None) as (server, ask):
        asking = asyncio.create_task(ask(limits=RequestLimits(request_timeout_s=30.0)))
        await asyncio.wait_for(server.arrived.wait(), 600)
        let_time_pass(31.0)
        with pytest.raises(EndpointError, match=r"/v1/x .*30 s"):
            await asking
        await asyncio.wait_for(server.closed.wait(), 60)
    assert len(server.heads) == 1


async def test_cancelling_closes_the_connection():
    async with serving(None) as (server, ask):
        tasks = [asyncio.create_task(ask()) for _ in range(20)]
        await asyncio.wait_for(server.arrived.wait(), 60)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.wait_for(server.closed.wait(), 60)
        assert all(task.cancelled() for task in tasks)


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy", "ALL_PROXY"])
async def test_proxies_of_the_process_are_used_but_not_for_this_machine(monkeypatch, variable):
    http._proxy_of.cache_clear()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with serving(answer(body=b"by proxy")) as (proxy, _), serving(answer()) as (_, ask):
        monkeypatch.setenv(variable, f"http://me:secret@127.0.0.1:{proxy.port}")
        assert await ask() == b"fine"
        assert not proxy.arrived.is_set()
        pool = HttpPool()
        assert await fetch(pool, "http://models.invalid/v1/x") == b"by proxy"
        await pool.close()
    http._proxy_of.cache_clear()
    assert proxy.heads[0].startswith("POST http://models.invalid/v1/x HTTP/1.1")
    assert "Proxy-Authorization: Basic bWU6c2VjcmV0" in proxy.heads[0]


def test_what_is_no_url_has_no_proxy_and_is_left_to_the_request_to_refuse():
    assert http.proxy_for("http://[::1/x").url is None


async def test_a_proxy_that_cannot_be_reached_is_named_without_its_login(monkeypatch):
    http._proxy_of.cache_clear()
    with monkeypatch.context() as inside:
        inside.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
        pool = HttpPool()
        limits = RequestLimits(retry_budget_s=0.0)
        with pytest.raises(EndpointError) as caught:
            await fetch(pool, "http://models.invalid/v1/x", limits=limits)
        await pool.close()
    http._proxy_of.cache_clear()
    text = str(caught.value)
    assert "models.invalid/v1/x cannot be reached through the proxy http://127.0.0.1:9 (" in text
    assert "http_proxy" in text
    assert "no_proxy" in text
    assert "secret" not in text


async def test_a_proxy_that_does_not_speak_http_is_refused_for_what_is_elsewhere(monkeypatch):
    http._proxy_of.cache_clear()
    async with serving(answer()) as (_, ask):
        monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
        monkeypatch.delenv("http_proxy", raising=False)
        assert await ask() == b"fine"
        pool = HttpPool()
        with pytest.raises(EndpointError, match=r"socks5 proxy.*models\.invalid.*http_proxy"):
            await fetch(pool, "http://models.invalid/v1/x")
        await pool.close()
    http._proxy_of.cache_clear()
