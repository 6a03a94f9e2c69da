"""A static host on loopback: serves the folder of a registry, and misbehaves where told to."""

import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from telescope_envs.registry.config import parse_address
from telescope_envs.registry.credentials import Token
from telescope_envs.registry.fetch import Patience
from telescope_envs.registry.stores import Place
from telescope_envs.registry.stores.http import HttpStore


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a head and a body sent apart would wait 40 ms
    server: "StaticHost"

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        fault = self.server.faults.get(self.path)
        if fault is not None:
            return fault(self)
        return self.serve_file()

    def serve_file(self) -> None:
        """Answer as a static host does, with a tag and conditions."""
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            return self.answer(404, b"nothing here")
        body = path.read_bytes()
        tags = {}
        if self.server.has_tags:
            tags["ETag"] = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        if self.server.has_times:
            tags["Last-Modified"] = formatdate(path.stat().st_mtime, usegmt=True)
        asked = {
            "ETag": self.headers.get("If-None-Match"),
            "Last-Modified": self.headers.get("If-Modified-Since"),
        }
        if any(value and value == tags.get(name) for name, value in asked.items()):
            return self.answer(304, b"", **tags)
        return self.answer(200, body, **tags)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def cut(self, sent: bytes = b"") -> None:
        """Send `sent` as it is, then end the connection."""
        self.wfile.write(sent)
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_) -> None:
        """Say nothing."""


Fault = Callable[[_Handler], None]


class StaticHost(ThreadingHTTPServer):
    """Serves `folder`; `faults` says for which paths something else happens."""

    daemon_threads = True
    request_queue_size = 128  # whoever finds a full queue tries again after a second

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.scheme = "https" if tls is not None else "http"
        self.folder = folder
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.faults: dict[str, Fault] = {}
        self.has_tags = True
        self.has_times = True

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def tokens_seen(self) -> set[str]:
        """Return every Authorization header that came here."""
        return {headers.get("Authorization", "") for _, headers in self.requests} - {""}

    def handle_error(self, request, client_address) -> None:
        """Clients that hang up are what some tests are about."""


@contextmanager
def static_host(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[StaticHost]:
    with StaticHost(folder, tls) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def place_at(
    address: str,
    cache: Path,
    *,
    token: str = "",
    offline: bool = False,
    told: list[str] | None = None,
) -> Place:
    """Return what a store is opened with; `told` collects what a person would read."""
    return Place(
        address=parse_address(address),
        token=Token(token) if token else None,
        login_hint="set the token",
        cache=cache,
        offline=offline,
        tell=(told if told is not None else []).append,
    )


def open_store(address: str, cache: Path, *, total_s=120.0, silence_s=60.0, **how) -> HttpStore:
    """Open a store that hardly pauses between its tries."""
    patience = Patience(total_s=total_s, silence_s=silence_s, max_tries=3, first_pause_s=0.005)
    return HttpStore(place_at(address, cache, **how), patience)
