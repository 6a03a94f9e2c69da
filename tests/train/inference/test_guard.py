"""A server that others can reach answers nobody who does not show its secret, on no path."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.sdk.resources import Resource

from telescope_core.errors import ConfigError, EndpointError
from telescope_core.types import Sampling
from telescope_train.cluster.network import Network
from telescope_train.config.inference_section import InferenceSection
from telescope_train.inference.client import TokenClient
from telescope_train.inference.fleet import AT_ITS_NODE, ServerPorts
from telescope_train.inference.generation import Request, ServerLostError
from telescope_train.inference.server import ServerSettings
from telescope_train.inference.vllm_plugin import http_server
from telescope_train.inference.wire import (
    ENGINE_PATH,
    SECRET_VARIABLE,
    TOKEN_PLANE_PATH,
    server_secret,
)
from telescope_train.observability.otlp_receiver import OtlpReceiver
from telescope_train.observability.traces import Traces

SECRET = "a-secret-for-this-test"
REQUEST = Request(prompt_ids=[1], sampling=Sampling(max_tokens=1), cache_salt="v0")
PATHS = [
    *("/health", "/metrics", "/v1/completions", "/pause", "/resume", "/sleep", "/collective_rpc"),
    *("/update_weights", "/init_weight_transfer_engine", "/docs", "/", "//health", "/%68ealth"),
    *(TOKEN_PLANE_PATH, ENGINE_PATH, "/telescope/v1/pause"),
]
WRONG = [
    *({}, {"authorization": SECRET}, {"authorization": "Bearer "}, {"authorization": "Basic x"}),
    *({"authorization": f"Bearer {SECRET}x"}, {"authorization": f"Bearer {SECRET[:-1]}"}),
    *({"x-api-key": SECRET}, {"authorization": f"Bearer {SECRET} "[:-2]}),
    {"authorization": "Bearer \u00e9"},
]
DEADLINE_S = 120.0


class App:
    """An application that answers everybody, and counts them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.paths: list[str] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.num_calls += 1
        self.paths.append(scope["path"])
        assert scope["raw_path"].decode() == scope["path"]
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await receive()
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, secret: str, identity: str = ""
) -> AsyncIterator[tuple[App, str]]:
    """Serve as a vLLM server would; yields the application and its address."""
    monkeypatch.setattr(uvicorn, "Config", uvicorn.Config)  # what `install` changes is put back
    http_server.install(secret, identity)
    app = App()
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        serving = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield app, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.mark.slow
async def test_no_path_and_no_method_answers_without_the_secret(monkeypatch):
    async with served(monkeypatch, SECRET) as (app, address), aiohttp.ClientSession() as session:
        for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT"):
            for path in PATHS:
                async with session.request(method, f"{address}{path}") as reply:
                    assert reply.status == 401, (method, path)
        for headers in WRONG:
            async with session.post(f"{address}/update_weights", headers=headers) as reply:
                assert reply.status == 401, headers
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(f"{address}{TOKEN_PLANE_PATH}", headers=headers)
            assert refused.value.status == 403
        assert app.num_calls == 0


@pytest.mark.slow
async def test_two_keys_are_none(monkeypatch):
    async with served(monkeypatch, SECRET) as (app, address), aiohttp.ClientSession() as session:
        headers = [("authorization", "Bearer other"), ("authorization", f"Bearer {SECRET}")]
        async with session.get(f"{address}/health", headers=headers) as reply:
            assert reply.status == 401
        assert app.num_calls == 0


@pytest.mark.slow
async def test_who_shows_it_is_answered_over_both(monkeypatch):
    async with served(monkeypatch, SECRET) as (app, address):
        client = TokenClient(address, secret=SECRET)
        assert await client.is_alive()
        await client.control("/resume", is_repeatable=True)
        await client._open_plane()
        await client.close()
        assert app.num_calls == 3


@pytest.mark.slow
async def test_a_client_without_it_is_told_so(monkeypatch):
    async with served(monkeypatch, SECRET) as (_, address):
        client = TokenClient(address)
        with pytest.raises(EndpointError, match=r"\b401\b.*secret"):
            await client.control("/resume", is_repeatable=True)
        with pytest.raises(ServerLostError, match="403"):
            await client.generate(REQUEST)
        await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("secret", [SECRET, ""])
async def test_a_server_answers_as_itself_alone(monkeypatch, secret):
    """The secret may be the same for two runs: what is meant is the life of one server."""
    async with served(monkeypatch, secret, "aaaa") as (app, address):
        client = TokenClient(address, identity="aaaa", secret=secret)
        assert await client.is_alive()
        await client.control("/resume", query="?a=b", is_repeatable=True)
        assert await client.metrics_page() == "{}"
        await client._open_plane()
        assert app.paths == [ENGINE_PATH, "/resume", "/metrics", TOKEN_PLANE_PATH]
        other = TokenClient(address, identity="bbbb", secret=secret)
        assert not await other.is_alive()
        assert await other.metrics_page() is None
        for path in ("/resume", "/telescope/v1/pause", "/update_weights", "/sleep"):
            with pytest.raises(ServerLostError, match=r"another inference server.*bbbb"):
                await other.control(path, is_repeatable=True)
        with pytest.raises(ServerLostError, match="another inference server"):
            await other.generate(REQUEST)
        assert app.num_calls == 4
        await client.close()
        await other.close()


async def test_what_is_no_server_of_telescope_is_not_taken_for_one():
    """Such as vLLM without the guard, at the address of a server that has died."""
    app = web.Application()
    for path in ("/resume", ENGINE_PATH, "/metrics"):
        app.router.add_route("*", path, lambda request: web.json_response({}))
    async with TestServer(app) as server:
        client = TokenClient(f"http://127.0.0.1:{server.port}", identity="aaaa")
        assert not await client.is_alive()
        assert await client.metrics_page() is None
        with pytest.raises(EndpointError, match="404"):
            await client.control("/resume", is_repeatable=True)
        with pytest.raises(ServerLostError, match="404"):
            await client.generate(REQUEST)
        await client.close()


@pytest.mark.slow
async def test_a_server_without_a_secret_answers_everybody(monkeypatch):
    async with served(monkeypatch, "") as (app, address), aiohttp.ClientSession() as session:
        async with session.get(f"{address}/health") as reply:
            assert reply.status == 200
        assert app.num_calls == 1


class ElsewhereNetwork(Network):
    """A node with an address that others reach."""

    def address(self) -> str:
        return "10.77.0.2"

    def variables(self, environ: Any) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("host", "is_local", "base_url"),
    [
        ("127.0.0.1", True, "http://127.0.0.1:8100"),
        (AT_ITS_NODE, False, "http://10.77.0.2:8100"),
        ("0.0.0.0", False, "http://10.77.0.2:8100"),
        ("192.168.0.9", True, "http://192.168.0.9:8100"),
        ("::1", True, "http://[::1]:8100"),
    ],
)
def test_a_server_has_the_address_of_its_node_and_a_secret_of_its_run(
    tmp_path, host, is_local, base_url
):
    settings = ServerSettings(
        model_path="m", host=host, port=8100, log_path=tmp_path / "a.jsonl", secret=SECRET
    )
    ports = ServerPorts(network=ElsewhereNetwork(is_local=is_local, driver="10.77.0.1"))
    settled = ports.settled(settings)
    assert settled.base_url == base_url
    assert settled.environment()[SECRET_VARIABLE] == SECRET
    assert settled.environment()["GLOO_SOCKET_IFNAME"] == "eth0"
    excepted = settled.environment()["no_proxy"].split(",")
    assert {"127.0.0.1", "::1", "10.77.0.1", "10.77.0.2"} <= {*excepted}
    assert SECRET not in repr(settled)
    assert not any(SECRET in argument for argument in settled.arguments())


def test_a_server_takes_nothing_of_the_users_shell_that_would_refuse_its_requests(
    tmp_path, monkeypatch
):
    """vLLM asks requests for VLLM_API_KEY, and torch reads its files as the locale is encoded."""
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    monkeypatch.setenv("PYTHONUTF8", "0")
    settings = ServerSettings(model_path="m", port=1, log_path=tmp_path / "a.jsonl")
    assert "VLLM_API_KEY" not in settings.environment()
    assert settings.environment()["PYTHONUTF8"] == "1"


def test_a_host_may_have_the_brackets_of_an_address():
    assert InferenceSection(inference_host="[::1]").inference_host == "::1"


def test_each_run_has_a_new_secret_and_a_chosen_one_is_long():
    assert server_secret({}) != server_secret({})
    assert len(server_secret({})) >= 32
    assert server_secret({SECRET_VARIABLE: SECRET}) == SECRET
    with pytest.raises(ConfigError, match=r"\b16\b.*\b5\b"):
        server_secret({SECRET_VARIABLE: "short"})


async def test_traces_are_taken_from_servers_of_the_run_alone():
    async with (
        OtlpReceiver(lambda row: None, Traces.new(), host="127.0.0.1", secret=SECRET) as receiver,
        aiohttp.ClientSession() as session,
    ):
        kind = {"content-type": "application/x-protobuf"}
        shown = {"authorization": f"Bearer {SECRET}"}
        for headers, status in ((kind, 401), (kind | shown, 200)):
            async with session.post(receiver.endpoint, data=b"", headers=headers) as reply:
                assert reply.status == status


def test_a_server_shows_the_secret_where_it_sends_its_traces_and_names_itself(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab,telescope.run=old")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    settings = ServerSettings(
        model_path="m",
        port=1,
        log_path=tmp_path / "a.jsonl",
        traces_endpoint="http://10.0.0.1:1",
        traces_secret=SECRET,
        run="demo",
    )
    environment = settings.environment()
    shown = environment["OTEL_EXPORTER_OTLP_TRACES_HEADERS"]
    assert shown == f"authorization=Bearer%20{SECRET}"
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.setenv(name, environment[name])
    assert Resource.create().attributes.items() >= {
        ("service.name", "telescope-server"),
        ("telescope.server", "http://127.0.0.1:1"),
        ("telescope.run", "demo"),
        ("deployment.environment", "lab"),
    }
