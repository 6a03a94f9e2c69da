"""A package index on loopback, with tiny wheels made on the spot; it notes what it is asked for."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


def tiny_wheel(name: str, version: str, needs: tuple[str, ...] = (), code: str = "") -> bytes:
    """Return a wheel of one module, named like its distribution."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        f"{module}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": rows}.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return packed.getvalue()


_BACKEND = """
import pathlib
NAME = {name!r}
def build_wheel(folder, config_settings=None, metadata_directory=None):
    pathlib.Path(folder, NAME).write_bytes({wheel!r})
    return NAME
"""


def tiny_source(name: str, version: str) -> bytes:
    """Return a source distribution that builds itself, without any other package."""
    module = name.replace("-", "_")
    wheel = tiny_wheel(name, version, code="built = True\n")
    about = f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n"
    files = {
        "PKG-INFO": about,
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "own"\n'
        'backend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n',
        "own.py": _BACKEND.format(name=f"{module}-{version}-py3-none-any.whl", wheel=wheel),
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(f"{module}-{version}/{path}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return packed.getvalue()


@dataclass
class PackageIndex:
    """What is on the index, and what was asked of it."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """File name -> bytes."""
    cut: str = ""
    """Answers with this in their path break off half-way."""
    caching: str = "no-store"
    """How long uv may keep its answers, as a Cache-Control header."""
    asked: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, needs: tuple[str, ...] = (), code: str = "") -> bytes:
        """Put a tiny wheel on it; returns its bytes."""
        wheel = tiny_wheel(name, version, needs, code)
        self.files[f"{name.replace('-', '_')}-{version}-py3-none-any.whl"] = wheel
        return wheel

    def add_source(self, name: str, version: str) -> None:
        """Put a tiny source distribution on it."""
        self.files[f"{name.replace('-', '_')}-{version}.tar.gz"] = tiny_source(name, version)

    def answer(self, path: str) -> bytes | None:
        """Return a file, or the page of a project."""
        last = path.rstrip("/").rpartition("/")[2]
        if last in self.files:
            return self.files[last]
        start = f"{last.replace('-', '_')}-"
        links = "".join(
            f'<a href="/files/{name}#sha256={hashlib.sha256(data).hexdigest()}">{name}</a>\n'
            for name, data in self.files.items()
            if name.startswith((start, f"{last}-"))
        )
        return f"<!DOCTYPE html><html><body>{links}</body></html>".encode() if links else None


@contextmanager
def serve_index() -> Generator[PackageIndex]:
    """Serve an empty index until the block ends."""
    index = PackageIndex()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(self.path)
            self.reply(has_body=True)

        def do_HEAD(self) -> None:
            self.reply(has_body=False)

        def reply(self, *, has_body: bool) -> None:
            found = index.answer(self.path)
            self.send_response(200 if found is not None else 404)
            kind = "text/html" if "/files/" not in self.path else "application/octet-stream"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(found or b"")))
            self.send_header("Cache-Control", index.caching)
            self.end_headers()
            is_cut = bool(index.cut) and index.cut in self.path
            if has_body:
                self.wfile.write((found or b"")[: 20 if is_cut else None])
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.address = f"http://127.0.0.1:{server.server_address[1]}/simple/"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
