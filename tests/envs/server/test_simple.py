"""The simple index: the right page for each Accept header, and what pip and uv make of it."""

from tests.envs.projects import toy_publication
from tests.envs.server.sending import sha256

from telescope_envs.records.release import Status
from telescope_envs.registry.static_view import (
    HTML_TYPE,
    JSON_TYPE,
)
from telescope_envs.server.site import negotiated

PROJECT = "simple/telescope-env-acme-toy/"
PIP = f"{JSON_TYPE}, {HTML_TYPE}; q=0.1, text/html; q=0.01"
UV = f"{JSON_TYPE}, {HTML_TYPE};q=0.2, text/html;q=0.01"


ACCEPTED = {
    "": "text/html; charset=utf-8",
    "*/*": "text/html; charset=utf-8",
    "text/html,application/xhtml+xml,*/*;q=0.8": "text/html; charset=utf-8",
    PIP: JSON_TYPE,
    UV: JSON_TYPE,
    JSON_TYPE: JSON_TYPE,
    HTML_TYPE: HTML_TYPE,
    "application/vnd.pypi.simple.latest+json": JSON_TYPE,
    f"{JSON_TYPE};q=0, text/html": "text/html; charset=utf-8",
    "application/*": HTML_TYPE,
    f"{JSON_TYPE};q=nonsense, text/html;q=0.1": "text/html; charset=utf-8",
}


def test_the_type_that_is_wanted_most_is_sent(client):
    for accept, media_type in ACCEPTED.items():
        assert negotiated(accept) == media_type
        for path in ("simple/", PROJECT):
            answer = client.get(path, headers={"Accept": accept})
            assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
            assert answer.headers["vary"] == "Accept"


def test_what_cannot_be_sent_is_refused(client):
    answer = client.get("simple/", headers={"Accept": "image/png"})
    assert answer.status_code == 406
    assert "text/html" in answer.json()["what_to_do"]


def test_json_lists_wheels_with_hashes_times_and_reasons(client, hub):
    hub.store.publish(toy_publication("0.2.0"))
    hub.store.change_status("acme/toy", lambda _: Status(yanked={"0.2.0": "wrong answers"}))
    answer = client.get(PROJECT, headers={"Accept": JSON_TYPE})
    first, second = answer.json()["files"]
    release = toy_publication().release
    assert first["hashes"] == {"sha256": release.wheel.sha256}
    assert (first["yanked"], second["yanked"]) == (False, "wrong answers")
    assert first["upload-time"] == "2026-11-21T12:00:00.000000Z"
    metadata = client.get(f"{PROJECT}{first['url']}.metadata").content
    assert first["core-metadata"] == {"sha256": sha256(metadata)}
    assert metadata.startswith(b"Metadata-Version:")
    etag = answer.headers["etag"]
    html = client.get(PROJECT).headers["etag"]
    assert etag != html
    again = client.get(PROJECT, headers={"Accept": JSON_TYPE, "If-None-Match": etag})
    assert again.status_code == 304


def test_other_spellings_are_sent_to_the_right_one(client):
    for path in ("simple", PROJECT.rstrip("/"), "simple/Telescope_Env.acme-toy/"):
        answer = client.get(path)
        assert answer.status_code == 301
        assert client.get(path, follow_redirects=True).status_code == 200


def test_a_package_of_another_index_is_not_here(client):
    answer = client.get("simple/numpy/")
    assert answer.status_code == 404
    assert "your package index" in answer.json()["what_to_do"]
