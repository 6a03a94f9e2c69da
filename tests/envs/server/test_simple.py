"""The simple index: the right page for each Accept header, and what pip and uv make of it."""

from tests.envs.projects import toy_publication
from tests.envs.server.sending import sha256

from telescope_envs.records.release import Status
from telescope_envs.registry.static_view import JSON_TYPE

PROJECT = "simple/telescope-env-acme-toy/"
HTML = "text/html; charset=utf-8"
HTML_TYPE = "application/vnd.pypi.simple.v1+html"
ACCEPTED = {
    "": HTML,
    "*/*": HTML,
    "text/html,application/xhtml+xml,*/*;q=0.8": HTML,
    f"{JSON_TYPE}, {HTML_TYPE}; q=0.1, text/html; q=0.01": JSON_TYPE,
    f"{JSON_TYPE}, {HTML_TYPE};q=0.2, text/html;q=0.01": JSON_TYPE,
    "application/vnd.pypi.simple.latest+json": JSON_TYPE,
    "image/png": HTML,
}
"""What pip, uv, browsers and others ask for -> what they get."""


def test_whoever_asks_for_json_gets_it_and_others_get_html(client):
    for accept, media_type in ACCEPTED.items():
        for path in ("simple/", PROJECT):
            answer = client.get(path, headers={"Accept": accept})
            assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
            assert answer.headers["vary"] == "Accept"


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


def test_a_name_that_is_an_address_leads_to_no_other_host(client):
    for path in ("simple/https:example.org", "simple/HTTPS:example.org/"):
        there = client.get(path).next_request.url
        assert there.host == client.base_url.host


def test_a_package_of_another_index_is_not_here(client):
    answer = client.get("simple/numpy/")
    assert answer.status_code == 404
    assert "your package index" in answer.json()["what_to_do"]
