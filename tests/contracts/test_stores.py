"""What every store of a registry does, whatever kind of place it is; places: store_places.py."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.contracts.store_places import READABLE, WRITABLE
from tests.envs.projects import toy_publication, write_registry

from telescope_core.errors import RegistryError
from telescope_envs.records.release import (
    Deprecation,
    Status,
)
from telescope_envs.registry import Registry, resolve
from telescope_envs.registry.stores import (
    Store,
    WritableStore,
)
from telescope_envs.registry.stores.folder import LocalStore

OUTSIDE = [
    "../config.json",
    "index/../../secret",
    "/etc/hostname",
    "https://example.org/x.whl",
    ".git/config",
    "index/.hidden",
    "artifacts//x.whl",
    "artifacts/..\\x.whl",
    "artifacts/%2e%2e/x.whl",
    "artifacts/x.whl\0",
    "",
]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A registry with three releases of acme/toy, one of them yanked, and one of acme/other."""
    root = tmp_path_factory.mktemp("published") / "tree"
    store = write_registry(root).store
    assert isinstance(store, LocalStore)
    for version in ("0.9.0", "0.10.0", "1.0.0"):
        store.publish(toy_publication(version, tags=("fun", "yes")))
    store.publish(toy_publication("0.1.0", name="other"))
    store.change_status("acme/toy", lambda status: Status(yanked={"1.0.0": "wrong answers"}))
    deprecation = Deprecation(reason="too easy", replacement="acme/toy")
    store.change_status("acme/other", lambda status: Status(deprecated=deprecation))
    return root


@pytest.fixture
def tree(published, tmp_path) -> Path:
    """Files of that registry that a test may change."""
    return Path(shutil.copytree(published, tmp_path / "tree"))


@pytest.fixture(params=sorted(READABLE))
def readable(request, tree) -> Iterator[Callable[[], Store]]:
    with READABLE[request.param](tree) as open_store:
        yield open_store


@pytest.fixture(params=sorted(WRITABLE))
def writable(request, tree) -> Iterator[Callable[[], WritableStore]]:
    with WRITABLE[request.param](tree) as open_store:
        yield open_store


def test_files_are_read_as_they_are(readable, tree):
    store = readable()
    for path in ("config.json", "aliases.toml", "namespaces/acme.toml", "index/acme/toy.jsonl"):
        assert store.read(path) == (tree / path).read_bytes()
    store.close()
    store.close()


def test_what_is_not_there_is_none(readable):
    store = readable()
    for path in ("index/acme/none.jsonl", "nothing", "index", "config.json/x"):
        assert store.read(path) is None, path


def test_no_path_leads_out_of_a_registry(readable, tree):
    (tree.parent / "secret").write_text("secret")
    (tree / ".git").mkdir()
    (tree / ".git/config").write_text("secret")
    store = readable()
    for path in OUTSIDE:
        assert store.read(path) is None, path
        if "://" not in path:
            assert store.artifact(path, max_bytes=1000) is None, path


def test_artifacts_are_whole_or_refused(readable):
    publication = toy_publication("0.10.0")
    (url,) = publication.release.wheel.urls
    size = len(publication.wheel)
    store = readable()
    assert store.artifact(url, max_bytes=size) == publication.wheel
    with pytest.raises(RegistryError, match=f"longer than {size - 1} bytes"):
        store.artifact(url, max_bytes=size - 1)
    assert store.artifact("artifacts/none.whl", max_bytes=size) is None


def test_the_revision_stays_while_reading(readable):
    store = readable()
    before = store.revision
    Registry(store).releases("acme/toy")
    store.catalog()
    assert store.revision == before
    assert readable().revision == before


def test_the_catalogue_has_one_row_for_each_environment(readable):
    other, toy = readable().catalog()
    assert (toy.id, toy.version, toy.num_releases) == ("acme/toy", "0.10.0", 3), "1.0.0 is yanked"
    assert (toy.summary, toy.license, toy.verdict) == ("Says yes", "MIT", "none")
    assert (toy.tags, toy.deprecated) == (("fun", "yes"), "")
    assert toy.published_at == "2026-11-21T12:00:00Z"
    assert (other.id, other.deprecated) == ("acme/other", "too easy")


def test_a_registry_over_it_resolves(readable):
    registry = Registry(readable())
    release = resolve(registry, "toy")
    assert (release.id, release.version) == ("acme/toy", "0.10.0")
    assert registry.wheel_bytes(release) == toy_publication("0.10.0").wheel


def test_what_is_published_is_read_by_the_next_client(writable):
    publication = toy_publication("1.1.0", summary="Says no", attestation_sha256="")
    before = Registry(writable()).releases("acme/toy")
    assert writable().publish(publication) is True
    registry = Registry(writable())
    assert registry.releases("acme/toy") == [*before, publication.release]
    assert registry.wheel_bytes(publication.release) == publication.wheel
    (toy,) = (row for row in registry.catalog() if row.id == "acme/toy")
    assert (toy.version, toy.summary, toy.num_releases) == ("1.1.0", "Says no", 4)


def test_a_first_release_needs_nothing_there(writable):
    publication = toy_publication("0.1.0", name="brand-new")
    assert writable().publish(publication) is True
    assert Registry(writable()).releases("acme/brand-new") == [publication.release]


def test_the_index_only_grows(writable):
    before = writable().read("index/acme/toy.jsonl")
    writable().publish(toy_publication("1.1.0"))
    after = writable().read("index/acme/toy.jsonl")
    assert after.startswith(before)
    assert after.count(b"\n") == before.count(b"\n") + 1
    assert after.endswith(b"}\n")


def test_the_same_bytes_again_are_a_success_that_changes_nothing(writable):
    before = writable().read("index/acme/toy.jsonl")
    assert writable().publish(toy_publication("0.10.0")) is False
    assert writable().read("index/acme/toy.jsonl") == before


def refused(open_store: Callable[[], WritableStore], publication, message: str) -> None:
    """Publishing raises `message` and leaves no trace."""
    paths = [f"index/{publication.release.id}.jsonl", *publication.release.wheel.urls]
    before = [open_store().read(path) for path in paths]
    with pytest.raises(RegistryError, match=message):
        open_store().publish(publication)
    assert [open_store().read(path) for path in paths] == before


@pytest.mark.parametrize("version", ["0.10.0", "0.10"])
def test_other_bytes_for_a_version_are_refused(writable, version):
    refused(
        writable,
        toy_publication(version, code="Toy = None\n"),
        "already published with different bytes",
    )


def test_bytes_that_are_not_those_of_the_record_are_refused(writable):
    other = toy_publication("1.1.0", code="Toy = None\n").release.wheel
    wheel = toy_publication("1.1.0").release.wheel
    for fields in ({"sha256": other.sha256}, {"size": wheel.size + 1}):
        changed = toy_publication("1.1.0", wheel=wheel.changed(**fields))
        refused(writable, changed, "not the one that was published|expected .* bytes")


def test_a_namespace_that_nobody_owns_is_refused(writable):
    refused(writable, toy_publication(owner="evil"), "nobody may publish as 'evil'")


def test_a_status_is_replaced_whole(writable):
    def yank(status: Status) -> Status:
        return status.changed(yanked={**status.yanked, "0.9.0": "typo"})

    changed = writable().change_status("acme/toy", yank)
    assert changed.yanked == {"1.0.0": "wrong answers", "0.9.0": "typo"}
    assert Registry(writable()).status("acme/toy") == changed


@pytest.mark.parametrize(
    ("environment_id", "message"),
    [
        ("acme/none", "no published version"),
        ("acme/toy", "cannot yank 7.0: acme/toy has no such version"),
    ],
)
def test_a_status_of_what_is_not_published_is_refused(writable, environment_id, message):
    before = writable().read(f"status/{environment_id}.json")
    with pytest.raises(RegistryError, match=message):
        writable().change_status(environment_id, lambda status: Status(yanked={"7.0": "why"}))
    assert writable().read(f"status/{environment_id}.json") == before


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """Return what each call returned or raised, all begun together."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


@pytest.mark.slow
def test_publishers_of_different_versions_at_once_both_succeed(writable):
    versions = ["2.0.0", "2.1.0", "2.2.0", "2.3.0"]
    publications = [toy_publication(version) for version in versions]
    outcomes = at_once([lambda p=p: writable().publish(p) for p in publications])
    assert outcomes == [True] * 4
    known = [release.version for release in Registry(writable()).releases("acme/toy")]
    assert known == ["0.9.0", "0.10.0", "1.0.0", *versions]


@pytest.mark.slow
def test_of_publishers_of_one_version_at_once_exactly_one_wins(writable):
    publications = [toy_publication("2.0.0", code=f"Toy = {number}\n") for number in range(4)]
    outcomes = at_once([lambda p=p: writable().publish(p) for p in publications])
    assert outcomes.count(True) == 1
    lost = [outcome for outcome in outcomes if outcome is not True]
    assert [type(error) for error in lost] == [RegistryError] * 3
    winner = publications[outcomes.index(True)]
    registry = Registry(writable())
    assert registry.releases("acme/toy")[-1] == winner.release
    stored = registry.wheel_bytes(winner.release)
    assert hashlib.sha256(stored).hexdigest() == winner.release.wheel.sha256


def test_status_changes_at_once_are_all_kept(writable):
    def yank(version: str) -> Callable[[Status], Status]:
        return lambda status: Status(yanked={**status.yanked, version: "typo"})

    writable().change_status("acme/toy", lambda status: Status())
    versions = ["0.9.0", "0.10.0", "1.0.0"]
    at_once([lambda v=v: writable().change_status("acme/toy", yank(v)) for v in versions])
    assert sorted(Registry(writable()).status("acme/toy").yanked) == sorted(versions)
