"""Serves the simple index for plain pip and uv, as HTML (PEP 503) or JSON (PEP 691).

The pages are rendered by `registry.render`, like those of a static registry.
"""

from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from telescope_envs.registry.names import plain
from telescope_envs.registry.render import (
    HTML_TYPE,
    JSON_TYPE,
    project_html,
    project_json,
    projects_html,
    projects_json,
    simple_files,
)
from telescope_envs.server.answers import Answers
from telescope_envs.server.callers import Callers
from telescope_envs.server.hub import HubStore
from telescope_envs.server.refusal import Refusal

_READ = ["GET", "HEAD"]
_OFFERED = {
    "text/html": "text/html; charset=utf-8",
    HTML_TYPE: HTML_TYPE,
    "application/vnd.pypi.simple.latest+html": HTML_TYPE,
    JSON_TYPE: JSON_TYPE,
    "application/vnd.pypi.simple.latest+json": JSON_TYPE,
}
"""Media types that may be requested, the default first -> media type of the response."""


class SimpleRoutes:
    """Serves the pages below `simple/`."""

    def __init__(self, hub: HubStore, callers: Callers, answers: Answers) -> None:
        self._hub = hub
        self._callers = callers
        self._answers = answers

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/simple/", self.projects, methods=_READ)
        app.add_api_route("/simple/{project}/", self.project, methods=_READ)
        app.add_api_route("/simple", self.with_slash, methods=_READ)
        app.add_api_route("/simple/{project}", self.with_slash, methods=_READ)

    async def projects(self, request: Request) -> Response:
        """List the distributions."""
        self._callers.reader(request)
        media_type = negotiated(request.headers.get("accept", ""))

        def build() -> tuple[bytes, str]:
            names = list(self._hub.releases.distributions())
            text = projects_json(names) if media_type == JSON_TYPE else projects_html(names)
            return text.encode(), media_type

        return self._answers.answer(request, f"simple/ {media_type}", build) or Response()

    async def project(self, request: Request, project: str) -> Response:
        """List the wheels of one distribution."""
        self._callers.reader(request)
        if plain(project) != project:
            return RedirectResponse(f"../{plain(project)}/", HTTPStatus.MOVED_PERMANENTLY)
        media_type = negotiated(request.headers.get("accept", ""))

        def build() -> tuple[bytes, str] | None:
            environment_id = self._hub.releases.distributions().get(project)
            if environment_id is None:
                return None
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
