"""Access control: the token, Host and Origin of requests, and limits for browsers.

A page of another site can make a browser send requests to loopback addresses, and can make a host
name of its own point there. Neither kind of request gets an answer.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telescope_core.base.addresses import LOOPBACK_HOSTS, is_loopback
from telescope_core.base.errors import ConfigError
from telescope_ui.base.answers import error_response

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self'; base-uri 'self'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_A_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_NO_TOKEN_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Telescope: who are you?</title>
<h1>This page needs its token</h1>
<p>These runs are shown only to who started <code>telescope ui</code>.
<p>Run this in a terminal on the machine of the server, and open the address that it prints:
<pre>telescope ui</pre>
<p>If the server still runs, this prints its address, and starts nothing new. Your browser then
keeps the token until it is closed, and this address opens the page that you asked for.
"""
MAX_TARGET_BYTES = 200_000
"""Length of an address."""


class Guard:
    """Wraps an application: passes on only requests with the token, from our own pages."""

    def __init__(
        self, app: ASGIApp, *, token: str, host: str, allowed_hosts: Collection[str] = ()
    ) -> None:
        """`host` is the address that the server listens on.

        `allowed_hosts` are names by which a proxy of the user passes requests on, over https or
        not. Raises ConfigError for anything else than a name.
        """
        for name in allowed_hosts:
            if not _A_NAME.fullmatch(name):
                raise ConfigError(
                    "--allowed-host: expected the name of a host, such as ui.example.org, without "
                    f"https://, port and path, got {name!r}"
                )
        self._app = app
        self._token = token.encode()
        # Cookies do not know ports: two servers must not take each other's.
        self._cookie = f"telescope-ui-{hashlib.sha256(self._token).hexdigest()[:12]}"
        self._is_loopback = is_loopback(host)
        names = () if self._is_loopback else (host, socket.gethostname(), socket.getfqdn())
        self._allowed = {name.lower() for name in allowed_hosts}
        self._names = {name.lower() for name in (*LOOPBACK_HOSTS, *names)} | self._allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A websocket that is not accepted is closed; nothing here speaks that.
            await send({"type": "websocket.close", "code": 1008})
            return
        refused = self._refusal(scope)
        if refused is not None:
            await refused(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] != "GET":
            answer = error_response(
                405, f"expected GET, got {scope['method']}; nothing can be changed here"
            )
            answer.headers["allow"] = "GET"
            return answer
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_TARGET_BYTES:
            return error_response(400, f"the address is longer than {MAX_TARGET_BYTES} bytes")
        host = headers.get("host", "")
        if not self._is_ours(host):
            return error_response(
                403,
                f"expected a name of this machine as Host, got {host!r}; "
                "open the address that telescope ui printed",
            )
        if not self._is_from_here(headers, host):
            return error_response(
                403,
                "the request comes from another site; open the address in a tab of its own",
            )
        return self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in pairs if name == "token"]
        if given:
            if not self._is_token(given[0]):
                return _no_token(headers)
            kept = urlencode([pair for pair in pairs if pair[0] != "token"], encoding="utf-8")
            path = quote(scope["raw_path"].decode("latin-1"), safe="/%:@!$&'()*+,;=~-._")
            # A path of two slashes would lead to another host.
            place = "/" + path.lstrip("/") + (f"?{kept}" if kept else "")
            answer = RedirectResponse(place, status_code=303)
            answer.set_cookie(
                self._cookie, self._token.decode(), httponly=True, samesite="strict", path="/"
            )
            return answer
        kind, _, value = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(value.strip()):
            return None
        # SimpleCookie drops all if it cannot read one, which may be of any program at this host.
        if self._is_token(cookie_parser(headers.get("cookie", "")).get(self._cookie, "")):
            return None
        return _no_token(headers)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._token)

    def _is_ours(self, host: str) -> bool:
        if not host or any(character in host for character in "/@?#\\ "):
            return False
        name = _name_in(host)
        # An address is no name that somebody else could point here.
        return name in self._names or (not self._is_loopback and _is_address(name))

    def _is_from_here(self, headers: Headers, host: str) -> bool:
        """Return whether a browser reports that one of our pages, or a person, sent the request."""
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return False
        origin = headers.get("origin")
        if origin is None or origin == f"http://{host}":
            return True
        return _name_in(host) in self._allowed and origin == f"https://{host}"


def _name_in(host: str) -> str:
    """Return the name in a Host header, without the port; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _no_token(headers: Headers) -> Response:
    # A browser tab asks for HTML; the pages themselves ask for JSON.
    if "text/html" in headers.get("accept", ""):
        return Response(_NO_TOKEN_PAGE, status_code=401, media_type="text/html")
    return error_response(
        401,
        "expected the token: open the address with ?token= that telescope ui printed, or send it "
        "as `Authorization: Bearer TOKEN`",
    )


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            known: Sequence[tuple[bytes, bytes]] = message.get("headers", [])
            names = {name.lower() for name, _ in known}
            usual = {**_HEADERS, "cache-control": "no-store"}
            # An answer that has one of them has a stricter one.
            added = [
                (name.encode(), value.encode())
                for name, value in usual.items()
                if name.encode() not in names
            ]
            message = {**message, "headers": [*known, *added]}
        await send(message)

    return wrapped
