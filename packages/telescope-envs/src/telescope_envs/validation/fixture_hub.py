"""`FixtureHub`: an author's own rows, served like datasets of the Hugging Face Hub on loopback.

A folder holds them as `OWNER/NAME/FILE`, with the same files and columns as the real datasets.
Every requested revision is answered with these files, so that an environment is checked with its
published settings and by the real `datasets` library.
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlparse

from telescope_core.base.errors import ConfigError
from telescope_envs.records.names import is_commit

FOLDER = "fixture-rows"
"""The folder of a project that holds its fixture rows."""
TOKEN = "fixture"
"""Token for an environment in place of a real one."""
_ABOUT = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)/?(.*)")
_FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class FixtureHub:
    """A server on loopback; a context manager that starts and ends it.

    With `token`, requests without it are refused as those for a gated dataset are.
    """

    def __init__(self, folder: Path, *, token: str = "") -> None:
        self._datasets = _read(folder)
        self.requested: list[str] = []
        """Paths that were requested."""
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(_Handler, self._datasets, token, self.requested)
        )
        # How long the end of it waits for the server to look whether it is to end.
        serve = partial(self._server.serve_forever, poll_interval=0.02)
        self._thread = threading.Thread(target=serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environ(self, home: Path) -> dict[str, str]:
        """Return variables that direct the Hub's libraries here, with caches in `home`.

        The caches must be separate: a fixture row must never be taken for one of the dataset.
        """
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }


def _read(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return dataset id -> file name -> content."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*/*/**/*")):
        if path.is_file():
            owner, name, *rest = path.relative_to(folder).parts
            found.setdefault(f"{owner}/{name}", {})["/".join(rest)] = path.read_bytes()
    if not found:
        raise ConfigError(
            f"{folder} holds no fixture rows; put files there as OWNER/NAME/FILE, named as in the "
            "dataset that they stand in for"
        )
    return found


class _Handler(BaseHTTPRequestHandler):
    """The few routes of the Hub that loading a dataset uses."""

    protocol_version = "HTTP/1.1"

    def __init__(
        self,
        datasets: Mapping[str, Mapping[str, bytes]],
        token: str,
        requested: list[str],
        *arguments: object,
    ) -> None:
        self._datasets = datasets
        self._token = token
        self._requested = requested
        super().__init__(*arguments)  # pyright: ignore[reportArgumentType]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        asked = urlparse(self.path)
        path = unquote(asked.path)
        self._requested.append(path)
        if self._token and self.headers.get("Authorization") != f"Bearer {self._token}":
            self._refuse(401, "GatedRepo", "Access to this dataset is restricted.")
        elif found := _ABOUT.fullmatch(path):
            self._about(found[1], found[2] or "main")
        elif found := _TREE.fullmatch(path):
            is_deep = parse_qs(asked.query).get("recursive", [""])[0].lower() == "true"
            self._tree(found[1], found[3].strip("/"), is_deep=is_deep)
        elif found := _FILE.fullmatch(path):
            self._file(found[1], found[2], found[3])
        else:
            self._refuse(404, "EntryNotFound", "Entry not found")

    def _about(self, dataset: str, revision: str) -> None:
        files = self._datasets.get(dataset)
        if files is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
            return
        siblings = [{"rfilename": name} for name in files]
        sha = commit_of(files, revision)
        self._say(json.dumps({"id": dataset, "sha": sha, "siblings": siblings}).encode())

    def _tree(self, dataset: str, folder: str, *, is_deep: bool) -> None:
        files = self._datasets.get(dataset, {})
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, object]] = {}
        for name, content in files.items():
            if not name.startswith(prefix):
                continue
            inner = name.removeprefix(prefix)
            first, _, rest = (inner, "", "") if is_deep else inner.partition("/")
            oid = hashlib.sha1(content).hexdigest()
            entries[first] = {
                "type": "directory" if rest else "file",
                "path": f"{prefix}{first}",
                "size": 0 if rest else len(content),
                "oid": oid,
            }
        self._say(json.dumps([*entries.values()]).encode())

    def _file(self, dataset: str, revision: str, name: str) -> None:
        files = self._datasets.get(dataset, {})
        if name not in files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        self._say(files[name], {"X-Repo-Commit": commit_of(files, revision)})

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._say(json.dumps({"error": message}).encode(), headers, status=status)

    def _say(
        self, body: bytes, headers: Mapping[str, str] | None = None, *, status: int = 200
    ) -> None:
        self.send_response(status)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log: the report has the findings."""


def commit_of(files: Mapping[str, bytes], revision: str) -> str:
    """Return `revision` if it is a commit, else the commit of a branch here."""
    if is_commit(revision):
        return revision
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
