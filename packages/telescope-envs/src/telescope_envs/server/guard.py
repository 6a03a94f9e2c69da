"""What holds for every request: limits, no tokens in addresses, headers that keep browsers safe."""

import asyncio
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telescope_envs.server.answers import refuse
from telescope_envs.server.callers import refuse_token_in_address
from telescope_envs.server.limits import Limit
from telescope_envs.server.refusal import Refusal

_HEADERS = (
    # Nothing but the one style sheet of the server itself: no script can run, wherever from.
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
    HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending; nothing was stored", "try again later"
)
_MAX_ADDRESS_BYTES = 4096


class Guard:
    """Wraps the application; `reads` counts requests of each client address."""

    def __init__(self, app: ASGIApp, reads: Limit) -> None:
        self._app = app
        self._reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on; either way the answer gets the headers."""
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
            # Requests are cancelled only where the server ends and they have used up their time.
            if not has_begun:
                await refuse(_ENDING)(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        client = scope.get("client")
        self._reads.take(client[0] if client else "")
        path, query = scope["path"], scope["query_string"].decode("latin-1")
        if len(path) + len(query) > _MAX_ADDRESS_BYTES:
            raise Refusal(
                HTTPStatus.REQUEST_URI_TOO_LONG,
                f"the address is longer than {_MAX_ADDRESS_BYTES} bytes",
                "shorten the search",
            )
        refuse_token_in_address(path, query)
