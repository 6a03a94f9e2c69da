"""HTTP responses of the server: strong ETags, conditional requests, errors, security headers.

Bodies built from the records are cached until the records change, so that most reads cost one small
query.
"""

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telescope_core.base.addresses import is_loopback
from telescope_envs.records.files import sha256_of
from telescope_envs.server.auth import refuse_token_in_address
from telescope_envs.server.refusals import Limit, Refusal

_MAX_KEPT = 4096
"""Largest number of cached bodies; beyond it the cache is emptied."""


class Body(NamedTuple):
    """The response body for one URL."""

    content: bytes
    media_type: str
    etag: str


Build = Callable[[], tuple[bytes, str] | None]
"""Builds (content, media type); None if there is nothing at the URL."""


class Answers:
    """Builds each body once per state of the records; `state` returns a value per state."""

    def __init__(self, state: Callable[[], str], *, is_private: bool) -> None:
        self._state = state
        self._built_at = ""
        self._bodies: dict[str, Body] = {}
        # With `no-cache`, clients may keep a copy but must revalidate it; ETags make that cheap.
        self._caching = "private, no-cache" if is_private else "no-cache"

    def answer(self, request: Request, key: str, build: Build) -> Response | None:
        """Return the response with the body that `build` makes; None if it makes none.

        `key` identifies the body in the cache.
        """
        state = self._state()
        if state != self._built_at or len(self._bodies) > _MAX_KEPT:
            self._bodies, self._built_at = {}, state
        body = self._bodies.get(key)
        if body is None:
            built = build()
            if built is None:
                return None
            body = Body(*built, etag_of(built[0]))
            self._bodies[key] = body
        headers = {"ETag": body.etag, "Cache-Control": self._caching, "Vary": "Accept"}
        if is_known(request, body.etag):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(body.content, media_type=body.media_type, headers=headers)


def etag_of(content: bytes) -> str:
    """Return the strong ETag of `content`."""
    return f'"{sha256_of(content)[:32]}"'


def is_known(request: Request, etag: str) -> bool:
    """Return whether the caller already has the body with that ETag."""
    sent = request.headers.get("if-none-match", "")
    known = {entry.strip().removeprefix("W/") for entry in sent.split(",")}
    return etag in known or "*" in known


def refuse(refusal: Refusal) -> JSONResponse:
    """Return a refusal as a JSON response `{error, what_to_do}`."""
    headers: dict[str, str] = {}
    if refusal.status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="registry", Basic realm="registry"'
    if refusal.status is HTTPStatus.TOO_MANY_REQUESTS:
        headers["Retry-After"] = "60"
    content = {"error": refusal.error, "what_to_do": refusal.what_to_do}
    return JSONResponse(content, status_code=refusal.status, headers=headers)


_HEADERS = (
    # Pages load nothing, and no script can run.
    (
        b"content-security-policy",
        b"default-src 'none'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
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


def host_names(host: str, public_address: str) -> frozenset[str]:
    """Return the names for requests to a server that listens on `host`, in lower case.

    Otherwise a web page elsewhere could give this machine a name of its own and let the browser of
    an authorized reader read everything.
    """
    names = {"localhost", host, urlsplit(public_address).hostname or ""}
    if not is_loopback(host):
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in names if name)


class Guard:
    """Wraps the application; `reads` limits the requests of each client address.

    The host of a request must be one of `names` or an IP address, which nobody can point elsewhere.
    """

    def __init__(self, app: ASGIApp, reads: Limit, names: frozenset[str]) -> None:
        self._app = app
        self._reads = reads
        self._names = names

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
                "shorten it",
            )
        refuse_token_in_address(path, query)
        for name, value in scope["headers"]:
            if name == b"host":
                self._check_host(value.decode("latin-1"))

    def _check_host(self, host: str) -> None:
        is_plain = not any(character in host for character in "/@?#\\ ")
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            is_ours = is_plain and (name in self._names or bool(ip_address(name)))
        except ValueError:
            is_ours = False
        if not is_ours:
            raise Refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"this registry is not at the host {host!r}",
                "ask for it by the address that its owner gave; whoever runs it names that with "
                "telescope hub serve --public-address",
            )
