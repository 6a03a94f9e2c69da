"""HTTP responses of the server: strong ETags, conditional requests, errors as JSON.

Bodies built from the records are cached until the records change, so that most reads cost one small
query.
"""

import hashlib
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from telescope_envs.server.refusal import Refusal

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
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def is_known(request: Request, etag: str) -> bool:
    """Whether the caller says that it already has the body with that ETag."""
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
