"""The pages of runs: from a server on loopback, asked as by any program, or without a socket."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import httpx
import uvicorn
from starlette.types import ASGIApp

from telescope_ui.files.database import Database
from telescope_ui.index.runs import Runs
from telescope_ui.web.app import create_app
from telescope_ui.web.live import Watcher

TOKEN = "the token of the tests"
LIMIT_S = 60.0
LOOK_S = 0.02
"""Seconds between two looks at the folders, so that tests wait less than pages do."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Pages:
    """Pages that can be asked for, from wherever they come."""

    token = TOKEN

    def ask(self, target: str, **headers: str) -> Answer:
        raise NotImplementedError

    def get(self, address: str, status: int = 200):
        """Return the data of a page as a program gets it, once the index behind it is complete."""
        headers = {"authorization": f"Bearer {self.token}", "accept": "application/json"}
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            answer = self.ask(address, **headers)
            assert answer.status == status, answer.body[:2000]
            found = answer.json
            # A busy machine takes longer than an answer waits.
            if found.get("index", {}).get("is_complete", True):
                return found
            assert time.monotonic() < deadline_s, found["index"]


class Answered(Pages):
    """Pages of an application that is called in this thread."""

    def __init__(self, app: ASGIApp, runner: asyncio.Runner) -> None:
        self._runner = runner
        transport = httpx.ASGITransport(app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def ask(self, target: str, **headers: str) -> Answer:
        answer = self._runner.run(self._client.get(target, headers=headers))
        return Answer(answer.status_code, dict(answer.headers), answer.content)


class Served(Pages):
    """Pages of a server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, target: str, *, method: str = "GET", **headers: str) -> Answer:
        """Send exactly this target and these headers; `_` in their names stands for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        connection.putrequest(method, target, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        found = {name.lower(): value for name, value in answer.getheaders()}
        connection.close()
        return Answer(answer.status, found, body)


@contextmanager
def application(
    folders: Sequence[Path],
    cache: Path,
    host: str,
    allowed_hosts: Sequence[str] = (),
    token: str = TOKEN,
) -> Generator[ASGIApp]:
    """Yield what answers for the runs in `folders`, as if `host` was what is listened on."""
    database = Database(cache)
    runs = Runs(folders, database)
    watcher = Watcher(runs, pause=lambda seconds: time.sleep(LOOK_S))
    try:
        yield create_app(
            runs, database, watcher, token=token, host=host, allowed_hosts=allowed_hosts
        )
    finally:
        watcher.close()
        runs.close()
        database.close()


@contextmanager
def answered(folders: Sequence[Path], cache: Path) -> Generator[Answered]:
    """Show the runs in `folders` to this thread: what a server does is not what is tested."""
    with application(folders, cache, "127.0.0.1") as app, asyncio.Runner() as runner:
        yield Answered(app, runner)


@contextmanager
def served(
    folders: Sequence[Path],
    cache: Path,
    *,
    host: str = "127.0.0.1",
    allowed_hosts: Sequence[str] = (),
    port: int = 0,
    token: str = TOKEN,
) -> Generator[Served]:
    """Show the runs in `folders` until the block ends, as if `host` was what is listened on."""
    with application(folders, cache, host, allowed_hosts, token) as app:
        listening = socket.create_server(("127.0.0.1", port))
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Served(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            listening.close()
        assert not thread.is_alive()
