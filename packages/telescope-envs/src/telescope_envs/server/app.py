"""The server's routes: the registry's tree, a simple index, publishing, and changing a status.

Besides, `/` and `/environments/OWNER/NAME` are plain pages with the commands that use them.

Reads run on the event loop, because each is one small query or a cache lookup. A publication is
checked and stored in a thread. Publications of one publisher wait for each other; those of
different publishers wait only during the storing, which is one transaction. Bodies that are built
from the records are cached until the records change, so that most reads cost one small query.
"""

import asyncio
import logging
import socket
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html import escape
from http import HTTPStatus
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse
from packaging.utils import canonicalize_name
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from telescope_core.base.addresses import in_url, is_loopback
from telescope_core.base.errors import RegistryError, unknown_name
from telescope_envs.records.catalog import mark_of
from telescope_envs.records.files import sha256_of
from telescope_envs.records.release import Release, Status
from telescope_envs.registry.static_view import (
    JSON_TYPE,
    SimpleFile,
    html_page,
    project_page,
    projects_page,
    simple_files,
)
from telescope_envs.server.auth import Callers, CallerToken, Scope, refuse_token_in_address
from telescope_envs.server.connections import ConnectionLimits, Network
from telescope_envs.server.hub import API, HubStore
from telescope_envs.server.refusals import (
    Limit,
    Refusal,
    failure_of,
    refusal_of,
    shared_address,
)
from telescope_envs.server.uploads import (
    Sent,
    bounded,
    check_publication,
    check_time,
    parse_publication,
    parse_status,
    receive_publication,
)

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
    # What a thread does of a request at that moment goes on to its end.
    "the server is shutting down, and cannot say any more whether this was stored",
    "try again later; it is safe to publish the same release twice",
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

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
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

    def _check(self, scope: AsgiScope) -> None:
        client = scope.get("client")
        self._reads.take(shared_address(client[0] if client else ""))
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


_READ = ["GET", "HEAD"]
_HTML = "text/html; charset=utf-8"
_JSON_TYPES = (JSON_TYPE, "application/vnd.pypi.simple.latest+json")
_MEDIA_TYPES = {
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "toml": "application/toml",
    "txt": "text/plain; charset=utf-8",
}
_SENT_AT_ONCE_BYTES = 1024 * 1024
_MAX_STATUS_BYTES = 64 * 1024
_STATUS_ARRIVES_WITHIN_S = 60.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options for serving a hub."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    public_address: str = ""
    """The URL at which people reach it; empty if that is where it listens."""
    is_private: bool = False
    """Whether reading also needs a token."""
    max_wheel_bytes: int = 50 * 1024 * 1024
    reads_per_minute: int = 6000
    """Limit per client address; 0 means no limit."""
    publishes_per_hour: int = 120
    """Limit per token, including changes of status; 0 means no limit."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    proxies: tuple[Network, ...] = ()
    """Addresses of trusted proxies, whose X-Forwarded-For and X-Forwarded-Proto are used."""


class HubApp:
    """The ASGI application: answers requests with the records and wheels of `hub`."""

    def __init__(self, hub: HubStore, options: ServerOptions) -> None:
        self.hub = hub
        self.options = options
        self.callers = Callers(hub.database, is_private=options.is_private)
        self.answers = Answers(lambda: hub.changes, is_private=options.is_private)
        self._publishes = Limit("publications of one token", options.publishes_per_hour, 3600.0)
        self._publishing: defaultdict[object, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Owners of a token, or its id -> lock that is held while one of its uploads is
        inspected."""

    async def tree(self, request: Request, path: str) -> Response:
        """Return a file of the registry's tree."""
        self.callers.reader(request)
        if path.startswith("artifacts/"):
            found = self._artifact(request, path)
        else:
            media_type = _MEDIA_TYPES.get(path.rpartition(".")[2], "application/octet-stream")
            # The slash tells it from what is kept of pages, which have addresses.
            found = self.answers.answer(request, f"/{path}", lambda: self._file(path, media_type))
        if found is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND, f"there is nothing at {path!r}", "start from the front page"
            )
        return found

    async def simple(self, request: Request, project: str = "") -> Response:
        """Return the list of distributions, or of the wheels of `project`: HTML, or JSON."""
        self.callers.reader(request)
        name = canonicalize_name(project)
        has_slash = request.url.path.endswith("/")
        if name != project or not has_slash:
            # Relative, because a proxy may serve this below a path of its own, and with a dot in
            # front, because a name such as `https:example.org` would be an address.
            there = f"{'..' if has_slash else '.'}/{name or 'simple'}/"
            return RedirectResponse(there, HTTPStatus.MOVED_PERMANENTLY)
        accepted = request.headers.get("accept", "")
        is_json = any(kind in accepted for kind in _JSON_TYPES)

        def build() -> tuple[bytes, str] | None:
            if name:
                found = self.hub.releases.environment_of(name)
                if found is None:
                    return None
                files = self._simple_files(found)
                text = project_page(name, files, is_json=is_json)
            else:
                text = projects_page(self.hub.releases.distributions(), is_json=is_json)
            return text.encode(), JSON_TYPE if is_json else _HTML

        found = self.answers.answer(request, f"simple/{name}/ {is_json}", build)
        if found is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"this registry has no distribution {project!r}",
                "install other packages from your package index",
            )
        return found

    async def front_page(self, request: Request) -> Response:
        """Return a page for people that lists the environments."""
        self.callers.reader(request)
        address = self._address_in(request)

        def build() -> tuple[bytes, str]:
            lines = [_command(f"telescope env search --registry {address}")]
            for row in self.hub.catalog():
                mark = f" {mark_of(row.deprecated)}" if row.deprecated else ""
                lines.append(
                    f'<p><a href="environments/{quote(row.id)}">{escape(row.id)}</a> '
                    f"{escape(row.version + mark)}: {escape(row.summary)}</p>"
                )
            if len(lines) == 1:
                lines.append("<p>Nothing is published yet.</p>")
            return html_page(self.hub.name, lines).encode(), _HTML

        return self.answers.answer(request, address, build) or Response()

    async def environment_page(self, request: Request, owner: str, name: str) -> Response:
        """Return a page for people: how to install one environment, and a list of its wheels."""
        self.callers.reader(request)
        environment_id, address = f"{owner}/{name}", self._address_in(request)

        def build() -> tuple[bytes, str]:
            self.hub.require_served(environment_id)
            rows = {row.id: row for row in self.hub.catalog()}
            if environment_id not in rows:
                unknown = str(unknown_name("environment", environment_id, rows))
                raise Refusal(HTTPStatus.NOT_FOUND, unknown, "look for it in the list")
            status = self.hub.releases.status(environment_id)
            row, notes = rows[environment_id], [f"Advisory: {text}" for text in status.advisories]
            if row.deprecated:
                notes.append(f"Deprecated: {row.deprecated}")
            lines = [f"<p>{escape(text)}</p>" for text in (row.summary, *notes)]
            lines += [
                _command(f"telescope env {verb} {environment_id} --registry {address}")
                for verb in ("install", "info")
            ]
            for file in reversed(self._simple_files(environment_id)):
                mark = f" (yanked: {file.yanked})" if file.yanked is not None else ""
                wheel = file.release.wheel
                lines.append(
                    f'<p><a href="{escape(file.url)}">{escape(wheel.filename)}</a>'
                    f"{escape(mark)}<br>sha256 {escape(wheel.sha256)}</p>"
                )
            return html_page(environment_id, lines).encode(), _HTML

        key = f"{address}/environments/{environment_id}"
        return self.answers.answer(request, key, build) or Response()

    async def publish(self, request: Request) -> Response:
        """Store the release and its files from a multipart request."""
        token = self._writer(request)
        limit = self.options.max_wheel_bytes
        sent = await receive_publication(request, max_wheel_bytes=limit)
        async with self._publishing[token.owners or token.id]:
            release, is_new = await asyncio.to_thread(self._store, sent, token)
        done = "published" if is_new else "already published"
        log.info("%s %s: %s by token %s", release.id, release.version, done, token.id)
        return JSONResponse(
            {
                "id": release.id,
                "version": release.version,
                "sha256": release.wheel.sha256,
                "published": is_new,
            },
            status_code=HTTPStatus.CREATED if is_new else HTTPStatus.OK,
        )

    async def change_status(self, request: Request, owner: str, name: str) -> Response:
        """Replace a status record if the caller's If-Match names the current one."""
        token = self._writer(request)
        self.callers.again(token, owner)
        # A proxy that compresses answers marks their tags as weak.
        expected = request.headers.get("if-match", "").removeprefix("W/")
        if not expected:
            raise Refusal(
                HTTPStatus.PRECONDITION_REQUIRED,
                "the request has no If-Match header",
                f"read status/{owner}/{name}.json and send its ETag as If-Match",
            )
        body = await _short_body(request)
        wanted = parse_status(body)

        def change(_: Status, record: bytes) -> Status:
            if etag_of(record) != expected:
                raise Refusal(
                    HTTPStatus.PRECONDITION_FAILED,
                    "somebody else changed the status in the meantime",
                    "read it again, change the new record, and send its ETag",
                )
            return wanted

        await asyncio.to_thread(
            self.hub.releases.change_status,
            f"{owner}/{name}",
            change,
            allow=lambda: self.callers.again(token, owner),
        )
        log.info("%s/%s: status changed by token %s", owner, name, token.id)
        record = self.hub.releases.status_record(f"{owner}/{name}") or b""
        headers = {"ETag": etag_of(record)}
        return Response(record, media_type="application/json", headers=headers)

    async def about_token(self, request: Request, publishes: str = "") -> dict[str, object]:
        """Return label, scope, owners and end of the request's token.

        Refuses a token that may not publish as the owner `publishes`, if one is given.
        """
        token = self.callers.of(request, Scope.PUBLISH if publishes else Scope.READ)
        if publishes:
            self.callers.again(token, publishes)
        return {
            "id": token.id,
            "label": token.label,
            "scope": token.scope.value,
            "owners": list(token.owners),
            "expires_at": token.expires_at.isoformat(),
        }

    def _writer(self, request: Request) -> CallerToken:
        token = self.callers.of(request, Scope.PUBLISH)
        self._publishes.take(token.id)
        return token

    def _store(self, sent: Sent, token: CallerToken) -> tuple[Release, bool]:
        """Return the sent release, and whether it is new."""
        is_admin = token.includes(Scope.ADMIN)
        publication = parse_publication(sent)
        release, owner = publication.release, publication.release.owner
        self.callers.again(token, owner)
        check_publication(publication)
        if not is_admin:
            check_time(release)
            # All that a token for the owner proves is that the owner published it.
            publication = replace(publication, release=release.changed(publisher=owner))
        is_new = self.hub.releases.add(
            publication, allow=lambda: self.callers.again(token, owner), may_be_near=is_admin
        )
        return release, is_new

    def _simple_files(self, environment_id: str) -> list[SimpleFile]:
        self.hub.require_served(environment_id)
        releases = self.hub.releases.all_of(environment_id)
        status = self.hub.releases.status(environment_id)
        return simple_files(releases, status, to_root="../../", has_metadata=True)

    def _address_in(self, request: Request) -> str:
        """Return the address as a user gives it to `--registry`.

        It is never the Host of the request, because its sender would then choose what others copy.
        """
        host, port = request.scope["server"]
        root = request.scope.get("root_path", "")
        return self.options.public_address or f"{request.url.scheme}://{in_url(host)}:{port}{root}"

    def _file(self, path: str, media_type: str) -> tuple[bytes, str] | None:
        found = self.hub.read(path)
        return (found, media_type) if found is not None else None

    def _artifact(self, request: Request, path: str) -> Response | None:
        found = self.hub.stored_artifact(path)
        if found is None:
            return None
        shared = "private" if self.options.is_private else "public"
        headers = {
            "ETag": f'"{found.sha256}"',
            "Cache-Control": f"{shared}, max-age=31536000, immutable",
        }
        if is_known(request, headers["ETag"]):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        media_type = "application/octet-stream"
        if found.size > _SENT_AT_ONCE_BYTES or "range" in request.headers:
            # Looked for here, so that one that is lost is told as any other failure of the disk.
            about = found.path.stat()
            return FileResponse(
                found.path, media_type=media_type, headers=headers, stat_result=about
            )
        return Response(found.path.read_bytes(), media_type=media_type, headers=headers)


def create_app(hub: HubStore, options: ServerOptions) -> FastAPI:
    """Return the application that serves `hub`."""
    served = HubApp(hub, options)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_api_route(f"/{API}/releases", served.publish, methods=["POST"])
    app.add_api_route(f"/{API}/status/{{owner}}/{{name}}", served.change_status, methods=["PUT"])
    app.add_api_route(f"/{API}/token", served.about_token)
    app.add_api_route("/", served.front_page, methods=_READ)
    app.add_api_route("/environments/{owner}/{name}", served.environment_page, methods=_READ)
    for path in ("/simple", "/simple/", "/simple/{project}", "/simple/{project}/"):
        app.add_api_route(path, served.simple, methods=_READ)
    app.add_api_route("/{path:path}", served.tree, methods=_READ)

    async def refused(request: Request, error: Exception) -> Response:
        return refuse(_refusal(request, error))

    for kind in (RegistryError, HTTPException, RequestValidationError, OSError, sqlite3.Error):
        app.add_exception_handler(kind, refused)
    app.add_middleware(
        Guard,
        reads=Limit("requests", options.reads_per_minute, 60.0),
        names=host_names(options.host, options.public_address),
    )
    return app


def _command(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _refusal(request: Request, error: Exception) -> Refusal:
    if isinstance(error, RegistryError):
        return refusal_of(error)
    if isinstance(error, OSError | sqlite3.Error):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return failure_of(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        problem = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        return Refusal(HTTPStatus.BAD_REQUEST, problem, "correct the request")
    status = HTTPStatus(error.status_code if isinstance(error, HTTPException) else 500)
    problem = f"{request.method} {request.url.path}: {status.phrase}"
    return Refusal(status, problem, "see the front page for what is available")


async def _short_body(request: Request) -> bytes:
    too_long = Refusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the status record is longer than {_MAX_STATUS_BYTES} bytes",
        "shorten its texts",
    )
    try:
        async with asyncio.timeout(_STATUS_ARRIVES_WITHIN_S):
            return b"".join([part async for part in bounded(request, _MAX_STATUS_BYTES, too_long)])
    except TimeoutError:
        raise Refusal(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the status record did not arrive within {_STATUS_ARRIVES_WITHIN_S:g} s",
            "send it again; nothing was changed",
        ) from None
