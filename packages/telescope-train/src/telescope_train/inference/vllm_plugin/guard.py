"""`Guard`: a server answers only requests with the secret of its run and its identity.

vLLM's own key guards only some paths: not the updates of weights, pauses, calls of workers' methods
and health, nor our token plane. This wraps the whole application, outside of all that vLLM adds.

Requests to one life of a server name it in the path. Addresses can be taken over by others: by the
server's own next life, and by servers of other runs.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from telescope_train.inference.wire import LIVES_PATH, OTHER_SERVER_STATUS

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


class Guard:
    """An ASGI application: `app`, for callers with the secret only, on every path and method."""

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
