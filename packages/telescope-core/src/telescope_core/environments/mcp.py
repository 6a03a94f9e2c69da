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
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from telescope_core.base.addresses import is_on_this_machine
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

    import httpx2
    from mcp import Client
    from mcp.client import Transport
    from mcp.shared.message import SessionMessage
    from mcp.types import CallToolResult, ImageContent

_CONNECTION_CLOSED = -32000
"""JSON-RPC error code with which the `mcp` package reports a closed connection."""
_UNREADABLE = -32700
"""JSON-RPC error code with which the `mcp` package reports an answer that it cannot read."""
_NO_SESSION = 404
_TOO_LARGE = 413
_OUTAGE = (502, 503, 504)
"""HTTP status of proxies whose server is gone, as while it restarts."""
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_LOG_TAIL = 2000
_MOST_NESTED = 200
"""Levels of arguments; pydantic, with which the `mcp` package writes them, refuses some 50 more."""
_HINT = "pip install 'telescope-core[mcp]'"


@dataclass(slots=True)
class _HttpAnswer:
    """What the latest HTTP response to a request was, if it cannot be the MCP server's answer."""

    status: int = 0
    trouble: str = ""
    """What was wrong with it; empty = nothing."""

    def forget(self) -> None:
        """Return to what it is before a response."""
        self.status, self.trouble = 0, ""


_HTTP_ANSWER: ContextVar[_HttpAnswer | None] = ContextVar("http_answer", default=None)
"""Where the response to the present request is noted. The `mcp` package sends a request in the
context of its caller, and its errors do not tell those of the server from those on the way."""


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
    """Seconds within which the server must start and list its tools. A `url` that refuses
    connections, as while its server restarts, is tried again for as long."""
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
        self._failures = [(0, "") for _ in servers]
        """Number of failures to connect to each server, and the last one's text."""
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
        before = self._failures[index]
        async with self._locks[index]:
            connection = self._shared.get(index)
            if connection is None or not connection.is_usable():
                number, text = self._failures[index]
                if (number, text) != before:
                    # Others waited meanwhile for as long as the server may take.
                    raise EnvironmentLoadError(text)
                if connection is not None:
                    await connection.close()
                try:
                    connection = await McpConnection.open(self._servers[index])
                except EnvironmentLoadError as error:
                    self._failures[index] = number + 1, str(error)
                    raise
                self._shared[index] = connection
            return connection


class McpConnection:
    """One open connection; create it with `open`."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: list[Tool] = []
        self._client: Client | None = None
        self._closing = asyncio.Event()
        """Set by `close`, and when the server's process closes its output, as by ending."""
        self._lost = ""
        """Why no call can be made any more, if a call has found out; empty = none has."""
        self._said = ""
        """The end of what the server's process wrote to stderr; known when the connection ended."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._task = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, server: McpServer) -> "McpConnection":
        """Connect and list the tools; raises TelescopeError that says what went wrong."""
        # In a thread, because the import is slow and others are playing on this event loop.
        await asyncio.to_thread(_require_package)
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

        Raises ToolError when the server refuses the call, and ProcessDiedError when it is gone or
        cannot be reached.
        """
        from mcp import MCPError

        arguments = _arguments_of(name, text)
        if self._client is None:
            raise self._gone(self._lost or "it was closed")
        answer = _HttpAnswer()
        noting = _HTTP_ANSWER.set(answer)
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if answer.status == _TOO_LARGE:
                raise BadArgumentsError(
                    f"the arguments of {name} are too long for the server, which answered "
                    f"{answer.trouble}; give shorter ones"
                ) from None
            is_unreadable = error.code == _UNREADABLE and error.message.startswith(
                "Failed to parse "
            )
            # Whatever else came is an error that the server itself sent.
            if not (error.code == _CONNECTION_CLOSED or is_unreadable or answer.trouble):
                raise ToolError(error.message) from None
            self._lost = self._lost or answer.trouble or error.message
            await self.close()
            raise self._gone(self._lost) from None
        finally:
            _HTTP_ANSWER.reset(noting)
        parts = _parts_of(result)
        if result.is_error:
            raise ToolError("\n".join(map(_named, parts)))
        if self.server.images and any(isinstance(part, Image) for part in parts):
            return message_of("tool", *[one for part in parts for one in ("\n", part)][1:])
        return "\n".join(map(_named, parts))

    async def _hold(self) -> None:
        """Open the connection, set `tools` and `_client`, and hold it open until `_closing`."""
        answer = _HttpAnswer()
        _HTTP_ANSWER.set(answer)  # This task's alone.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                async with asyncio.timeout(self.server.startup_timeout_s) as startup:
                    wait_s = _SHORTEST_WAIT_S
                    while not await self._has_held(log, startup, answer, wait_s):
                        await asyncio.sleep(wait_s)
                        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            except Exception as error:  # noqa: BLE001 - raised again by the code that awaits `_ready`
                self._said = _tail_of(log)
                failure = error
                if not isinstance(error, ConfigError | EnvironmentLoadError):
                    reason = answer.trouble or _reason(error, self.server.startup_timeout_s)
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

    async def _has_held(
        self, log: IO[str], startup: asyncio.Timeout, answer: _HttpAnswer, wait_s: float
    ) -> bool:
        """Connect and hold the connection until `_closing`.

        Returns False if the server at a URL may be restarting and there is time to try again after
        `wait_s`; an error of the last try says more than that the time is over.
        """
        answer.forget()
        try:
            async with _connected(self.server, log, self._closing) as client:
                self.tools = await self._list_tools(client)
                startup.reschedule(None)
                self._client = client
                self._ready.set_result(None)
                await self._closing.wait()
        except Exception as error:
            give_up_s = startup.when()
            may_restart = answer.status in _OUTAGE or _is_refused(error)
            if not self.server.url or not may_restart or give_up_s is None:
                raise
            if self._loop.time() + wait_s >= give_up_s:
                raise
            return False
        return True

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
            "why the server ended, cannot be reached or closes its connections" + self._output()
        )

    def _output(self) -> str:
        return f". Its output:\n{self._said}" if self._said else ""


def _arguments_of(name: str, text: str) -> dict[str, JsonValue]:
    """Return the arguments of a call; raises BadArgumentsError for those that cannot be sent."""
    arguments = json_object(text or "{}")
    if arguments is None:
        raise BadArgumentsError(f"the arguments of {name} must be a JSON object, got {text!r}")
    if _is_deep(arguments):
        raise BadArgumentsError(
            f"the arguments of {name} are nested more than {_MOST_NESTED} levels deep, got "
            f"{text!r:.80}...; give flatter ones"
        )
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # the client would break off the connection of all rollouts
        raise BadArgumentsError(
            f"the arguments of {name} hold half of a surrogate pair, which is no character, "
            f"got {text!r}; give whole characters"
        ) from None
    except ValueError:  # the client would send null
        raise BadArgumentsError(
            f"the arguments of {name} hold NaN or a number beyond 64 bits, which JSON does not "
            f"have, got {text!r}; give a finite number"
        ) from None
    return arguments


def _is_deep(value: JsonValue) -> bool:
    level = [value]
    for _ in range(_MOST_NESTED):
        inside: list[JsonValue] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
        level = inside
    return bool(level)


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
                # Proxies of the variables are for servers that are elsewhere.
                trust_env=not is_on_this_machine(server.url),
                event_hooks={"response": [_note_answer]},
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


async def _note_answer(response: "httpx2.Response") -> None:
    """Note in `_HTTP_ANSWER` whether a response can be the MCP server's own answer."""
    answer = _HTTP_ANSWER.get()
    if answer is None:
        return
    kind = response.headers.get("content-type", "").lower()
    is_answer = response.status_code == 200 and kind.startswith(
        ("application/json", "text/event-stream")
    )
    # The protocol has 404 for a session that the server does not know, whatever the body says.
    is_refused = response.status_code == 401 or (
        response.status_code == _NO_SESSION and "mcp-session-id" in response.request.headers
    )
    if response.status_code >= 400 and not is_refused and kind.startswith("application/json"):
        # A server may also send an error of its own with such a status.
        body = json_object(await response.aread()) or {}
        is_answer = "jsonrpc" in body and isinstance(body.get("error"), dict)
    answer.status = 0 if is_answer else response.status_code
    answer.trouble = ""
    if not is_answer:
        answer.trouble = f"HTTP {response.status_code} {response.reason_phrase}".strip()
        if response.status_code < 300:
            answer.trouble += (
                f" with {kind.partition(';')[0] or 'no content type'}, no answer of MCP"
            )
        elif response.status_code == _NO_SESSION and is_refused:
            answer.trouble += ", the server does not know the session"


def _is_refused(error: BaseException) -> bool:
    """Return whether nobody listens at the address, now at least."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_refused, cast(BaseExceptionGroup[BaseException], error).exceptions))
    cause = error.__cause__ or error.__context__
    return isinstance(error, ConnectionRefusedError) or (cause is not None and _is_refused(cause))


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
