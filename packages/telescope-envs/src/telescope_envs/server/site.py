"""Routes of the web pages, and of the search that the pages and programs share."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from fastapi import FastAPI, Query, Request, Response

from telescope_core.errors import unknown_name
from telescope_envs.registry.catalog import CatalogRow, search
from telescope_envs.server.answers import Answers, Build, etag_of, is_known
from telescope_envs.server.callers import Callers
from telescope_envs.server.hub import API, HubStore
from telescope_envs.server.pages import Pages, Site
from telescope_envs.server.refusal import Refusal

_READ = ["GET", "HEAD"]
_HTML = "text/html; charset=utf-8"
_STATIC_TYPES = {"css": "text/css", "svg": "image/svg+xml"}
_MAX_OFFSET = 1_000_000
Words = Annotated[str, Query(max_length=200)]
Tags = Annotated[list[str], Query(max_length=20)]


class SiteRoutes:
    """Serves the web pages and search results."""

    def __init__(self, hub: HubStore, callers: Callers, answers: Answers) -> None:
        self._hub = hub
        self._callers = callers
        self._answers = answers
        self._pages = Pages()

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route(f"/{API}/search", self.search, methods=_READ)
        app.add_api_route("/static/{name}", self.static, methods=_READ)
        app.add_api_route("/environments/{owner}/{name}", self.environment, methods=_READ)
        app.add_api_route("/", self.front, methods=_READ)

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

    def problem(self, request: Request, refusal: Refusal) -> Response:
        """Return a refusal as a page."""
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        depth = max(0, path.count("/") - 1)
        site = self._site(request)
        page = self._pages.problem(site, refusal.error, refusal.what_to_do, depth=depth)
        return Response(page, media_type=_HTML, status_code=refusal.status)

    def _site(self, request: Request) -> Site:
        address = str(request.base_url).rstrip("/")
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
