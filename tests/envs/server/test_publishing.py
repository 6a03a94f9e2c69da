"""Publishing and changing a status through the server's interface."""

import asyncio
import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from tests.envs.authors import new_repository, publish
from tests.envs.projects import TOY
from tests.envs.server.sending import Sender, publication_now, sha256
from tests.envs.serving import ServedHub
from tests.envs.static_host import place_at

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.records.reading import Publication
from telescope_envs.records.release import Validation
from telescope_envs.registry import Registry
from telescope_envs.registry.stores.http import open_http
from telescope_envs.server.app import ServerOptions, create_app
from telescope_envs.server.auth import Scope
from telescope_envs.server.hub import HubStore
from telescope_envs.server.uploads import check_publication


def test_a_release_is_published_once(acme, hub, tmp_path):
    publication = publication_now()
    first = acme.publish(publication)
    assert first.status_code == 201
    assert first.json() == {
        "id": "acme/toy",
        "version": "0.2.0",
        "sha256": publication.release.wheel.sha256,
        "published": True,
    }
    again = acme.publish(publication)
    assert (again.status_code, again.json()["published"]) == (200, False)
    later = publication_now(published_at=datetime.now(UTC) + timedelta(minutes=1))
    assert acme.publish(later).status_code == 200, "the bytes count, not the time"
    registry = Registry(open_http(place_at(hub.address, tmp_path / "cache")))
    assert registry.releases("acme/toy")[-1] == publication.release
    assert registry.wheel_bytes(publication.release) == publication.wheel


def test_an_attestation_is_served_beside_its_wheel(acme, client):
    bundle = b'{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}'
    publication = publication_now(attestation_sha256=sha256(bundle))
    sent = acme.publish(publication, attestation=("a.json", bundle))
    assert sent.status_code == 201, sent.text
    (path,) = publication.release.wheel.urls
    assert client.get(f"{path}.sigstore.json").content == bundle


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"published_at": datetime(2020, 1, 1, tzinfo=UTC)},
            "published_at must be within an hour of now",
        ),
        ({"validation": Validation(policy="1", verdict="fail")}, "did not pass its validation"),
        ({"license": "Apache-2.0"}, "the wheel's license is 'MIT'"),
        ({"summary": "two\nlines"}, "cannot be read: summary"),
        (
            {"secrets": ("KEY", "Telescope_Hub_Token")},
            "secrets must not be Telescope's own variables, got ['Telescope_Hub_Token']",
        ),
        ({"secrets": ("MY KEY=x",)}, "secrets.0: is not the name of an environment variable"),
        ({"attestation_sha256": "0" * 64}, "attestation_sha256"),
        ({"requires_dist": ()}, "the wheel's requires_dist is"),
        ({"requires_dist": ("x",) * 1001}, "requires_dist: expected at most 1000, got 1001"),
    ],
)
def test_records_that_are_not_right_are_refused(acme, client, fields, message):
    before = client.get("index/acme/toy.jsonl").content
    answer = acme.publish(publication_now(**fields))
    assert answer.status_code == 422
    assert message in answer.json()["error"]
    assert client.get("index/acme/toy.jsonl").content == before


def test_publishers_do_not_wait_for_the_inspection_of_each_other(hub, monkeypatch):
    began, may_end = threading.Event(), threading.Event()

    def check(publication: Publication) -> None:
        if publication.release.owner == "acme":
            began.set()
            assert may_end.wait(60)
        check_publication(publication)

    monkeypatch.setattr("telescope_envs.server.app.check_publication", check)
    hub.store.add_namespace("umbrella", [])
    quick = publication_now("0.1.0", owner="umbrella", name="parasol")
    with (
        ThreadPoolExecutor() as pool,
        Sender(hub.address, hub.token()) as slow,
        Sender(hub.address, hub.token(owners=("umbrella",))) as sender,
    ):
        one, other = (pool.submit(slow.publish, publication_now(v)) for v in ("0.2.0", "0.3.0"))
        try:
            assert began.wait(60)
            assert sender.publish(quick).status_code == 201
            assert sender.get("index/umbrella/parasol.jsonl").status_code == 200
            assert not one.done()
            assert not other.done()
        finally:
            may_end.set()
        assert {one.result().status_code, other.result().status_code} == {201}


def test_fields_that_would_be_lost_are_refused(acme, client):
    before = client.get("index/acme/toy.jsonl").content
    publication = publication_now()
    record = json.loads(publication.release.as_json().decode())
    record["wheel"]["color"] = "blue"
    answer = acme.publish(publication, record=json.dumps(record))
    assert answer.status_code == 422
    assert "wheel.color" in answer.json()["error"]
    assert "upgrade" in answer.json()["what_to_do"]
    assert client.get("index/acme/toy.jsonl").content == before


def test_a_name_that_is_easily_taken_for_another_needs_an_admin(hub):
    hub.store.add_namespace("evil-corp", [])
    near = publication_now(owner="evil-corp", name="toyy")
    with Sender(hub.address, hub.token(owners=("evil-corp",))) as sender:
        refused = sender.publish(near)
        assert refused.status_code == 409
        assert "'toyy' is easily confused with acme/toy" in refused.json()["error"]
        with Sender(hub.address, hub.token(Scope.ADMIN)) as admin:
            assert admin.publish(near).status_code == 201
        later = publication_now("0.3.0", owner="evil-corp", name="toyy")
        assert sender.publish(later).status_code == 201, "the name is known now"


def test_a_status_is_changed_by_who_has_seen_the_last_one(acme, client):
    path, api = "status/acme/toy.json", "api/status/acme/toy"
    yank = b'{"yanked": {"0.1.0": "wrong answers"}}'
    assert acme.put(api, content=yank).status_code == 428
    etag = client.get(path).headers["etag"]
    changed = acme.put(api, content=yank, headers={"If-Match": etag})
    assert changed.status_code == 200
    assert changed.json()["yanked"] == {"0.1.0": "wrong answers"}
    assert changed.headers["etag"] == client.get(path).headers["etag"]
    late = acme.put(api, content=b"{}", headers={"If-Match": etag})
    assert late.status_code == 412
    assert "read it again" in late.json()["what_to_do"]
    assert client.get(path).json()["yanked"] == {"0.1.0": "wrong answers"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "the status record cannot be read"),
        (b'{"yanked": {"7.0": "why"}}', "cannot yank 7.0: acme/toy has no such version"),
        (b'{"yanked": 3}', "yanked: "),
    ],
)
def test_statuses_that_make_no_sense_are_refused(acme, client, content, message):
    etag = client.get("status/acme/toy.json").headers["etag"]
    answer = acme.put("api/status/acme/toy", content=content, headers={"If-Match": etag})
    assert answer.status_code == 422
    assert message in answer.json()["error"]
    assert client.get("status/acme/toy.json").headers["etag"] == etag


def test_the_client_says_what_the_server_said(hub, tmp_path):
    place = place_at(hub.address, tmp_path / "cache", token=hub.token())
    store = open_http(place)
    store.publish(publication_now())
    other = publication_now(code=f"{TOY}# other\n")
    with pytest.raises(
        RegistryError, match=r"already published with different bytes.*raise the version"
    ):
        store.publish(Publication(release=other.release, wheel=other.wheel))
    assert "tsh_" not in repr(place)
    stranger = open_http(place_at(hub.address, tmp_path / "cache"))
    with pytest.raises(RegistryError, match=r"the request has no token; set the token"):
        stranger.publish(publication_now("0.3.0"))


def test_who_may_not_publish_is_told_before_anything_is_built(hub, tmp_path, monkeypatch):
    project = tmp_path / "sorted"
    new_repository(project)
    monkeypatch.setenv("TELESCOPE_REGISTRY", hub.address)
    with pytest.raises(ConfigError, match=r"needs a token, and none is set; .*hub login"):
        publish(project, hub.address)
    hub.store.add_namespace("other", [])
    monkeypatch.setenv("TELESCOPE_HUB_TOKEN", hub.token(owners=["other"]))
    with pytest.raises(RegistryError, match=r"may not publish as 'acme'; its namespaces: other"):
        publish(project, hub.address, bump="patch", commit=True)
    monkeypatch.setenv("TELESCOPE_HUB_TOKEN", hub.token(scope=Scope.READ))
    with pytest.raises(RegistryError, match=r"has scope read"):
        publish(project, hub.address)
    assert 'version = "0.1.0"' in (project / "pyproject.toml").read_text()


def test_a_tag_that_a_proxy_has_marked_as_weak_is_the_same_tag(acme, client):
    """nginx does so with every answer that it compresses."""
    tag = client.get("status/acme/toy.json").headers["etag"]
    sent = {"content": b"{}", "headers": {"If-Match": f"W/{tag}"}}
    assert acme.put("api/status/acme/toy", **sent).status_code == 200


def test_what_is_to_be_changed_is_asked_for_uncompressed(hub, tmp_path, monkeypatch):
    store = open_http(place_at(hub.address, tmp_path / "cache", token=hub.token()))
    seen = []
    send = httpx.Client.send

    def noted(client, request, **how):
        seen.append((request.method, request.headers["accept-encoding"]))
        return send(client, request, **how)

    monkeypatch.setattr(httpx.Client, "send", noted)
    store.change_status("acme/toy", lambda status: status.changed(advisories=("read this",)))
    assert seen == [("GET", "identity"), ("PUT", "identity")]


def test_a_server_that_ends_does_not_say_what_it_cannot_know(tmp_path, monkeypatch):
    """The thread that stores a release goes on to its end."""
    began, may_end = threading.Event(), threading.Event()

    def check(publication: Publication) -> None:
        began.set()
        assert may_end.wait(60)

    monkeypatch.setattr("telescope_envs.server.app.check_publication", check)
    with closing(HubStore(tmp_path / "hub")) as store:
        store.add_namespace("acme", [])
        secret = ServedHub("", store).token()
        publication = publication_now()
        files = {
            "record": ("record.json", publication.release.as_json()),
            "wheel": (publication.release.wheel.filename, publication.wheel),
        }

        async def published() -> httpx.Response:
            app = httpx.ASGITransport(create_app(store, ServerOptions()))
            headers = {"Authorization": f"Bearer {secret}"}
            async with httpx.AsyncClient(
                transport=app, base_url="http://localhost", headers=headers
            ) as client:
                request = asyncio.create_task(client.post("/api/releases", files=files))
                assert await asyncio.to_thread(began.wait, 60)
                request.cancel()
                try:
                    return await request
                finally:
                    may_end.set()

        answer = asyncio.run(published())
        assert [one.version for one in store.releases.all_of("acme/toy")] == ["0.2.0"]
    assert answer.status_code == 503
    assert "nothing was stored" not in answer.json()["error"]
    assert "safe to publish the same release twice" in answer.json()["what_to_do"]


def test_records_that_another_process_is_writing_are_no_fault_of_the_disk(acme, hub):
    hub.store.database.rows("PRAGMA journal_mode")
    with hub.store.database.transaction() as writer:
        writer.execute("PRAGMA busy_timeout = 10")
    with closing(sqlite3.connect(hub.store.database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = acme.publish(publication_now())
    assert answer.status_code == 503
    assert "another process is writing" in answer.json()["error"]
    assert acme.publish(publication_now()).status_code == 201
