"""Checks and headers for every request: rate limits, no tokens in URLs, security headers."""

import asyncio
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telescope_envs.server.answers import refuse
from telescope_envs.server.callers import refuse_token_in_address
from telescope_envs.server.limits import Limit
from telescope_envs.server.refusal import Refusal

_HEADERS = (
    # Only the server's own style sheet and images may load; no script can run.
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
        b"base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)
_ENDING = Refusal(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "the server is shutting down; nothing was stored",
    "try again later",
)
_MAX_ADDRESS_BYTES = 4096


class Guard:
    """Wraps the application; `reads` limits the requests of each client address."""

    def __init__(self, app: ASGIApp, reads: Limit) -> None:
        self._app = app
        self._reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request or pass it on; either way the response gets the headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        try:
            self._check(scope)
        except Refusal as refusal:
            await refuse(refusal)(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            # Requests are cancelled only when the server shuts down and their grace time is over.
            if not has_begun:
                await refuse(_ENDING)(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        client = scope.get("client")
        self._reads.take(client[0] if client else "")
        path, query = scope["path"], scope["query_string"].decode("latin-1")
        if len(path) + len(query) > _MAX_ADDRESS_BYTES:
            raise Refusal(
                HTTPStatus.REQUEST_URI_TOO_LONG,
                f"the URL is longer than {_MAX_ADDRESS_BYTES} bytes",
                "shorten the search",
            )
        refuse_token_in_address(path, query)
