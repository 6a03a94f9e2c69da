"""The server serves the files of a registry, and tells who has them that nothing changed."""

import json
import random
from urllib.parse import urlsplit

import httpx
import pytest
from tests.envs.projects import TOY, toy_publication
from tests.envs.server.sending import publication_now

from telescope_envs.records.schemas import schema_files

FILES = {
    "config.json": "application/json",
    "aliases.toml": "application/toml",
    "reserved.txt": "text/plain; charset=utf-8",
    "namespaces/acme.toml": "application/toml",
    "index/acme/toy.jsonl": "application/x-ndjson",
    "status/acme/toy.json": "application/json",
    "schema/release.json": "application/json",
    "v1/index.json": "application/json",
}


def test_a_file_is_sent_once(client):
    for path, media_type in FILES.items():
        first = client.get(path)
        assert (first.status_code, first.headers["content-type"]) == (200, media_type)
        assert first.headers["etag"].startswith('"')
        again = client.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        other = client.get(path, headers={"If-None-Match": '"other"'})
        assert other.content == first.content
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(first.content))


def test_a_publication_changes_what_it_must(client, acme):
    paths = ["config.json", "index/acme/toy.jsonl", "v1/index.json"]
    before = [client.get(path).headers["etag"] for path in paths]
    assert acme.publish(publication_now()).status_code == 201
    after = [client.get(path).headers["etag"] for path in paths]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]


def test_config_announces_the_interface_and_schemas_are_complete(client):
    assert client.get("config.json").json()["api"] == "api"
    for name, text in schema_files().items():
        assert client.get(f"schema/{name}").text == text
    assert client.get("schema/none.json").status_code == 404


def test_a_wheel_is_sent_for_ever_and_in_parts(client):
    publication = toy_publication()
    (path,) = publication.release.wheel.urls
    first = client.get(path)
    assert first.content == publication.wheel
    assert first.headers["etag"] == f'"{publication.release.wheel.sha256}"'
    assert first.headers["cache-control"] == "public, max-age=31536000, immutable"
    again = client.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304
    part = client.get(path, headers={"Range": "bytes=2-11"})
    assert (part.status_code, part.content) == (206, publication.wheel[2:12])
    assert client.head(path).headers["content-length"] == str(len(publication.wheel))


def test_what_is_not_there_says_what_to_do(client):
    answer = client.get("index/acme/none.jsonl")
    assert answer.status_code == 404
    assert set(answer.json()) == {"error", "what_to_do"}
    assert client.post("config.json").status_code == 405


def test_every_answer_keeps_browsers_safe(client):
    for path in ("config.json", "none", "config.json?token=x"):
        headers = client.get(path).headers
        policy, options = headers["content-security-policy"], headers["x-content-type-options"]
        assert "default-src 'none'" in policy
        assert options == "nosniff"


def test_the_catalogue_is_that_of_the_store(client, hub):
    (row,) = client.get("v1/index.json").json()
    assert row["id"] == "acme/toy"
    assert json.loads(client.get("status/acme/toy.json").text)["yanked"] == {}


@pytest.mark.parametrize("num_bytes", [1000, 3_000_000])
def test_a_wheel_that_is_lost_is_told_alike_whatever_its_size(client, acme, hub, num_bytes):
    noise = random.Random(1).randbytes(num_bytes // 2).hex()
    publication = publication_now(code=f"{TOY}#{noise}\n")
    assert acme.publish(publication).status_code == 201
    (path,) = publication.release.wheel.urls
    hub.store.stored_artifact(path).path.unlink()
    answer = client.get(path)
    assert answer.status_code == 500
    assert set(answer.json()) == {"error", "what_to_do"}
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_what_is_kept_of_a_page_is_at_no_other_address(client, hub):
    assert client.get("").status_code == 200
    parts = urlsplit(hub.address)
    raw = f"{parts.path}/{hub.address}".encode()
    url = httpx.URL(scheme="http", host=parts.hostname, port=parts.port, raw_path=raw)
    assert client.get(url).status_code == 404
