"""Registry servers on loopback: in a thread of the tests, and as the command in a process."""

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn

from telescope_envs.records.reading import (
    Publication,
    attestation_path,
)
from telescope_envs.registry import Registry
from telescope_envs.server.app import (
    ServerOptions,
    create_app,
)
from telescope_envs.server.auth import (
    Scope,
    create_token,
)
from telescope_envs.server.hub import HubStore
from telescope_envs.server.run import configured


@dataclass(frozen=True)
class ServedHub:
    """A server that is up, and the store behind it."""

    address: str
    store: HubStore

    def token(self, scope=Scope.PUBLISH, owners=None, days=1.0) -> str:
        """Return the secret of a new token, by default one that publishes as acme."""
        owners = (("acme",) if scope is Scope.PUBLISH else ()) if owners is None else owners
        lives = timedelta(days=days)
        return create_token(
            self.store.database, "test", scope=scope, owners=owners, lives=lives
        ).secret


class _Mounts:
    """An application that is many, each below a path of its own."""

    def __init__(self) -> None:
        self.apps: dict[str, Any] = {}

    async def __call__(self, scope, receive, send) -> None:
        mount = "/".join(scope["path"].split("/")[:2])
        await self.apps[mount]({**scope, "root_path": mount}, receive, send)


@cache
def _loopback() -> tuple[_Mounts, str]:
    """Start the one HTTP server that all hubs of the tests are mounted in, ended with them."""
    mounts = _Mounts()
    config = uvicorn.Config(mounts, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)

    def run() -> None:
        asyncio.run(server.serve(sockets=[listening]))

    def end() -> None:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    atexit.register(end)
    return mounts, f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def served(data: Path, options: ServerOptions | None = None) -> Iterator[ServedHub]:
    """Serve a hub in which acme may publish, from a thread of this process."""
    store = HubStore(data)
    if not store.namespaces():
        store.add_namespace("acme", [])
    mounts, address = _loopback()
    mount = f"/{len(mounts.apps)}"
    mounts.apps[mount] = create_app(store, options or ServerOptions())
    try:
        yield ServedHub(f"{address}{mount}", store)
    finally:
        store.close()


@contextmanager
def limited(data: Path, options: ServerOptions) -> Iterator[ServedHub]:
    """Serve a hub as the command does, with its limits on connections, from a thread."""
    store = HubStore(data)
    if not store.namespaces():
        store.add_namespace("acme", [])
    server = uvicorn.Server(configured(store, options))
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield ServedHub(f"http://127.0.0.1:{listening.getsockname()[1]}", store)
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()
        store.close()


def fill(store: HubStore, folder: Path) -> None:
    """Publish what the registry in `folder` holds, and write there what is served differently."""
    source = Registry.at(folder)
    for row in source.catalog():
        for line in (folder / f"index/{row.id}.jsonl").read_text().splitlines():
            release = next(r for r in source.releases(row.id) if f'"{r.version}"' in line)
            (url,) = release.wheel.urls
            bundle = source.store.read(attestation_path(url)) or b""
            wheel = source.wheel_bytes(release)
            store.publish(Publication(release=release, wheel=wheel, attestation=bundle))
        status = source.status(row.id)
        store.change_status(row.id, lambda _, status=status: status)
    for name, environment in source.aliases().items():
        store.add_alias(name, environment)
    for path in ("config.json", "aliases.toml", "namespaces/acme.toml"):
        (folder / path).write_bytes(store.read(path) or b"")


@contextmanager
def hub_process(data: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `telescope hub serve` on a free port; yields the process and its address."""
    # Where the tests run in the background of a shell, SIGINT is ignored from the start.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{listen}; from telescope_cli.main import main; main()"
    command = [sys.executable, "-c", program, "hub", "serve", "--data", str(data), "--json"]
    process = subprocess.Popen(
        [*command, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)["address"]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()
