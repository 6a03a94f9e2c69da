"""The records of the server: nothing that was said can be changed or removed."""

import sqlite3
import tomllib
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from tests.envs.projects import toy_publication

from telescope_cli import main as cli
from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.records.catalog import read_catalog
from telescope_envs.records.files import sha256_of
from telescope_envs.registry import Registry
from telescope_envs.registry.resolving import resolve
from telescope_envs.rules.check import check_registry
from telescope_envs.server import database
from telescope_envs.server.app import ServerOptions
from telescope_envs.server.database import FILE, failures_named
from telescope_envs.server.hub import HubStore, opened_hub
from telescope_envs.server.run import serve


@pytest.fixture
def store(tmp_path):
    with closing(HubStore(tmp_path / "hub")) as store:
        store.add_namespace("acme", [{"kind": "user", "id": "ann"}])
        store.publish(toy_publication())
        store.add_alias("toy", "acme/toy")
        yield store


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE releases SET line = ''", "a release is never changed"),
        ("DELETE FROM releases", "a release is never removed"),
        ("REPLACE INTO releases SELECT * FROM releases", "a release is never removed"),
        ("UPDATE artifacts SET sha256 = ''", "an artifact is never changed"),
        ("DELETE FROM artifacts", "an artifact is never removed"),
        ("UPDATE statuses SET record = ''", "a status is never changed"),
        ("DELETE FROM statuses", "a status is never removed"),
        ("UPDATE aliases SET environment = 'acme/other'", "an alias is never reassigned"),
        ("REPLACE INTO aliases VALUES ('toy', 'acme/other', '')", "an alias is never removed"),
    ],
)
def test_what_was_said_stays_said(store, statement, message):
    before = [store.read(f) for f in ("index/acme/toy.jsonl", "status/acme/toy.json")]
    with pytest.raises(sqlite3.IntegrityError, match=message), store.database.transaction() as w:
        w.execute(statement)
    assert [store.read(f) for f in ("index/acme/toy.jsonl", "status/acme/toy.json")] == before
    assert store.read("aliases.toml").endswith(b'[aliases]\ntoy = "acme/toy"\n')


def test_everything_is_there_after_opening_again(store):
    before = [store.read(f"{f}/acme/toy.{e}") for f, e in (("index", "jsonl"), ("status", "json"))]
    namespace = store.read("namespaces/acme.toml")
    assert namespace == b'owner = "acme"\nstatus = "active"\n\n[[publishers]]\n' + (
        b'kind = "user"\nid = "ann"\n'
    )
    store.close()
    with closing(HubStore(store.data, must_exist=True)) as again:
        assert again.read("namespaces/acme.toml") == namespace
        after = [
            again.read(f"{f}/acme/toy.{e}") for f, e in (("index", "jsonl"), ("status", "json"))
        ]
    assert after == before


def test_records_of_a_later_version_are_refused(store):
    with store.database.transaction() as writer:
        writer.execute("PRAGMA user_version = 99")
    store.close()
    before = (store.data / FILE).read_bytes()
    with pytest.raises(RegistryError, match=r"newer .*format 99"):
        HubStore(store.data)
    assert (store.data / FILE).read_bytes() == before


def test_a_file_that_holds_no_records_is_refused(tmp_path):
    path = tmp_path / FILE
    path.write_text("x" * 4096)
    with pytest.raises(RegistryError) as refusal:
        HubStore(tmp_path)
    assert str(path) in str(refusal.value)
    assert path.read_text() == "x" * 4096


def test_what_the_disk_refuses_names_the_file_and_what_to_do(store):
    def full(writer):
        (pages,) = writer.execute("PRAGMA page_count").fetchone()
        writer.execute(f"PRAGMA max_page_count = {pages}")
        writer.execute("INSERT INTO settings VALUES ('x', ?)", ("x" * 200_000,))

    def read_only(writer):
        writer.execute("PRAGMA query_only = ON")
        writer.execute("INSERT INTO settings VALUES ('x', 'y')")

    for change, message in (
        (full, "its disk is full .*; make room, then try again"),
        (read_only, "it cannot be written .*; run this as the user who owns it"),
    ):
        with (
            pytest.raises(RegistryError, match=f"{FILE}: {message}"),
            opened_hub(store.data) as hub,
            hub.database.transaction() as writer,
        ):
            change(writer)
    with (
        pytest.raises(sqlite3.OperationalError, match="no such table"),
        opened_hub(store.data) as h,
    ):
        h.database.rows("SELECT * FROM missing")


def test_a_database_that_another_process_keeps_locked_is_named(store, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_LIMIT_S", 0.01)
    with (
        store.database.transaction(),
        pytest.raises(RegistryError, match=rf"{FILE}: another process .*locked.*; try again"),
        opened_hub(store.data),
    ):
        pass


@pytest.mark.parametrize("page", [2, -1])
def test_damage_is_found_before_anything_is_served(store, page):
    store.close()
    path = store.data / FILE
    whole = bytearray(path.read_bytes())
    at = page * 4096 % len(whole)
    whole[at : at + 4096] = b"\xa5" * 4096
    path.write_bytes(whole)
    with (
        pytest.raises(RegistryError, match=rf"{FILE}: it is damaged .*; .*from a backup"),
        opened_hub(store.data) as hub,
    ):
        serve(hub, ServerOptions(), port=0, started=lambda address: pytest.fail("it was served"))


@pytest.mark.parametrize("is_emptied", [False, True])
def test_lost_records_are_not_replaced_by_none(store, is_emptied):
    store.close()
    path = store.data / FILE
    path.unlink()
    if is_emptied:
        path.touch()
    for _ in range(2):
        with pytest.raises(RegistryError, match=rf"{FILE} is missing or empty, .*from a backup"):
            HubStore(store.data)


def test_reading_changes_nothing_and_needs_no_files_beside_the_records(store):
    store.close()
    (store.data / "reserved.txt").unlink()
    before = {path: path.stat().st_mtime_ns for path in store.data.rglob("*")}
    with opened_hub(store.data, is_read_only=True) as hub:
        assert hub.namespaces() == [("acme", "active")]
        with pytest.raises(RegistryError), failures_named(hub.database.path):
            hub.rename("other")
    assert {path: path.stat().st_mtime_ns for path in store.data.rglob("*")} == before
    # SQLite cannot make the file that it needs here, as in a folder that cannot be written.
    (store.data / f"{FILE}-shm").mkdir()
    with pytest.raises(RegistryError, match=f"{FILE}: it cannot be written"):
        HubStore(store.data)
    with opened_hub(store.data, is_read_only=True) as hub:
        assert [entry.event for entry in hub.audit()][:1] == ["namespace added"]


def test_a_mistyped_folder_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="is not the data folder of a served registry"):
        HubStore(tmp_path / "typo", must_exist=True)
    assert not (tmp_path / "typo").exists()


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["hub", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_the_folder_of_a_server_is_checked_and_rendered_while_it_is_open(store, tmp_path, capsys):
    assert run("check", store.data) == 0
    assert "all passed" in capsys.readouterr().out
    assert run("render", store.data, tmp_path / "view") == 0
    view = Registry.at(tmp_path / "view")
    release = resolve(view, "toy")
    assert (release.id, view.config.api) == ("acme/toy", "")
    assert sha256_of(view.wheel_bytes(release)) == release.wheel.sha256
    assert check_registry(tmp_path / "view").findings == []


def test_what_is_listed_is_of_one_moment(store):
    with opened_hub(store.data, is_read_only=True) as hub:
        files = hub.listing()
        store.publish(toy_publication("0.2.0"))
        assert check_registry(store.data, files=files).findings == []
        assert not any("0.2.0" in path for path in files.paths)


def test_what_is_withheld_is_not_rendered(store, tmp_path):
    store.suspend("acme", reason="a court", is_withheld=True)
    assert run("render", store.data, tmp_path / "view") == 0
    view = Registry.at(tmp_path / "view")
    assert read_catalog((tmp_path / "view/v1/index.json").read_bytes(), "").rows == []
    assert not (tmp_path / "view/artifacts").exists()
    assert not list((tmp_path / "view/simple").glob("*/*"))
    with pytest.raises(RegistryError, match="'acme' is suspended"):
        resolve(view, "toy")


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("ending", [".whl", ".metadata", ".sigstore.json"])
def test_files_that_a_backup_lacks_are_named(store, capsys, caplog, ending, is_cut):
    bundle = b"{}"
    publication = toy_publication("0.2.0", attestation_sha256=sha256_of(bundle))
    store.publish(replace(publication, attestation=bundle))
    store.check()
    assert caplog.messages == []
    path = f"artifacts/{publication.release.wheel.filename}{'' if ending == '.whl' else ending}"
    file = store.stored_artifact(path).path
    if is_cut:
        file.write_bytes(b"")
    else:
        file.unlink()
    assert store.lost_files() == [path]
    store.check()
    assert path in caplog.text
    assert run("check", store.data) == 1
    assert path in " ".join(capsys.readouterr().out.split())
    if ending == ".whl":
        assert run("render", store.data, store.data.with_name("view")) == RegistryError.exit_code
        assert path.partition("/")[2] in " ".join(capsys.readouterr().err.split())


def test_only_its_owner_may_read_the_records(store):
    assert store.database.path.stat().st_mode & 0o777 == 0o600


def test_reserved_owners_and_aliases_of_nothing_are_refused(store):
    with pytest.raises(RegistryError, match="'admin' is reserved"):
        store.add_namespace("admin", [])
    assert [name for name, _ in store.namespaces()] == ["acme"]
    for name in ("telescope", "telescope-adapters"):
        with pytest.raises(RegistryError, match=f"'{name}' is reserved"):
            store.add_alias(name, "acme/toy")
    with pytest.raises(ConfigError, match="'acme/toy'"):
        store.add_alias("other", "acme/toi")
    store.publish(toy_publication(name="another"))
    with pytest.raises(RegistryError, match=r"'toy' .*acme/toy"):
        store.add_alias("toy", "acme/another")
    assert tomllib.loads(store.read("aliases.toml").decode())["aliases"] == {"toy": "acme/toy"}


def test_a_catalogue_follows_every_change(store):
    def versions() -> list[tuple[str, str, int]]:
        return [(row.id, row.version, row.num_releases) for row in store.catalog()]

    assert versions() == [("acme/toy", "0.1.0", 1)]
    store.publish(toy_publication("0.2.0"))
    assert versions() == [("acme/toy", "0.2.0", 2)]
    store.change_status("acme/toy", lambda s: s.changed(yanked={"0.2.0": "wrong"}))
    assert versions() == [("acme/toy", "0.1.0", 2)]


def test_of_two_operators_who_give_one_name_the_later_one_is_told(store, monkeypatch):
    store.publish(toy_publication(name="another"))
    begun = store.database.transaction

    @contextmanager
    def after_somebody_else():
        with closing(HubStore(store.data)) as other:
            other.add_alias("short", "acme/toy")
        with begun() as writer:
            yield writer

    monkeypatch.setattr(store.database, "transaction", after_somebody_else)
    with pytest.raises(RegistryError, match=r"'short' points to acme/toy"):
        store.add_alias("short", "acme/another")
