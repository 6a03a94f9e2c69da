"""A server's port is its own from its choice on, and what answers there is asked who it is."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError, ProcessDiedError
from telescope_train.cluster.network import Network
from telescope_train.cluster.ports import listening
from telescope_train.inference.fleet import ServerActor, ServerPorts
from telescope_train.inference.server import ServerProcess, ServerSettings

DEADLINE_S = 120.0
SERVES = """
import asyncio, os, socket, uvicorn
from telescope_train.inference.vllm_plugin.http_server import Guard
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})
guarded = Guard(app, os.environ["TELESCOPE_SERVER_SECRET"], os.environ["TELESCOPE_SERVER_IDENTITY"])
given = socket.socket(fileno=int(os.environ["TELESCOPE_SERVER_SOCKET"]))
server = uvicorn.Server(uvicorn.Config(guarded, lifespan="off", log_level="error"))
asyncio.run(server.serve([given]))
"""
"""What vLLM's program does with its variables, without vLLM, which takes a minute to import."""
LEAVES_AN_ENGINE = f"""
import os, time
if os.fork() == 0:
    time.sleep(600)
{SERVES}
"""
"""The same, with a child that holds the port, as an engine in a process of its own would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script(ServerSettings):
    """The settings of a program that takes the place of vLLM's."""

    text: str = SERVES

    def arguments(self) -> list[str]:
        """Return the command line."""
        return [sys.executable, "-c", self.text]


def script(folder: Path, text: str = SERVES, *, host: str = "127.0.0.1", port: int = 0) -> Script:
    return Script(
        model_path="none",
        host=host,
        port=port,
        log_path=folder / "a.log",
        secret="a-secret-of-two-runs",
        text=text,
    )


@contextmanager
def started(settings: ServerSettings) -> Iterator[ServerProcess]:
    server = ServerProcess(settings)
    try:
        server.wait_until_healthy(DEADLINE_S)
        yield server
    finally:
        server.close()


def until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def is_gone(actor: ServerActor) -> bool:
    try:
        actor.check()
    except ProcessDiedError:
        return True
    return False


@pytest.mark.slow
def test_two_servers_never_have_one_port(tmp_path: Path):
    """The first one holds its port before its program has imported anything."""
    first = ServerProcess(script(tmp_path))
    try:
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}|{first.pid}"):
            ServerProcess(replace(first.settings, log_path=tmp_path / "b.log"))
        first.wait_until_healthy(DEADLINE_S)
        assert first.check_engine()
    finally:
        first.close()
    with started(first.settings) as again:
        assert again.settings.port == first.settings.port
        assert again.identity != first.identity


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_proxy_stands_before_a_server(tmp_path: Path, monkeypatch, host):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with started(script(tmp_path, host=host)) as server:
            assert server.check_engine()
            variables = server.settings.environment()
            assert variables["http_proxy"]
            assert {"127.0.0.1", "::1", "localhost"} <= {*variables["no_proxy"].split(",")}


@pytest.mark.slow
def test_another_program_at_the_address_is_not_taken_for_the_server(tmp_path: Path):
    with started(script(tmp_path)) as server, started(script(tmp_path)) as other:
        address = ("127.0.0.1", server.settings.port)
        server.settings = replace(server.settings, port=other.settings.port)
        with pytest.raises(ProcessDiedError, match=rf"another program.*{server.identity}"):
            server.check_engine()
        assert address[1] != other.settings.port


@pytest.mark.slow
def test_a_server_starts_again_though_its_port_is_taken(tmp_path: Path):
    """Its own engine that has outlived it is ended first; of another program the port is left."""
    ports = ServerPorts(network=Network(is_local=True))
    with listening("127.0.0.1") as free:
        port = free.getsockname()[1]
    settings = script(tmp_path, LEAVES_AN_ENGINE, port=port)
    actor = ServerActor(settings, ports)
    try:
        until(lambda: actor.startup().is_healthy)
        first = actor.startup().reached
        os.kill(actor.pid(), signal.SIGKILL)
        until(lambda: is_gone(actor))
        actor.start_again()
        until(lambda: actor.startup().is_healthy)
        second = actor.startup().reached
        assert second.base_url == first.base_url
        assert second.identity != first.identity
        actor.close()
        with listening("127.0.0.1", port):
            actor.start_again()
            until(lambda: actor.startup().is_healthy)
            assert actor.startup().reached.base_url not in (first.base_url, "")
    finally:
        actor.close()


def test_a_port_that_was_set_is_refused_with_who_has_it(tmp_path: Path):
    with listening("127.0.0.1") as other:
        port = other.getsockname()[1]
        actor = ServerActor(
            script(tmp_path, port=port), ServerPorts(network=Network(is_local=True))
        )
        with pytest.raises(ConfigError, match=rf"{port}.*process {os.getpid()} .*inference_base_p"):
            actor.startup()
        actor.close()


@pytest.mark.parametrize(
    ("host", "fact"), [("192.0.2.1", "no address '192.0.2.1'"), ("2001:db8::1", "no IPv6 address")]
)
def test_an_address_that_this_machine_lacks_is_named(tmp_path: Path, host, fact):
    with pytest.raises(ConfigError, match=rf"{fact}.*inference_host"):
        ServerProcess(script(tmp_path, host=host, port=8100))
