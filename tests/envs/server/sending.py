"""Sends publications as the server's interface takes them, well made or not."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import httpx
from tests.envs.projects import toy_publication

from telescope_envs.records.reading import Publication


def publication_now(version="0.2.0", **fields) -> Publication:
    """Return a release of the toy that is published now; fields as of toy_publication."""
    return toy_publication(version, **{"published_at": datetime.now(UTC), **fields})


class Sender(httpx.Client):
    """A client with a token; empty: none."""

    def __init__(self, address: str, secret: str = "") -> None:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        super().__init__(base_url=address, headers=headers, timeout=120)

    def publish(self, publication: Publication, *, record: str = "", **parts) -> httpx.Response:
        """Send a publication; `record` replaces its record, `parts` are further parts."""
        line = record or publication.release.as_json().decode()
        files = {
            "record": ("record.json", line.encode()),
            "wheel": (publication.release.wheel.filename, publication.wheel),
            **parts,
        }
        return self.post("/api/releases", files=files)


def stored_files(data: Path) -> set[str]:
    """Return what is in the folders of artefacts and of half-written files."""
    return {
        path.relative_to(data).as_posix()
        for folder in ("artifacts", "incoming")
        for path in (data / folder).rglob("*")
        if path.is_file()
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
