"""`ChatServer`: an HTTP server that answers in OpenAI's format, whatever bytes it receives.

Errors of requests to Anthropic's Messages API have its format. The routes that it is given decide
which rollout a request belongs to, and which policy answers it.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from telescope_core.base.addresses import in_url
from telescope_core.base.errors import (
    ConfigError,
    ContextLengthError,
    EndpointAccessError,
    EndpointError,
)
from telescope_core.base.messages import without_halves
from telescope_core.base.retries import says_too_long
from telescope_core.base.types import Completion, Message, ToolCall
from telescope_core.gateway.anthropic_reply import error_json
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import ChatRequest

DONE = b"data: [DONE]\n\n"


def reply_json(completion: Completion, *, model: str) -> dict[str, Any]:
    """Return the body of an answer without streaming."""
    choice = {
        "index": 0,
        "message": _message(completion.message),
        "logprobs": _logprobs(completion),
        "finish_reason": completion.finish_reason,
    }
    head = _head(completion, "chat.completion", model)
    return {**head, "choices": [choice], "usage": _usage(completion)}


def event_stream(completion: Completion, *, model: str, include_usage: bool) -> bytes:
    """Return the same answer as the events of a stream, including its end mark."""
    head = _head(completion, "chat.completion.chunk", model)
    if include_usage:
        head["usage"] = None
    chunks = [
        {
            **head,
            "choices": [
                {
                    "index": 0,
                    "delta": delta,
                    "logprobs": _logprobs(completion) if reason else None,
                    "finish_reason": reason,
                }
            ],
        }
        for delta, reason in _deltas(completion)
    ]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(completion)})
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + DONE


def _head(completion: Completion, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"weights-{completion.oldest_version}-{completion.newest_version}",
    }


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "role": "assistant",
        # In a turn of calls alone, the content is null, as in OpenAI's API.
        "content": message.content or (None if message.tool_calls else ""),
    }
    # No null in place of a missing field: some clients send what they do not know back to us.
    if message.refusal:
        fields["refusal"] = message.refusal
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    return fields


def _logprobs(completion: Completion) -> msgspec.Raw | None:
    return msgspec.Raw(completion.logprobs_json) if completion.logprobs_json else None


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _deltas(completion: Completion) -> Iterator[tuple[dict[str, Any], str | None]]:
    message = completion.message
    yield {"role": "assistant", "content": None if message.tool_calls else ""}, None
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}, None
    if message.content:
        yield {"content": message.content}, None
    if message.refusal:
        yield {"refusal": message.refusal}, None
    for number, call in enumerate(message.tool_calls):
        opening = {"index": number, "id": call.id, "type": "function"}
        yield (
            {"tool_calls": [{**opening, "function": {"name": call.name, "arguments": ""}}]},
            None,
        )
        arguments = {"index": number, "function": {"arguments": call.arguments}}
        yield {"tool_calls": [arguments]}, None
    yield {}, completion.finish_reason


def _usage(completion: Completion) -> dict[str, Any] | None:
    if not completion.is_counted:
        return None
    usage: dict[str, Any] = {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_completion_tokens,
        "total_tokens": completion.num_prompt_tokens + completion.num_completion_tokens,
    }
    if completion.num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": completion.num_cached_tokens}
    if completion.num_reasoning_tokens is not None:
        thinking = {"reasoning_tokens": completion.num_reasoning_tokens}
        usage["completion_tokens_details"] = thinking
    return usage


# aiohttp's own limit is 1 MiB, which the history of a long agent run can exceed.
MAX_REQUEST_BYTES = 64 * 2**20
"""Largest body of a request."""
MAX_SECONDS_IDLE = 60.0
"""Seconds without a request after which a connection is closed, and the limit for reading a
body."""
_MOST_READ_AT_ONCE_BYTES = 2**18
"""Larger requests are parsed in a thread, because the event loop plays every other rollout."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = tuple[str, str, _Handler]
"""Method, path as aiohttp writes it, and handler."""
_ON_REFUSAL = web.AppKey[Callable[[web.Request, Refusal], None]]("on_refusal")


class ChatServer:
    """Listens on one port. It belongs to the event loop that started it."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        on_refusal: Callable[[web.Request, Refusal], None] = lambda request, refusal: None,
    ) -> None:
        """`port` 0 = a free one. A handler may raise Refusal; `on_refusal` gets each one."""
        self._routes = routes
        self._on_refusal = on_refusal
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """`http://HOST:PORT`; the port is known once the server has started."""
        return f"http://{in_url(self._host)}:{self._port}"

    async def start(self) -> None:
        """Begin to listen; raises ConfigError if the address is not available."""
        app = web.Application(middlewares=[_as_api_errors], client_max_size=MAX_REQUEST_BYTES)
        app[_ON_REFUSAL] = self._on_refusal
        for method, path, handler in (*self._routes, ("*", "/{anything:.*}", _elsewhere)):
            app.router.add_route(method, path, handler, expect_handler=_go_on)
        # By default aiohttp lets a handler go on after its client has gone away, and the server
        # would sample for nobody. Canceling the handler also cancels its request to the server.
        # By default it also waits up to 60 s for handlers in progress when it shuts down. Who
        # closes this server has ended what they wait for, so they need no time.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None, "it is set up"
        manager, loop = self._runner.server, asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                lambda: _Connection(manager, loop=loop), self._host, self._port
            )
        except OSError as error:
            raise ConfigError(
                f"the gateway cannot listen on {in_url(self._host)}:{self._port} "
                f"({error.strerror}); set "
                "gateway_host to an address of this machine, and gateway_port to a free port or 0"
            ) from None
        # Port 0 makes the operating system choose one, which is known only now.
        self._port = self._listening.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and close every connection. Idempotent."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class _Connection(web.RequestHandler):
    """One connection. It is closed if no request comes, and bytes that are no HTTP get an error."""

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # pyright: ignore[reportArgumentType] - aiohttp: none is written
            keepalive_timeout=MAX_SECONDS_IDLE,
            # Bytes that a client sends after it was refused are not read.
            lingering_time=0.0,
        )
        # aiohttp closes those that have had a request, and only from 3.14 on the others.
        self.silent = loop.call_later(MAX_SECONDS_IDLE, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.silent.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        refusal = Refusal(f"this is not HTTP: {message}", code="invalid_http", status=status)
        return _refuse(request, refusal, and_close=True)


async def read_chat(request: web.Request, read: Callable[[object], ChatRequest]) -> ChatRequest:
    """Return the result of `read` for the JSON of `request`; raises Refusal."""
    if (request.content_length or 0) > MAX_REQUEST_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(MAX_SECONDS_IDLE):
            body = await request.read()
    except TimeoutError:
        raise Refusal(
            f"the request did not come within {MAX_SECONDS_IDLE:g} s",
            code="request_timeout",
            status=408,
        ) from None

    def parsed(content: bytes) -> ChatRequest:
        try:
            return read(msgspec.json.decode(content))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if (mended := without_halves(content)) is not None:
                return parsed(mended)
            raise Refusal(f"the request is not JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise Refusal("the request is nested too deep", code="invalid_json") from None

    if len(body) > _MOST_READ_AT_ONCE_BYTES:
        return await asyncio.to_thread(parsed, body)
    return parsed(body)


def answer_chat(completion: Completion, asked: ChatRequest, *, model: str) -> web.Response:
    """Build the answer to `asked`, as a stream if it asked for one.

    Tokens arrive all at once when the turn is complete, so a stream is sent as one body.
    """
    if asked.stream:
        events = event_stream(completion, model=model, include_usage=asked.include_usage)
        return answer_events(events)
    return answer_json(reply_json(completion, model=model))


def answer_events(events: bytes) -> web.Response:
    """Build an answer that streams events."""
    return web.Response(body=events, content_type="text/event-stream")


def answer_json(body: dict[str, object], *, status: int = 200) -> web.Response:
    """Build an answer with a JSON body."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def _too_large() -> Refusal:
    text = f"the request is larger than {MAX_REQUEST_BYTES // 2**20} MiB"
    return Refusal(text, code="request_too_large", status=413)


async def _go_on(request: web.Request) -> None:
    """Ask for the body if the client waits for that; other expectations are ignored."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _elsewhere(request: web.Request) -> web.StreamResponse:
    asked = f"{request.method} {request.path.rpartition('/v1')[2] or '/'}"
    why = (
        "a program that uses another API of OpenAI (such as completions) has to be told to use "
        "chat completions"
    )
    if "/v1/v1/" in request.path:
        why = "the client adds /v1 to its address, so give it anthropic_base_url"
    elif "/v1" not in request.path:
        asked, why = f"{request.method} without /v1", "give the client base_url, which ends in /v1"
    raise Refusal(
        f"there is no {asked} here, only POST /chat/completions, /responses and /messages, and GET "
        f"/models behind the base_url of episode.endpoint; {why}",
        code="unknown_url",
        status=404,
    )


@web.middleware
async def _as_api_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    assert isinstance(request.protocol, _Connection)
    request.protocol.silent.cancel()

    def refuse(refusal: Refusal, *, and_close: bool = False) -> web.Response:
        request.app[_ON_REFUSAL](request, refusal)
        return _refuse(request, refusal, and_close=and_close)

    try:
        return await handler(request)
    except Refusal as refusal:
        # After these, the rest of the body is not read.
        return refuse(refusal, and_close=refusal.status in (408, 413))
    # OpenAI's client tries again after a 502 but not after a 400. `ContextLengthError` comes before
    # its base class `ConfigError`, because clients know OpenAI's code for a full context.
    except ContextLengthError as error:
        return refuse(Refusal(str(error), param="messages", code="context_length_exceeded"))
    except ConfigError as error:
        return refuse(Refusal(str(error), param="messages", code="invalid_value"))
    except EndpointError as error:
        if error.is_of_request or isinstance(error, EndpointAccessError):
            # Another endpoint refused the program's request.
            code = "context_length_exceeded" if says_too_long(error.answer) else "endpoint_refused"
            refusal = Refusal(str(error), code=code, status=error.status or 400)
            return refuse(refusal)
        return refuse(Refusal(str(error), code="inference_server_failed", status=502))
    except web.RequestPayloadError as error:
        refusal = Refusal(f"the body cannot be read: {error}", code="invalid_http")
        return refuse(refusal, and_close=True)
    except web.HTTPRequestEntityTooLarge:
        return refuse(_too_large())
    except web.HTTPException as error:  # a path that is none, such as that of `OPTIONS *`
        return refuse(Refusal(error.reason, code="unknown_url", status=error.status))


def _refuse(request: web.BaseRequest, refusal: Refusal, *, and_close: bool = False) -> web.Response:
    is_anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.path
    body = error_json(refusal) if is_anthropic else refusal.as_json()
    response = answer_json(body, status=refusal.status)
    if and_close:
        response.force_close()
    return response
