"""A Hugging Face Hub on loopback: as much of its API as reading and pushing need.

Repositories are lists of commits. Wheels and weights are large files: they are announced in a
commit, put into a storage of another port, and fetched from there by a redirect.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

LARGE = (".whl", ".safetensors")
KINDS = ("datasets", "spaces", "models")


@dataclass
class Repository:
    """One repository: its commits, oldest first, each with all its files."""

    is_private: bool = False
    is_gated: bool = False
    """Whether its files, though not its name, are for those who were let in."""
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def add(self, files: dict[str, bytes], message: str) -> str:
        known = self.commits[-1][1] if self.commits else {}
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits.append((oid, {**known, **files}))
        self.messages.append(message)
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a head and a body sent apart would wait 40 ms
    server: "_Server"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self._noted()
        parts = path.strip("/").split("/")
        if parts[0] == "storage":
            data = self.server.hub.stored.get(parts[1])
            return self._send(200, data) if data is not None else self._send(404)
        if parts[0] == "api":
            return self._about("/".join(parts[2:4]), parts[4:])
        if parts[0] not in KINDS:
            parts.insert(0, "models")  # whose addresses name no kind
        return self._resolve("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))

    def do_POST(self) -> None:
        path = self._noted()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.hub.posted.append((path, body))
        if self.server.hub.refuses:
            return self._json(403, {"error": "the token may only read"})
        if path == "/api/repos/create":
            made = json.loads(body)
            return self._json(200, {"url": f"{self._host()}/{made['organization']}/{made['name']}"})
        if "/preupload/" in path:
            return self._preupload(path, json.loads(body)["files"])
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body)["objects"])
        return self._commit(path, [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        path = self._noted()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.hub.stored[path.rpartition("/")[2]] = data
        self._json(200, {})

    def _about(self, name: str, rest: list[str]) -> None:
        repository = self._allowed(name)
        if repository is None:
            return None
        commit = repository.at(unquote(rest[1]) if rest else "main")
        if commit is None:
            return self._error(404, "RevisionNotFound")
        oid, files = commit
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}
                for path, data in files.items()
            ]
            return self._json(200, entries)
        siblings = [{"rfilename": path} for path in files]
        return self._json(200, {"id": name, "sha": oid, "siblings": siblings, "private": False})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._allowed(name)
        if repository is None:
            return None
        if repository.is_gated:
            return self._error(403, "GatedRepo")
        commit = repository.at(unquote(revision))
        if commit is None:
            return self._error(404, "RevisionNotFound")
        oid, files = commit
        about = {"X-Repo-Commit": oid}
        data = files.get(unquote(path))
        if data is None:
            return self._error(404, "EntryNotFound", **about)
        if not path.endswith(LARGE):
            return self._send(200, data, ETag=f'"{_blob(data)}"', **about)
        digest = hashlib.sha256(data).hexdigest()
        self.server.hub.stored[digest] = data
        about |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        location = f"{self.server.hub.storage_address}/storage/{digest}"
        return self._send(302, b"", Location=location, **about)

    def _preupload(self, path: str, files: list[dict]) -> None:
        modes = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for one in files
        ]
        self._json(200, {"files": modes})

    def _batch(self, objects: list[dict]) -> None:
        address = self.server.hub.storage_address
        listed = [
            {**one, "actions": {"upload": {"href": f"{address}/storage/{one['oid']}"}}}
            for one in objects
            if one["oid"] not in self.server.hub.stored
        ]
        self._json(200, {"objects": listed, "transfer": "basic"})

    def _commit(self, path: str, lines: list[dict]) -> None:
        hub = self.server.hub
        _, _, kind, owner, name, _, revision = path.split("/")
        hub.before_commit()
        repository = hub.repositories.setdefault(f"{owner}/{name}", Repository())
        header = lines[0]["value"]
        files: dict[str, bytes] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif value["oid"] in hub.stored:
                files[value["path"]] = hub.stored[value["oid"]]
            else:
                return self._json(400, {"error": f"{value['path']} was never uploaded"})
        with hub.lock:
            newest = repository.commits[-1][0] if repository.commits else None
            if "parentCommit" in header and header["parentCommit"] != newest:
                return self._json(412, {"error": "A commit has happened since. Please refresh."})
            if revision != "main":
                return self._error(404, "RevisionNotFound")
            oid = repository.add(files, header["summary"])
        url = f"{self._host()}/{kind}/{owner}/{name}/commit/{oid}"
        return self._json(200, {"commitUrl": url, "commitOid": oid})

    def _allowed(self, name: str) -> Repository | None:
        repository = self.server.hub.repositories.get(name)
        token = self.headers.get("Authorization", "")
        is_readable = repository is not None and (
            not repository.is_private or token == f"Bearer {self.server.hub.token}"
        )
        if is_readable:
            return repository
        return self._error(401, "RepoNotFound")

    def _noted(self) -> str:
        path = urlsplit(self.path).path
        self.server.requests.append((f"{self.command} {path}", dict(self.headers)))
        if self.server.hangs_up:
            self.connection.close()
            raise ConnectionError
        return path

    def _host(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _error(self, status: int, code: str, **headers: str) -> None:
        self._send(status, b"{}", X_Error_Code=code, **headers)

    def _json(self, status: int, content: object) -> None:
        self._send(status, json.dumps(content).encode(), Content_Type="application/json")

    def _send(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: "LoopbackHub") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.hangs_up = False
        """Whether it takes requests and answers none."""
        self.requests: list[tuple[str, dict[str, str]]] = []

    def handle_error(self, request, client_address) -> None:
        """Clients that hang up are what some tests are about."""


class LoopbackHub:
    """The Hub, and on another port its storage of large files."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.posted: list[tuple[str, bytes]] = []
        self.token = "hf_" + "x" * 20
        self.refuses = False
        self.before_commit: Callable[[], object] = lambda: None
        self.lock = threading.Lock()
        self.server, self.storage = _Server(self), _Server(self)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def storage_address(self) -> str:
        return f"http://127.0.0.1:{self.storage.server_port}"

    def upload(self, name: str, folder: Path) -> Repository:
        """Make a repository with the files of a folder."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
        }
        repository = self.repositories[name] = Repository()
        repository.add(files, "initial commit")
        return repository

    def tokens_seen(self) -> set[str]:
        return _tokens(self.server)

    def tokens_seen_by_storage(self) -> set[str]:
        return _tokens(self.storage)


def _tokens(server: _Server) -> set[str]:
    sent = [
        {name.lower(): value for name, value in headers.items()} for _, headers in server.requests
    ]
    return {headers["authorization"] for headers in sent if "authorization" in headers}


def _blob(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def own_hub_settings(folder: Path) -> Iterator[None]:
    """Give the library a cache of its own, no token, and uploads that a test can look into."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hf"))
        patched.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        patched.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "none"))
        patched.delenv("HF_TOKEN", raising=False)
        yield


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    hub = LoopbackHub()
    with hub.server, hub.storage:
        threads = [
            threading.Thread(target=server.serve_forever, args=(0.01,))
            for server in (hub.server, hub.storage)
        ]
        for thread in threads:
            thread.start()
        try:
            yield hub
        finally:
            for server in (hub.server, hub.storage):
                server.shutdown()
            for thread in threads:
                thread.join()
