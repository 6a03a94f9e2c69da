"""A disk that is full while something is published: an answer that says so, and nothing is left."""

import os
import tempfile
from pathlib import Path

import pytest
from tests.envs.server.sending import Sender, publication_now, sha256, stored_files
from tests.envs.serving import served

from telescope_envs.rules.wheel import read_wheel

FULL = Path("/dev/full")


@pytest.fixture
def hub(tmp_path):
    with served(tmp_path / "hub") as hub:
        yield hub


def full(data: Path, content: bytes) -> Path:
    """Let writing the file with this content fail, as on a full disk; returns what to remove."""
    place = data / "incoming" / f"{os.getpid()}-{sha256(content)}"
    place.symlink_to(FULL)
    return place


def metadata_of(publication) -> bytes:
    return read_wheel(publication.wheel, publication.release.wheel.filename).metadata


@pytest.mark.parametrize("content", ["wheel", "metadata"])
def test_no_room_for_a_file(hub, content):
    publication = publication_now()
    data = publication.wheel if content == "wheel" else metadata_of(publication)
    full(hub.store.data, data)
    with Sender(hub.address, hub.token()) as sender:
        answer = sender.publish(publication)
        assert (answer.status_code, answer.json()["error"]) == (
            507,
            "the disk of the registry is full; nothing was stored",
        )
        assert stored_files(hub.store.data) == set()
        assert sender.get("index/acme/toy.jsonl").status_code == 404
        assert sender.publish(publication).status_code == 201


def test_no_room_for_the_record(hub):
    """The files are withdrawn, and the next writer finds no transaction that was left open."""
    database, publication = hub.store.database, publication_now()
    with Sender(hub.address, hub.token()) as sender:
        with database.transaction() as writer:
            (pages,) = writer.execute("PRAGMA page_count").fetchone()
            writer.execute(f"PRAGMA max_page_count = {pages}")
        long = publication.release.changed(tags=("x" * 900,) * 100)
        answer = sender.publish(publication, record=long.as_json().decode())
        assert (answer.status_code, "is full" in answer.text) == (507, True), answer.text
        assert stored_files(hub.store.data) == set()
        with database.transaction() as writer:
            writer.execute("PRAGMA max_page_count = 1000000")
        assert sender.publish(publication).status_code == 201


def test_no_room_for_the_upload(hub, tmp_path, monkeypatch):
    """Uploads that are longer than a megabyte wait in a file of the system's temporary folder."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *_, **__: FULL.open("w+b"))
    publication = publication_now()
    with Sender(hub.address, hub.token()) as sender:
        files = {"record": ("r", b"{}"), "wheel": ("w.whl", b"x" * (3 * 2**20))}
        assert sender.post("api/releases", files=files).status_code == 507
        monkeypatch.undo()
        assert sender.publish(publication).status_code == 201
