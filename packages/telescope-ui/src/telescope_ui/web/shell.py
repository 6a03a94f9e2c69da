"""Pages and data at the same addresses: browsers get the front end, programs the data."""

from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from telescope_ui.base.answers import error_response

STATIC = Path(__file__).resolve().parents[1] / "static"
_ALWAYS_DATA = ("/static/", "/live")
_NO_PAGES = ("/timeline/trace.json", "/report.html")
"""Endings of addresses below a run without a page of the front end."""
_FORMATS = ("html", "json")
_OF_FRONT_END = "ui."
"""Prefix of parameters that choose what a page shows of its data."""


class Shell:
    """Answers page requests with the front end, and passes on requests for data.

    `format` is taken out of the query, and so is what only the front end reads (`ui.view`): then an
    address that a person shares has its data too. Paths are handed on as they came, still escaped,
    so that a name with a slash in it stays one part.
    """

    def __init__(self, app: ASGIApp, *, static: Path = STATIC) -> None:
        self._app = app
        self._index = static / "index.html"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a page, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        raw = scope["raw_path"].decode("latin-1")
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        formats = [value for name, value in pairs if name == "format"]
        if any(value not in _FORMATS for value in formats):
            message = f"format: expected one of {', '.join(_FORMATS)}, got {formats[0]!r}"
            await error_response(400, message)(scope, receive, send)
            return
        is_json = "application/json" in Headers(scope=scope).get("accept", "")
        wanted = formats[-1] if formats else "json" if is_json else "html"
        if wanted == "html" and not raw.startswith(_ALWAYS_DATA) and not raw.endswith(_NO_PAGES):
            page = Response(self._index.read_bytes(), media_type="text/html")
            await page(scope, receive, send)
            return
        kept = urlencode([pair for pair in pairs if not _is_ours(pair[0])])
        await self._app({**scope, "path": raw, "query_string": kept.encode()}, receive, send)


def _is_ours(name: str) -> bool:
    return name == "format" or name.startswith(_OF_FRONT_END)
