"""A suspended namespace: what its owner may still do, what others still get, and who is told."""

import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication
from tests.envs.server.sending import Sender, publication_now
from tests.envs.static_host import place_at

import telescope_envs.server
from telescope_core.errors import ConfigError, RegistryError, UnknownNameError
from telescope_envs.records.release import Deprecation
from telescope_envs.registry import Registry
from telescope_envs.registry.resolving import resolve_with_warnings
from telescope_envs.registry.stores.http import open_http
from telescope_envs.server.auth import Scope
from telescope_envs.server.hub import HubStore

SIMPLE = "simple/telescope-env-acme-toy/"


def opened(hub, tmp_path) -> Registry:
    return Registry(open_http(place_at(hub.address, tmp_path / "cache")))


def test_a_suspended_owner_publishes_nothing_and_its_tokens_are_refused(hub, acme, tmp_path):
    etag = acme.get("status/acme/toy.json").headers["etag"]
    hub.store.suspend("acme", reason="stolen token", is_withheld=False)
    answers = [
        acme.publish(publication_now()),
        acme.put("api/status/acme/toy", content=b"{}", headers={"If-Match": etag}),
        acme.get("api/token"),
        acme.get("config.json"),
    ]
    for answer in answers:
        assert answer.status_code == 403
        assert "namespace 'acme' is suspended" in answer.json()["error"]
    with pytest.raises(RegistryError, match="403: namespace 'acme' is suspended") as refusal:
        open_http(place_at(hub.address, tmp_path / "cache", token=hub.token()))
    assert str(refusal.value).endswith(answers[-1].json()["what_to_do"])
    with Sender(hub.address, hub.token(Scope.ADMIN)) as admin:
        assert admin.publish(publication_now()).status_code == 422, "nor does anybody else for it"
        yanked = admin.put(
            "api/status/acme/toy",
            content=b'{"yanked": {"0.1.0": "stolen"}}',
            headers={"If-Match": etag},
        )
        assert yanked.status_code == 200
    hub.store.restore("acme", reason="new tokens")
    assert acme.publish(publication_now()).status_code == 201


def test_a_token_of_two_owners_still_publishes_for_the_other(hub):
    hub.store.add_namespace("beta", [])
    hub.store.suspend("acme", reason="stolen token", is_withheld=False)
    with Sender(hub.address, hub.token(owners=("acme", "beta"))) as sender:
        assert sender.publish(publication_now(owner="beta", name="other")).status_code == 201
        assert sender.publish(publication_now()).status_code == 403


def test_what_a_suspended_owner_published_stays_installable_with_a_warning(hub, client, tmp_path):
    hub.store.suspend("acme", reason="stolen token", is_withheld=False)
    registry = opened(hub, tmp_path)
    found = resolve_with_warnings(registry, "acme/toy")
    assert found.warnings == ("acme/toy: namespace 'acme' is suspended: it publishes nothing new",)
    assert registry.wheel_bytes(found.release) == toy_publication().wheel
    assert "toy" in client.get(SIMPLE).text


def test_what_is_withheld_is_served_to_nobody_until_it_is_restored(hub, client, tmp_path):
    wheel = f"artifacts/{toy_publication().release.wheel.filename}"
    places = [wheel, f"{wheel}.metadata", SIMPLE, "environments/acme/toy"]
    assert [client.get(place).status_code for place in places] == [200] * 4
    hub.store.suspend("acme", reason="a court", is_withheld=True)
    assert [client.get(place).status_code for place in places] == [451] * 4
    assert client.get("v1/index.json").json() == []
    assert "acme/toy" not in client.get("").text
    assert "acme-toy" not in client.get("simple/").text
    registry = opened(hub, tmp_path)
    with pytest.raises(RegistryError, match="namespace 'acme' is suspended, so its environments"):
        resolve_with_warnings(registry, "acme/toy")
    with pytest.raises(RegistryError, match="answered 451: namespace 'acme' is suspended"):
        registry.wheel_bytes(toy_publication().release)
    hub.store.restore("acme", reason="another court")
    assert [client.get(place).status_code for place in places] == [200] * 4
    assert "acme/toy" in client.get("").text


def test_the_log_has_it_and_cannot_be_rewritten(hub):
    hub.store.suspend("acme", reason="stolen token", is_withheld=False)
    hub.store.suspend("acme", reason="a court", is_withheld=True)
    assert hub.store.namespaces() == [("acme", "withheld")]
    hub.store.restore("acme", reason="new tokens")
    said = [(entry.event, entry.subject, entry.reason) for entry in hub.store.audit()]
    assert [one for one in said if one[0].startswith("namespace ")] == [
        ("namespace added", "acme", ""),
        ("namespace suspended", "acme", "stolen token"),
        ("namespace withheld", "acme", "a court"),
        ("namespace restored", "acme", "new tokens"),
    ]
    assert ("published", "acme/toy 0.1.0", "") in said
    hub.store.change_publishers("acme", [{"kind": "user", "id": "ann"}], reason="a new owner")
    for statement in (
        *("UPDATE suspensions SET reason = ''", "DELETE FROM suspensions"),
        *("UPDATE publisher_changes SET reason = ''", "DELETE FROM publisher_changes"),
    ):
        with (
            pytest.raises(sqlite3.IntegrityError, match=r"a (suspension|change of .*) is never"),
            hub.store.database.transaction() as writer,
        ):
            writer.execute(statement)


def test_the_log_says_what_was_said_of_which_version_and_why(hub):
    old = Deprecation(reason="old", replacement="acme/new")
    for fields in (
        {"yanked": {"0.1.0": "wrong gold"}},
        {"yanked": {"0.1.0": "leaks answers"}, "advisories": ("reads files",)},
        {"yanked": {}, "deprecated": old},
        {"yanked": {}, "deprecated": old},
        {"yanked": {}, "deprecated": None, "advisories": ()},
    ):
        hub.store.change_status("acme/toy", lambda status, new=fields: status.changed(**new))
    hub.store.add_alias("toy", "acme/toy")
    hub.store.suspend("acme", reason="stolen token", is_withheld=False)
    entries = [(one.event, one.subject, one.reason) for one in hub.store.audit()]
    assert entries[entries.index(("published", "acme/toy 0.1.0", "")) + 1 :] == [
        ("yanked", "acme/toy 0.1.0", "wrong gold"),
        ("yanked", "acme/toy 0.1.0", "leaks answers"),
        ("advisory added", "acme/toy", "reads files"),
        ("yank undone", "acme/toy 0.1.0", ""),
        ("deprecated", "acme/toy", "old; use acme/new"),
        ("status sent again", "acme/toy", ""),
        ("deprecation undone", "acme/toy", ""),
        ("advisory removed", "acme/toy", "reads files"),
        ("alias added", "toy acme/toy", ""),
        ("namespace suspended", "acme", "stolen token"),
    ]


def test_mistakes_are_named(hub):
    with pytest.raises(UnknownNameError, match="'acme'"):
        hub.store.suspend("acmee", reason="why", is_withheld=False)
    with pytest.raises(ConfigError, match="one line"):
        hub.store.suspend("acme", reason="two\nlines", is_withheld=False)
    with pytest.raises(ConfigError, match=r"'acme' .*suspended"):
        hub.store.restore("acme", reason="why")
    assert hub.store.namespaces() == [("acme", "active")]


def test_records_of_the_first_version_are_taken_over(tmp_path):
    script = (Path(telescope_envs.server.__file__).parent / "schema.sql").read_text()
    with closing(sqlite3.connect(tmp_path / "hub.sqlite3")) as old:
        old.executescript(f"{script}; PRAGMA user_version = 1;")
        old.execute("INSERT INTO namespaces VALUES ('acme', 'active', '[]', datetime('now'))")
        old.commit()
    with closing(HubStore(tmp_path)) as store:
        assert store.namespaces() == [("acme", "active")]
        assert store.publish(toy_publication())
        store.suspend("acme", reason="why", is_withheld=True)
        times = [datetime.fromisoformat(entry.at) for entry in store.audit()]
        assert (len(times), times) == (3, sorted(times))
        assert store.catalog() == []
