"""`Guard`: a server that others can reach answers nobody who does not show the secret of the run.

vLLM's own key guards only some paths: not the updates of weights, pauses, calls of workers' methods
and health, nor our token plane. This wraps the whole application, outside of all that vLLM adds.
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_BODY = msgspec.json.encode(
    {
        "error": "this server answers only who shows the secret of its run, as the header "
        "'Authorization: Bearer SECRET'"
    }
)
_POLICY_VIOLATION = 1008
"""The WebSocket close code (RFC 6455). Before the connection is accepted, it becomes HTTP 403."""


class Guard:
    """An ASGI application: `app`, for those who show the secret, on every path and method."""

    def __init__(self, app: App, secret: str) -> None:
        """`secret` is not empty."""
        self._app = app
        self._expected = f"Bearer {secret}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        # The lifespan is the server's own; whatever else there may be is refused like a request.
        if scope["type"] == "lifespan" or self._is_shown(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    def _is_shown(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        # One header: of two, another program in front may have looked at the other one. The time
        # of the comparison does not tell how much of the secret is right.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
