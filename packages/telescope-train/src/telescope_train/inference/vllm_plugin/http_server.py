"""vLLM's HTTP server: its guard and socket, calls made once, large frames, and slow clients."""

import asyncio
import hmac
import logging
import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import uvicorn

from telescope_train.inference.wire import (
    LIVES_PATH,
    MAX_FRAME_BYTES,
    ONCE_HEADER,
    OTHER_SERVER_STATUS,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
_LOGGER = logging.getLogger("vllm.telescope.guard")
"""Under vLLM's own, whose lines are in the log of the server."""
_NO_SECRET = (
    "this server answers only who shows the secret of its run, as the header "
    "'Authorization: Bearer SECRET'"
)
_CHALLENGE = (b"www-authenticate", b"Bearer")
_POLICY_VIOLATION = 1008
"""The WebSocket close code (RFC 6455). Before the connection is accepted, it becomes HTTP 403."""
MOST_REMEMBERED = 64
"""Most calls whose answers are kept. A caller repeats within seconds, one call at a time."""
_HEADER = ONCE_HEADER.encode()


def install(secret: str, identity: str = "") -> None:
    """Change the defaults of every server of this process; `secret`: required in requests.

    `identity`: of this life of the server. vLLM passes none of these options on.
    """
    config = uvicorn.Config

    def configured(app: Any, *arguments: Any, **options: Any) -> uvicorn.Config:
        # By default a client that does not answer a ping within 20 s is taken for dead, and a
        # driver may be busy for longer, for example while it writes a large step. A client that is
        # really gone closes its socket, or its address stops answering.
        sockets = {"ws_max_size": MAX_FRAME_BYTES, "ws_ping_timeout": None}
        guarded = Guard(app, secret, identity) if secret or identity else app
        return config(guarded, *arguments, **{**sockets, **options})

    uvicorn.Config = configured  # type: ignore[assignment,misc]


def listen_on(descriptor: int) -> None:
    """Make vLLM listen on a socket that this process inherited, in place of a new one.

    vLLM would bind the port itself, with SO_REUSEADDR and long before it listens: two servers could
    then have the same port, and one of them would answer for both.
    """
    from vllm.entrypoints.launchers.launcher import create_server_socket

    os.set_inheritable(descriptor, False)
    given = socket.socket(fileno=descriptor)

    def close_in_child() -> None:
        # An engine in a process of its own would hold the port after the death of this one.
        with suppress(OSError):
            os.close(given.detach())

    os.register_at_fork(after_in_child=close_in_child)
    launcher: Any = sys.modules[create_server_socket.__module__]
    launcher.create_server_socket = lambda *_, **__: given


class Guard:
    """An ASGI application: `app`, for callers with the secret only, on every path and method.

    vLLM's own key guards only some paths: not the updates of weights, pauses, calls of workers'
    methods and health, nor our token plane. This is outside of all that vLLM adds.

    Requests to one start of a server name its identity in the path, because its address can be
    taken over: by its own next start, and by servers of other runs.
    """

    def __init__(self, app: App, secret: str, identity: str = "") -> None:
        """`secret` empty = none is needed. `identity`: of this start of the server."""
        self._app = app
        self._secret = secret
        self._expected = f"Bearer {secret}".encode()
        self._identity = identity

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        # The lifespan is the server's own; whatever else there may be is refused like a request.
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if self._secret and not self._is_shown(scope):
            await _refuse(scope, receive, send, 401, _NO_SECRET)
            return
        path: str = scope["path"]
        if not path.startswith(LIVES_PATH):
            await self._app(scope, receive, send)
            return
        meant, _, rest = path.removeprefix(LIVES_PATH).partition("/")
        if meant != self._identity:
            why = (
                f"this is the inference server {self._identity}, and {meant} was meant: it has "
                "ended, and another run or its own next life has its address"
            )
            _LOGGER.warning("refused a request: %s", why)
            await _refuse(scope, receive, send, OTHER_SERVER_STATUS, why)
            return
        own = {**scope, "path": f"/{rest}"}
        if "raw_path" in scope:
            own["raw_path"] = scope["raw_path"].removeprefix(f"{LIVES_PATH}{meant}".encode())
        await self._app(own, receive, send)

    def _is_shown(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        # One header: of two, another program in front may have looked at the other one. The time
        # of the comparison does not tell how much of the secret is right.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _refuse(scope: Message, receive: Receive, send: Send, status: int, why: str) -> None:
    if scope["type"] != "http":
        await receive()  # websocket.connect
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        return
    headers = [(b"content-type", b"application/json"), *([_CHALLENGE] if status == 401 else [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    body = msgspec.json.encode({"error": why})
    await send({"type": "http.response.body", "body": body})


class Once:
    """An ASGI application: `app`, with numbered calls that run only once, however often repeated.

    A control call that must not run twice, such as the start of a weight update, carries a number.
    A caller without an answer sends the same number again, and gets the answer of the first call.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._calls: OrderedDict[bytes, asyncio.Task[Sequence[Message]]] = OrderedDict()

    @property
    def is_making_calls(self) -> bool:
        """Whether a numbered call is running."""
        return not all(call.done() for call in self._calls.values())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        number = dict(scope["headers"]).get(_HEADER) if scope["type"] == "http" else None
        if number is None:
            await self._app(scope, receive, send)
            return
        if number not in self._calls:
            body = await _body(receive)
            if body is None:
                return  # it was not sent as a whole, and nothing was done
            # Nothing is awaited from the second look on, so the call is begun once.
            if number not in self._calls:
                # A task of its own: the call goes on if the connection of the caller ends.
                self._calls[number] = asyncio.create_task(self._made(scope, body))
                self._forget()
        for message in await asyncio.shield(self._calls[number]):
            await send(message)

    async def _made(self, scope: Message, body: bytes) -> Sequence[Message]:
        """Run the call; returns the messages that the application sends."""
        sent: list[Message] = []
        asked = [body]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()  # a caller that never leaves
            return {"type": "http.request", "body": asked.pop(), "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return sent

    def _forget(self) -> None:
        done = [number for number, call in self._calls.items() if call.done()]
        for number in done[: max(0, len(self._calls) - MOST_REMEMBERED)]:
            del self._calls[number]


async def _body(receive: Receive) -> bytes | None:
    """Return the request's body; None if the caller disconnects before its end."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body
