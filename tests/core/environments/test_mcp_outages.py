"""MCP servers over HTTP that are cut off, restart, or stand behind a proxy that answers instead."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.ports import free_port

from telescope_core.base.errors import EnvironmentLoadError, ProcessDiedError
from telescope_core.environments import mcp
from telescope_core.environments.mcp import McpConnection, McpConnections, McpServer
from telescope_core.environments.tool_functions import BadArgumentsError, ToolError

pytest.importorskip("mcp")
SESSION = {"mcp-session-id": "S"}
TOOL = {"name": "add", "inputSchema": {"type": "object", "properties": {}}}
OPENING = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "x", "version": "1"},
}


class Server:
    """An MCP server of the older protocol, with a session, whose next answer a test may replace."""

    def __init__(self):
        self.num_sessions = 0
        self.answers = []
        """Answers to the next calls: functions of the id of the request."""
        self.outage = []
        """Status of the answers to the next requests of any kind."""
        self.address = ""

    async def handle(self, request):
        if request.method == "DELETE":
            return web.Response()
        if request.method == "GET":
            return web.Response(status=405)
        asked = await request.json()
        if self.outage:
            return web.Response(status=self.outage.pop(0), text="<html>")
        number = asked.get("id")
        match asked["method"]:
            case "initialize":
                self.num_sessions += 1
                return web.json_response(result(number, OPENING), headers=SESSION)
            case "tools/list":
                return web.json_response(result(number, {"tools": [TOOL]}))
            case "tools/call":
                if self.answers:
                    return self.answers.pop(0)(number)
                fine = {"content": [{"type": "text", "text": "fine"}]}
                return web.json_response(result(number, fine))
            case "server/discover":
                return web.json_response(rpc_error(number, -32601, "no"))
        return web.Response(status=202)


def result(number, value):
    return {"jsonrpc": "2.0", "id": number, "result": value}


def rpc_error(number, code, message):
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


@asynccontextmanager
async def listening(server, port=0):
    app = web.Application()
    app.router.add_route("*", "/mcp", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.address = "http://{}:{}/mcp".format(*runner.addresses[0][:2])
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(server):
    connections = McpConnections([McpServer(url=server.address)])

    async def call(text="{}"):
        (tool,) = await connections.tools(None)
        return await tool.run(text, None)

    try:
        yield call
    finally:
        await connections.close()


def plain(status, text="<html>", kind="text/html"):
    return lambda number: web.Response(status=status, text=text, content_type=kind)


def with_json(status, body):
    return lambda number: web.json_response(body(number), status=status)


def events(text):
    return plain(200, f"event: message\ndata: {text}\n\n", "text/event-stream")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (plain(401), "HTTP 401"),
        (with_json(401, lambda number: rpc_error(number, -32001, "who?")), "HTTP 401"),
        (plain(404), "does not know the session"),
        (
            with_json(404, lambda number: rpc_error(None, -32600, "Session not found")),
            "does not know the session",
        ),
        (plain(400, "Bad Request: No valid session ID provided", "text/plain"), "HTTP 400"),
        (plain(500), "HTTP 500"),
        (with_json(500, lambda number: {"error": "upstream"}), "HTTP 500"),
        (plain(502), "HTTP 502"),
        (plain(503), "HTTP 503"),
        (plain(307), "HTTP 307"),
        (plain(202, ""), "HTTP 202"),
        (plain(200), "HTTP 200 OK with text/html"),
        (plain(200, "{oops", "application/json"), "Failed to parse JSON"),
        (with_json(200, lambda number: {"error": "upstream"}), "Failed to parse JSON"),
        (events("{oops"), "Failed to parse SSE"),
        (plain(200, ": hi\n\n", "text/event-stream"), "SSE stream ended"),
    ],
)
async def test_what_goes_wrong_on_the_way_fails_the_rollout_and_the_next_one_reconnects(
    answer, reason
):
    async with listening(Server()) as server, connected(server) as call:
        server.answers = [answer]
        with pytest.raises(ProcessDiedError, match=reason):
            await call()
        assert await call() == "fine"
        assert server.num_sessions == 2


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("code", [-32600, -32602, -32603])
async def test_errors_that_the_server_itself_sends_are_shown_to_the_model(status, code):
    async with listening(Server()) as server, connected(server) as call:
        server.answers = [with_json(status, lambda number: rpc_error(number, code, "no such a"))]
        with pytest.raises(ToolError, match="no such a"):
            await call()
        assert await call() == "fine"
        assert server.num_sessions == 1


async def test_arguments_that_are_too_long_for_the_server_are_told_to_the_model():
    async with listening(Server()) as server, connected(server) as call:
        server.answers = [plain(413)]
        with pytest.raises(BadArgumentsError, match=r"too long for the server.*HTTP 413"):
            await call()
        assert await call() == "fine"
        assert server.num_sessions == 1


async def test_half_of_a_surrogate_pair_is_refused_and_ends_no_connection():
    async with listening(Server()) as server, connected(server) as call:
        with pytest.raises(BadArgumentsError, match="half of a surrogate pair"):
            await call(r'{"text": "\ud83d"}')
        assert await call(r'{"text": "\ud83d\udc22"}') == "fine"
        assert server.num_sessions == 1


async def test_deeply_nested_arguments_are_refused_and_end_no_connection():
    async with listening(Server()) as server, connected(server) as call:
        for depth in range(190, 260):
            text = '{"a": ' + "[" * depth + "]" * depth + "}"
            if depth < 200:
                assert await call(text) == "fine"
            else:
                with pytest.raises(BadArgumentsError, match="nested more than 200 levels deep"):
                    await call(text)
        assert server.num_sessions == 1


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
async def test_a_server_on_this_machine_is_asked_directly(monkeypatch, proxy):
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("ALL_PROXY", proxy)
    async with listening(Server()) as server, connected(server) as call:
        assert await call('{"a": 1}') == "fine"


async def test_a_server_that_restarts_is_waited_for(monkeypatch):
    waits = []
    server, port = Server(), free_port()
    server.outage = [503, 502]
    async with asyncio.timeout(60):
        started = asyncio.Event()
        sleep = asyncio.sleep

        async def waiting(seconds):
            waits.append(seconds)
            if len(waits) == 2:
                started.set()
                while not server.address:
                    await sleep(0)

        async def restart():
            await started.wait()
            async with listening(server, port):
                await ended.wait()

        ended = asyncio.Event()
        restarting = asyncio.create_task(restart())
        monkeypatch.setattr(mcp.asyncio, "sleep", waiting)
        connection = await McpConnection.open(McpServer(url=f"http://127.0.0.1:{port}/mcp"))
        monkeypatch.undo()
        assert [tool.name for tool in connection.tools] == ["add"]
        assert waits == [0.1, 0.2, 0.4], "twice nobody listens, and once a proxy answers"
        await connection.close()
        ended.set()
        await restarting


async def test_an_address_where_nobody_listens_is_told_once_for_all_who_wait():
    url = f"http://127.0.0.1:{free_port()}/mcp"
    connections = McpConnections([McpServer(url=url, startup_timeout_s=0.05)])
    attempts = await asyncio.gather(
        *(connections.tools(None) for _ in range(8)), return_exceptions=True
    )
    assert {type(error) for error in attempts} == {EnvironmentLoadError}
    assert all("ConnectError" in str(error) for error in attempts)
    assert all("check the address" in str(error) for error in attempts)


async def test_an_address_that_denies_access_says_so_at_once():
    async with listening(Server()) as server:
        server.outage = [401] * 9
        with pytest.raises(EnvironmentLoadError, match="HTTP 401 Unauthorized; check the address"):
            await McpConnection.open(McpServer(url=server.address))
