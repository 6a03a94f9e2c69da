"""Connections that are held without asking for anything, and addresses that are only claimed."""

import ipaddress
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from urllib.parse import urlsplit

import httpx
import pytest
from tests.envs.server.sending import Sender, publication_now
from tests.envs.serving import ServedHub, limited

from telescope_envs.server.app import ServerOptions
from telescope_envs.server.connections import ConnectionLimits

BOUND_S = 120.0
"""Longest wait for what must happen; nothing is measured."""
LOCAL = (ipaddress.ip_network("127.0.0.0/8"),)
HEAD_S = (0.25, 1.0, 4.0, 16.0, 64.0)
"""Limits for a head, tried in turn until one is long enough for this machine to keep."""
PATIENT = {"request_head_s": 3600.0, "stalled_s": 3600.0}


@contextmanager
def connected(
    address: str, sent: bytes = b"", source: str = "127.0.0.1"
) -> Iterator[socket.socket]:
    parts = urlsplit(address)
    place = (parts.hostname or "", parts.port or 0)
    with socket.create_connection(place, timeout=BOUND_S, source_address=(source, 0)) as client:
        client.sendall(sent)
        yield client


def rest_of(client: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    pieces: list[bytes] = []
    try:
        while piece := client.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"GET /config.json HTTP/1.1\r\nHost: [::1]\r\nX: ", b"\r\n"],
    ids=["nothing", "part of a line", "part of a head", "an empty line"],
)
def test_a_connection_without_a_request_is_closed(tmp_path, sent):
    options = ServerOptions(connections=ConnectionLimits(request_head_s=0.05))
    with limited(tmp_path / "hub", options) as hub, connected(hub.address, sent) as client:
        answer = rest_of(client)
    # Without httptools, uvicorn reads with h11, which refuses an empty line.
    is_refused = sent == b"\r\n" and find_spec("httptools") is None
    assert answer.partition(b"\r\n")[0] == (b"HTTP/1.1 400 Bad Request" if is_refused else b"")


@pytest.mark.slow
def test_a_second_head_that_never_ends_is_closed_too(tmp_path):
    whole, answer = b"GET /config.json HTTP/1.1\r\nHost: [::1]\r\n\r\n", b""
    for head_s in HEAD_S:
        options = ServerOptions(connections=ConnectionLimits(request_head_s=head_s))
        with limited(tmp_path / "hub", options) as hub, connected(hub.address, whole) as client:
            begun = client.recv(65536)
            if begun:
                client.sendall(b"GET / HTTP/1.1\r\nX: ")
                answer = begun + rest_of(client)
                break
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200") == 1


@pytest.mark.slow
def test_a_request_that_takes_longer_is_not_cut_off(tmp_path):
    """A head that came in time may be followed by a body that takes much longer."""
    for head_s in HEAD_S:
        options = ServerOptions(connections=ConnectionLimits(request_head_s=head_s))
        with limited(tmp_path / "hub", options) as hub:
            try:
                answer = publish_slowly(hub)
            except httpx.TransportError:
                answer = None  # the head did not come in time
        if answer is not None:
            break
    assert answer is not None
    assert answer.status_code == 201, answer.text


def publish_slowly(hub: ServedHub) -> httpx.Response:
    """Publish a release; the rest of its body is sent after the limit of a head has passed."""
    publication = publication_now()
    with Sender(hub.address, hub.token()) as sender:
        record = publication.release.as_json()
        files = {"record": ("r", record), "wheel": ("w", publication.wheel)}
        request = sender.build_request("POST", "api/releases", files=files)
        content = request.read()

    def in_two_parts() -> Iterator[bytes]:
        yield content[:100]
        with connected(hub.address) as later:  # opened later, and closed before the rest
            assert rest_of(later) == b""
        yield content[100:]

    headers = {key: request.headers[key] for key in ("authorization", "content-type")}
    return httpx.post(request.url, content=in_two_parts(), headers=headers, timeout=BOUND_S)


@pytest.mark.slow
def test_one_address_cannot_hold_all_connections(tmp_path):
    limits = ConnectionLimits(per_address=3, **PATIENT)
    with limited(tmp_path / "hub", ServerOptions(connections=limits)) as hub, ExitStack() as held:
        clients = [held.enter_context(connected(hub.address)) for _ in range(3)]
        with connected(hub.address) as fourth:
            answer = rest_of(fourth)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"more than 3 connections from 127.0.0.1" in answer
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=hub.address, transport=transport) as other:
            assert other.get("config.json").status_code == 200
        clients[0].sendall(b"GET /config.json HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n")
        assert rest_of(clients[0]).startswith(b"HTTP/1.1 200")
        with connected(hub.address, b"GET / HTTP/1.0\r\n\r\n") as after:
            assert rest_of(after).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_full_server_closes_the_longest_waiting_connection(tmp_path):
    limits = ConnectionLimits(at_once=4, per_address=100, **PATIENT)
    with limited(tmp_path / "hub", ServerOptions(connections=limits)) as hub, ExitStack() as held:
        first, *others = [held.enter_context(connected(hub.address)) for _ in range(4)]
        assert httpx.get(f"{hub.address}/config.json").status_code == 200
        assert rest_of(first) == b""
        others[0].sendall(b"GET /config.json HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n")
        assert rest_of(others[0]).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_proxy_has_no_limit_of_its_own(tmp_path):
    limits = ConnectionLimits(per_address=1, **PATIENT)
    options = ServerOptions(connections=limits, proxies=LOCAL)
    with limited(tmp_path / "hub", options) as hub, ExitStack() as held:
        for _ in range(5):
            held.enter_context(connected(hub.address))
        assert httpx.get(f"{hub.address}/config.json").status_code == 200


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_dropped(tmp_path):
    limits = ConnectionLimits(request_head_s=3600.0, stalled_s=0.2)
    options = ServerOptions(connections=limits, max_wheel_bytes=2**26)
    publication = publication_now(code="x = 1\n")
    with limited(tmp_path / "hub", options) as hub:
        hub.store.publish(publication)
        (hub.store.files.path(publication.release.wheel.sha256)).write_bytes(b"x" * 2**25)
        path = publication.release.wheel.urls[0]
        ask = f"GET /{path} HTTP/1.1\r\nHost: [::1]\r\n\r\n".encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(BOUND_S)
            client.connect(("127.0.0.1", urlsplit(hub.address).port))
            client.sendall(ask)
            waiting = select.poll()
            waiting.register(client, select.POLLERR | select.POLLHUP | select.POLLRDHUP)
            assert waiting.poll(BOUND_S * 1000)


@pytest.mark.slow
@pytest.mark.parametrize("header", ["X-Forwarded-For", "x-forwarded-for"])
def test_a_claimed_address_does_not_evade_limits(tmp_path, header):
    options = ServerOptions(reads_per_minute=5)
    with limited(tmp_path / "hub", options) as hub, httpx.Client(base_url=hub.address) as client:
        answers = [
            client.get("config.json", headers={header: f"10.0.0.{number}"}).status_code
            for number in range(20)
        ]
    assert answers.count(429) >= 10


@pytest.mark.slow
def test_a_claimed_scheme_is_not_shown(tmp_path):
    with limited(tmp_path / "hub", ServerOptions()) as hub:
        page = httpx.get(hub.address, headers={"X-Forwarded-Proto": "https", "accept": "text/html"})
    assert "https://127.0.0.1" not in page.text


@pytest.mark.slow
def test_a_trusted_proxy_says_who_asks_and_how(tmp_path):
    options = ServerOptions(reads_per_minute=5, proxies=LOCAL)
    with limited(tmp_path / "hub", options) as hub, httpx.Client(base_url=hub.address) as client:
        for number in range(20):
            headers = {"X-Forwarded-For": f"10.0.0.{number}", "X-Forwarded-Proto": "https"}
            page = client.get("", headers={**headers, "accept": "text/html"})
            assert page.status_code == 200
            assert "https://127.0.0.1" in page.text
        spoofed = [
            client.get("", headers={"X-Forwarded-For": f"10.1.0.{number}, 10.2.0.1"}).status_code
            for number in range(20)
        ]
    assert spoofed.count(429) >= 10
