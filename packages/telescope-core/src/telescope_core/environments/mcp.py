"""MCP servers as sources of tools, over stdio or streamable HTTP.

Uses the official `mcp` package, an optional extra (`telescope-core[mcp]`). Each connection has its
own task, because the package requires that the task that opens a connection also closes it.
"""

import asyncio
import json
import os
import ssl
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from telescope_core.base.errors import (
    ConfigError,
    EnvironmentLoadError,
    ProcessDiedError,
    unknown_name,
)
from telescope_core.base.images import message_of, why_unusable
from telescope_core.base.messages import json_object
from telescope_core.base.types import Image, JsonValue, Message
from telescope_core.environments.episode import Episode
from telescope_core.environments.tool_functions import (
    BadArgumentsError,
    Tool,
    ToolError,
    simplified,
)

if TYPE_CHECKING:
    from types import TracebackType

    from mcp import Client
    from mcp.client import Transport
    from mcp.shared.message import SessionMessage
    from mcp.types import CallToolResult, ImageContent

_CONNECTION_CLOSED = -32000
"""JSON-RPC error code with which the `mcp` package reports a closed connection."""
_LOG_TAIL = 2000
_HINT = "pip install 'telescope-core[mcp]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """One MCP server: a `command` that is started here and used over stdio, or a `url`."""

    command: tuple[str, ...] = ()
    """Program and arguments. Its environment variables are only basic ones such as PATH and HOME,
    and those in `environ`."""
    url: str = ""
    """URL of a running server that supports streamable HTTP."""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional environment variables for `command`."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """HTTP headers for every request to `url`."""
    prefix: str = ""
    """Prefix for the names of its tools, for servers whose tools have the same names."""
    only: tuple[str, ...] = ()
    """The tools that the policy may call, by the names that the server gives them; empty = all."""
    per_rollout: bool = False
    """Whether each rollout gets its own connection and, with `command`, its own process. Otherwise
    all rollouts share one connection and any state that the server keeps."""
    startup_timeout_s: float = 30.0
    """Seconds within which the server must start and list its tools."""
    images: bool = False
    """Whether the policy gets the pictures in results. A model that reads text alone refuses them,
    so otherwise they are only named."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or isinstance(self.only, str):
            raise ConfigError(
                "command and only of an McpServer must be tuples, such as ('python', 'server.py'); "
                f"got command={self.command!r}, only={self.only!r}"
            )
        if bool(self.command) == bool(self.url):
            raise ConfigError(
                "an McpServer needs either a command or a url, not both; got "
                f"command={self.command!r}, url={self.url!r}"
            )
        if (self.url and self.environ) or (self.command and self.headers):
            raise ConfigError(
                "an McpServer takes environ only with command, and headers only with url"
            )

    @property
    def origin(self) -> str:
        """Name of the server for messages."""
        return f"MCP server {self.url or ' '.join(self.command)}"


class McpConnections:
    """The connections of one environment: shared ones, and ones that belong to a rollout."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._servers = tuple(servers)
        self._shared: dict[int, McpConnection] = {}
        self._locks = [asyncio.Lock() for _ in servers]
        self._listed: dict[int, list[Tool]] = {}

    @property
    def listed(self) -> list[Tool]:
        """Tools that the servers listed last, in the order of the servers."""
        return [tool for _, tools in sorted(self._listed.items()) for tool in tools]

    async def tools(self, stack: AsyncExitStack) -> list[Tool]:
        """Return the tools for one rollout; `stack` closes connections opened for it alone."""
        for index, server in enumerate(self._servers):
            if server.per_rollout:
                connection = await McpConnection.open(server)
                stack.push_async_callback(connection.close)
            else:
                connection = await self._shared_connection(index)
            self._listed[index] = connection.tools
        return self.listed

    async def close(self) -> None:
        """Close the shared connections. Idempotent."""
        while self._shared:
            _, connection = self._shared.popitem()
            await connection.close()

    async def _shared_connection(self, index: int) -> "McpConnection":
        async with self._locks[index]:
            connection = self._shared.get(index)
            if connection is None or not connection.is_usable():
                if connection is not None:
                    await connection.close()
                connection = self._shared[index] = await McpConnection.open(self._servers[index])
            return connection


class McpConnection:
    """One open connection; create it with `open`."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: list[Tool] = []
        self._client: Client | None = None
        self._closing = asyncio.Event()
        """Set by `close`, and when the server's process closes its output, as by ending."""
        self._said = ""
        """The end of what the server's process wrote to stderr; known when the connection ended."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._task = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, server: McpServer) -> "McpConnection":
        """Connect and list the tools; raises TelescopeError that says what went wrong."""
        _require_package()
        connection = cls(server)
        try:
            await asyncio.shield(connection._ready)
        except BaseException:
            await connection.close()
            raise
        return connection

    def is_usable(self) -> bool:
        """Whether calls can still be made from the running event loop."""
        is_here = self._loop is asyncio.get_running_loop()
        return is_here and self._client is not None and not self._closing.is_set()

    async def close(self) -> None:
        """Disconnect, and end the server's process if it was started here. Idempotent."""
        self._closing.set()
        if not self._ready.done():
            self._task.cancel()
        if self._loop is asyncio.get_running_loop():
            await asyncio.wait([self._task])

    async def call(self, name: str, text: str, episode: Episode[Any]) -> str | Message:
        """Call a tool by the name the server gives it, with arguments in JSON text.

        Raises ToolError when the server refuses the call, and ProcessDiedError when it is gone.
        """
        from mcp import MCPError

        arguments = json_object(text or "{}")
        if arguments is None:
            raise BadArgumentsError(f"the arguments of {name} must be a JSON object, got {text!r}")
        try:
            json.dumps(arguments, allow_nan=False)
        except ValueError:  # the client would send null
            raise BadArgumentsError(
                f"the arguments of {name} hold NaN or a number beyond 64 bits, which JSON does not "
                f"have, got {text!r}; give a finite number"
            ) from None
        if self._client is None:
            raise self._gone("it was closed")
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != _CONNECTION_CLOSED:
                raise ToolError(error.message) from None
            await self.close()
            raise self._gone(error.message) from None
        parts = _parts_of(result)
        if result.is_error:
            raise ToolError("\n".join(map(_named, parts)))
        if self.server.images and any(isinstance(part, Image) for part in parts):
            return message_of("tool", *[one for part in parts for one in ("\n", part)][1:])
        return "\n".join(map(_named, parts))

    async def _hold(self) -> None:
        """Open the connection, set `tools` and `_client`, and hold it open until `_closing`."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                async with asyncio.timeout(self.server.startup_timeout_s) as startup:
                    async with _connected(self.server, log, self._closing) as client:
                        self.tools = await self._list_tools(client)
                        startup.reschedule(None)
                        self._client = client
                        self._ready.set_result(None)
                        await self._closing.wait()
            except Exception as error:  # noqa: BLE001 - raised again by the code that awaits `_ready`
                self._said = _tail_of(log)
                failure = error
                if not isinstance(error, ConfigError | EnvironmentLoadError):
                    reason = _reason(error, self.server.startup_timeout_s)
                    advice = (
                        "check the address" if self.server.url else "try the command in a shell"
                    )
                    failure = EnvironmentLoadError(
                        f"{self.server.origin} did not list its tools: {reason}; {advice}"
                        f"{self._output()}"
                    )
                if not self._ready.done():
                    self._ready.set_exception(failure)
            finally:
                self._said = _tail_of(log)
                self._client = None

    async def _list_tools(self, client: "Client") -> list[Tool]:
        found: list[Tool] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [self._tool(one.name, one.description, one.input_schema) for one in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        if not self.server.only:
            return found
        by_name = {tool.name.removeprefix(self.server.prefix): tool for tool in found}
        for name in self.server.only:
            if name not in by_name:
                raise unknown_name("tool", name, by_name, f"(of {self.server.origin})")
        return [by_name[name] for name in self.server.only]

    def _tool(self, name: str, description: str | None, schema: Mapping[str, JsonValue]) -> Tool:
        shown = f"{self.server.prefix}{name}"
        about: dict[str, JsonValue] = {
            "name": shown,
            "description": description or "",
            "parameters": simplified(schema),
        }
        return Tool(
            name=shown,
            schema={"type": "function", "function": about},
            run=partial(self.call, name),
            origin=self.server.origin,
        )

    def _gone(self, reason: str) -> ProcessDiedError:
        return ProcessDiedError(
            f"{self.server.origin} is gone ({reason}); the next rollout connects again. Find out "
            "why the server ended or closes its connections" + self._output()
        )

    def _output(self) -> str:
        return f". Its output:\n{self._said}" if self._said else ""


def _require_package() -> None:
    try:
        import mcp
    except ImportError as error:
        raise EnvironmentLoadError(f"MCP servers need the package mcp: {_HINT}") from error
    if not hasattr(mcp, "Client"):
        raise EnvironmentLoadError(f"MCP servers need version 2 of the package mcp: {_HINT}")


def _tail_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-_LOG_TAIL:].strip()


class _WatchedStream:
    """The messages of a server; tells by an event that there will be no more."""

    def __init__(self, stream: Any, ended: asyncio.Event) -> None:
        self._stream = stream
        self._ended = ended

    def __aiter__(self) -> "_WatchedStream":
        return self

    async def __anext__(self) -> "SessionMessage | Exception":
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._ended.set()
            raise

    async def receive(self) -> "SessionMessage | Exception":
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> "_WatchedStream":
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: "TracebackType | None",
    ) -> bool | None:
        return await self._stream.__aexit__(exc_type, exc_val, exc_tb)


@asynccontextmanager
async def _watched(
    transport: "Transport", ended: asyncio.Event
) -> "AsyncGenerator[tuple[_WatchedStream, Any], None]":
    """Open `transport`, and set `ended` when the server sends no more."""
    async with transport as (received, sent):
        yield _WatchedStream(received, ended), sent


@asynccontextmanager
async def _connected(
    server: McpServer, log: IO[str], ended: asyncio.Event
) -> "AsyncGenerator[Client, None]":
    """Connect to a server; `ended` is set when the process of its `command` is gone."""
    import httpx2
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.url:
        # No read timeout: a server may keep a reply open while a tool runs, and the tool has its
        # own time limit.
        limits = httpx2.Timeout(server.startup_timeout_s, read=None)
        async with (
            httpx2.AsyncClient(
                headers=dict(server.headers),
                timeout=limits,
                verify=_tls_context(os.environ.get("SSL_CERT_FILE", "")),
            ) as http,
            Client(streamable_http_client(server.url, http_client=http)) as client,
        ):
            yield client
    else:
        program, *arguments = server.command
        environ = dict(server.environ)
        parameters = StdioServerParameters(command=program, args=arguments, env=environ)
        transport = stdio_client(parameters, errlog=cast(TextIO, log))
        async with Client(_watched(transport, ended)) as client:
            yield client


@cache
def _tls_context(certificates: str) -> ssl.SSLContext:
    """Return the TLS context; cached, because reading all certificates takes 15 ms of a rollout.

    `certificates` is the value of SSL_CERT_FILE, which httpx2 reads by itself.
    """
    import httpx2

    del certificates
    return httpx2.create_ssl_context()


def _parts_of(result: "CallToolResult") -> list[str | Image]:
    """Return the texts and pictures of a result; other content is only named."""
    from mcp.types import TextResourceContents

    parts: list[str | Image] = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "image" and (image := _image_of(block)):
            parts.append(image)
        elif block.type == "resource" and isinstance(block.resource, TextResourceContents):
            parts.append(block.resource.text)
        else:
            source = block.resource if block.type == "resource" else block
            parts.append(f"({block.type}: {source.mime_type or 'no type given'})")
    if not parts and result.structured_content is not None:
        return [json.dumps(result.structured_content, ensure_ascii=False)]
    return parts


def _image_of(block: "ImageContent") -> Image | None:
    """Return the picture of a block; None if no endpoint would take it."""
    image = Image(media_type=block.mime_type, data=block.data)
    return None if why_unusable(message_of("tool", image)) else image


def _named(part: str | Image) -> str:
    return part if isinstance(part, str) else f"(image: {part.media_type})"


def _reason(error: BaseException, startup_timeout_s: float) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {startup_timeout_s:g} s"
    return f"{type(error).__name__}: {error}"
