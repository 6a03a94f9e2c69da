"""Routes of the web pages, of the search that they share with programs, and of the simple index."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse
from packaging.utils import canonicalize_name

from telescope_core.base.addresses import in_url
from telescope_core.base.errors import unknown_name
from telescope_envs.records.catalog import CatalogRow, search
from telescope_envs.registry.static_view import (
    HTML_TYPE,
    JSON_TYPE,
    project_html,
    project_json,
    projects_html,
    projects_json,
    simple_files,
)
from telescope_envs.server.answers import Answers, Build, etag_of, is_known
from telescope_envs.server.auth import Callers
from telescope_envs.server.hub import API, HubStore
from telescope_envs.server.pages import Pages, Site
from telescope_envs.server.refusals import Refusal

_READ = ["GET", "HEAD"]
_HTML = "text/html; charset=utf-8"
_STATIC_TYPES = {"css": "text/css", "svg": "image/svg+xml"}
_MAX_OFFSET = 1_000_000
_OFFERED = {
    "text/html": "text/html; charset=utf-8",
    HTML_TYPE: HTML_TYPE,
    "application/vnd.pypi.simple.latest+html": HTML_TYPE,
    JSON_TYPE: JSON_TYPE,
    "application/vnd.pypi.simple.latest+json": JSON_TYPE,
}
"""Media types that may be requested, the default first -> media type of the response."""
Words = Annotated[str, Query(max_length=200)]
Tags = Annotated[list[str], Query(max_length=20)]


class SiteRoutes:
    """Serves the web pages, search results and the simple index."""

    def __init__(
        self, hub: HubStore, callers: Callers, answers: Answers, *, public_address: str
    ) -> None:
        self._hub = hub
        self._public_address = public_address
        self._callers = callers
        self._answers = answers
        self._pages = Pages()

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route(f"/{API}/search", self.search, methods=_READ)
        app.add_api_route("/static/{name}", self.static, methods=_READ)
        app.add_api_route("/environments/{owner}/{name}", self.environment, methods=_READ)
        app.add_api_route("/", self.front, methods=_READ)
        app.add_api_route("/simple/", self.projects, methods=_READ)
        app.add_api_route("/simple/{project}/", self.project, methods=_READ)
        app.add_api_route("/simple", self.with_slash, methods=_READ)
        app.add_api_route("/simple/{project}", self.with_slash, methods=_READ)

    async def search(
        self,
        request: Request,
        q: Words = "",
        tag: Tags = [],  # noqa: B006 - FastAPI copies it
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        offset: Annotated[int, Query(ge=0, le=_MAX_OFFSET)] = 0,
    ) -> Response:
        """Return the environments that match, best first."""
        self._callers.reader(request)
        _refuse_others(request, {"q", "tag", "limit", "offset"})

        def build() -> tuple[bytes, str]:
            found = search(self._hub.catalog(), q, tag)
            answer = {
                "total": len(found),
                "offset": offset,
                "results": found[offset : offset + limit],
            }
            return msgspec.json.encode(answer), "application/json"

        return self._found(request, f"{API}/search?{request.url.query}", build)

    async def front(
        self,
        request: Request,
        q: Words = "",
        tag: Tags = [],  # noqa: B006 - FastAPI copies it
        page: Annotated[int, Query(ge=1, le=_MAX_OFFSET)] = 1,
    ) -> Response:
        """Return the page with the list of environments."""
        self._callers.reader(request)
        _refuse_others(request, {"q", "tag", "page"})
        site = self._site(request)

        def build() -> tuple[bytes, str]:
            rows: Sequence[CatalogRow] = search(self._hub.catalog(), q, tag)
            return self._pages.front(site, rows, q=q, tags=tag, page=page), _HTML

        return self._found(request, f"{site.address}?{request.url.query}", build)

    async def environment(self, request: Request, owner: str, name: str) -> Response:
        """Return the page of one environment."""
        self._callers.reader(request)
        site, environment_id = self._site(request), f"{owner}/{name}"

        def build() -> tuple[bytes, str] | None:
            self._hub.require_served(environment_id)
            releases = self._hub.releases.all_of(environment_id)
            if not releases:
                return None
            status = self._hub.releases.status(environment_id)
            return self._pages.environment(site, releases, status), _HTML

        return self._found(request, f"{site.address}/environments/{environment_id}", build)

    async def static(self, request: Request, name: str) -> Response:
        """Return a file that the pages load; needs no token, since it reveals no records."""
        content = self._pages.static.get(name)
        if content is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"there is nothing at 'static/{name}'",
                "start from the front page",
            )
        headers = {"ETag": etag_of(content), "Cache-Control": "max-age=3600"}
        if is_known(request, headers["ETag"]):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        media_type = _STATIC_TYPES[name.rpartition(".")[2]]
        return Response(content, media_type=media_type, headers=headers)

    async def projects(self, request: Request) -> Response:
        """List the distributions."""
        self._callers.reader(request)
        media_type = negotiated(request.headers.get("accept", ""))

        def build() -> tuple[bytes, str]:
            names = self._hub.releases.distributions()
            text = projects_json(names) if media_type == JSON_TYPE else projects_html(names)
            return text.encode(), media_type

        return self._answers.answer(request, f"simple/ {media_type}", build) or Response()

    async def project(self, request: Request, project: str) -> Response:
        """List the wheels of one distribution."""
        self._callers.reader(request)
        if canonicalize_name(project) != project:
            return RedirectResponse(
                f"../{canonicalize_name(project)}/", HTTPStatus.MOVED_PERMANENTLY
            )
        media_type = negotiated(request.headers.get("accept", ""))

        def build() -> tuple[bytes, str] | None:
            environment_id = self._hub.releases.environment_of(project)
            if environment_id is None:
                return None
            self._hub.require_served(environment_id)
            files = simple_files(
                self._hub.releases.all_of(environment_id),
                self._hub.releases.status(environment_id),
                to_root="../../",
                has_metadata=True,
            )
            make = project_json if media_type == JSON_TYPE else project_html
            return make(project, files).encode(), media_type

        found = self._answers.answer(request, f"simple/{project}/ {media_type}", build)
        if found is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"this registry has no distribution {project!r}",
                "install other packages from your package index",
            )
        return found

    async def with_slash(self, request: Request) -> Response:
        """Redirect to the URL with a trailing slash, which the relative links need."""
        self._callers.reader(request)
        last = request.url.path.rpartition("/")[2]
        return RedirectResponse(f"{last}/", HTTPStatus.MOVED_PERMANENTLY)

    def problem(self, request: Request, refusal: Refusal) -> Response:
        """Return a refusal as a page."""
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        depth = max(0, path.count("/") - 1)
        site = self._site(request)
        page = self._pages.problem(site, refusal.error, refusal.what_to_do, depth=depth)
        return Response(page, media_type=_HTML, status_code=refusal.status)

    def _site(self, request: Request) -> Site:
        # Never the Host of the request: whoever sends that would choose what others copy.
        host, port = request.scope["server"]
        bound = f"{request.url.scheme}://{in_url(host)}:{port}{request.scope.get('root_path', '')}"
        address = self._public_address or bound
        return Site(name=self._hub.name, address=address, is_private=self._callers.is_private)

    def _found(self, request: Request, key: str, build: Build) -> Response:
        found = self._answers.answer(request, key, build)
        if found is None:
            names = [row.id for row in self._hub.catalog()]
            typed = "/".join(request.path_params.values())
            unknown = unknown_name("environment", typed, names)
            raise Refusal(HTTPStatus.NOT_FOUND, str(unknown), "look for it in the list")
        return found


def _refuse_others(request: Request, known: set[str]) -> None:
    """Refuse unknown query parameters, because a misspelled one would silently have no effect."""
    for name in request.query_params:
        if name not in known:
            unknown = str(unknown_name("parameter", name, known))
            raise Refusal(HTTPStatus.BAD_REQUEST, unknown, "correct the address")


def negotiated(accept: str) -> str:
    """Return the media type for an Accept header; raises Refusal (406) if none is acceptable."""
    wanted: dict[str, float] = {}
    for entry in (accept or "*/*").split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        qualities = [part[2:] for part in parameters if part.startswith("q=")]
        wanted[name.lower()] = _quality(qualities[0]) if qualities else 1.0
    best, best_quality = "", 0.0
    for offered, media_type in _OFFERED.items():
        kind = offered.partition("/")[0]
        names = (name for name in (offered, f"{kind}/*", "*/*") if name in wanted)
        quality = wanted.get(next(names, ""), 0.0)
        if quality > best_quality:
            best, best_quality = media_type, quality
    if not best:
        raise Refusal(
            HTTPStatus.NOT_ACCEPTABLE,
            f"the simple index is not available as {accept!r}",
            f"accept text/html, {HTML_TYPE} or {JSON_TYPE}",
        )
    return best


def _quality(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
