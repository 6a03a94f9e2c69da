"""Writers of one registry that race, run out of disk, or are killed at any moment."""

import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry

from telescope_core.errors import RegistryError
from telescope_envs.records.files import locked
from telescope_envs.registry import Registry
from telescope_envs.registry.stores.folder import LocalStore

FORK = multiprocessing.get_context("fork")
WAIT_S = 120
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


@pytest.fixture
def place(tmp_path) -> Path:
    """A registry with acme/toy 0.1.0 to 0.4.0."""
    store = write_registry(tmp_path / "registry").store
    for minor in range(1, 5):
        store.publish(toy_publication(f"0.{minor}.0"))
    return tmp_path / "registry"


def files_of(place: Path) -> dict[str, bytes]:
    """Return what a reader may see."""
    files = [path for path in place.rglob("*") if path.is_file()]
    named = {path.relative_to(place).as_posix(): path.read_bytes() for path in files}
    return {path: data for path, data in named.items() if not path.startswith(".telescope/")}


def leftovers(place: Path) -> list[str]:
    """Return the half-written files that are still there."""
    return sorted(path.name for path in (place / ".telescope").rglob("*") if path.is_file())


def outcome_of(call: Callable[[], object]) -> str:
    """Return what `call` returned or said, from a process of its own."""
    (outcome,) = outcomes_of([call])
    return outcome


def outcomes_of(calls: list[Callable[[], object]]) -> list[str]:
    """Return what each call returned or said, each in a process of its own, all at once."""
    barrier, pipes = FORK.Barrier(len(calls)), [FORK.Pipe(duplex=False) for _ in calls]

    def run(call, sender) -> None:
        barrier.wait(WAIT_S)
        try:
            sender.send(str(call()))
        except RegistryError as error:
            sender.send(str(error))

    children = [
        FORK.Process(target=run, args=(call, sender))
        for call, (_, sender) in zip(calls, pipes, strict=True)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(WAIT_S)
        assert child.exitcode == 0
    return [receiver.recv() for receiver, _ in pipes]


def test_two_publishers_of_two_versions_both_succeed(place):
    publications = [toy_publication(version) for version in ("1.0.0", "2.0.0")]
    outcomes = outcomes_of([lambda p=p: LocalStore(place).publish(p) for p in publications])
    assert outcomes == ["True", "True"]
    assert [r.version for r in Registry.at(place).releases("acme/toy")][4:] == ["1.0.0", "2.0.0"]
    assert leftovers(place) == [".gitignore", "lock"]


@pytest.mark.slow
def test_of_two_publishers_of_one_version_exactly_one_wins(place):
    publications = [toy_publication("1.0.0", code=f"Toy = {number}\n") for number in range(3)]
    outcomes = outcomes_of([lambda p=p: LocalStore(place).publish(p) for p in publications])
    assert outcomes.count("True") == 1
    lost = [outcome for outcome in outcomes if outcome != "True"]
    assert all("1.0.0 is already published with different bytes" in outcome for outcome in lost)
    registry = Registry.at(place)
    winner = publications[outcomes.index("True")]
    assert registry.releases("acme/toy")[-1] == winner.release
    assert registry.wheel_bytes(winner.release) == winner.wheel
    assert len(list((place / "artifacts").iterdir())) == 5


def test_a_writer_that_waits_too_long_says_for_whom(place):
    (place / ".telescope").mkdir(exist_ok=True)
    before = files_of(place)
    with (
        locked(place / ".telescope/lock", wait_s=0, what="it"),
        pytest.raises(RegistryError, match=rf"another process \(id {os.getpid()}\) .* try again"),
    ):
        LocalStore(place, lock_wait_s=0.05).publish(toy_publication("1.0.0"))
    assert files_of(place) == before
    assert LocalStore(place, lock_wait_s=0).publish(toy_publication("1.0.0")) is True


@pytest.mark.parametrize(
    ("limit_bytes", "code"),
    [(20_000, f"Toy = '{'x' * 40_000}'\n"), (4_000, "Toy = None\n")],
    ids=["in-the-wheel", "in-the-index"],
)
def test_a_full_disk_leaves_nothing_behind(place, limit_bytes, code):
    publication = toy_publication("1.0.0", code=code)
    index = (place / "index/acme/toy.jsonl").stat().st_size
    assert (len(publication.wheel) > limit_bytes) != (len(publication.wheel) < limit_bytes < index)
    before = files_of(place)

    def publish() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        return LocalStore(place).publish(publication)

    said = outcome_of(publish)
    assert "cannot be changed: File too large" in said
    assert said.endswith("nothing was changed")
    assert files_of(place) == before
    assert leftovers(place) == [".gitignore", "lock"]
    assert LocalStore(place).publish(publication) is True


def publish_and_die(place: Path, publication, moment: int) -> None:
    """Publish; kill -9 this process when it touches a file for the `moment`th time."""
    left = [moment]

    def count(event: str, arguments: tuple) -> None:
        if event in FILE_EVENTS and str(place) in str(arguments[0]):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    LocalStore(place).publish(publication)
    os._exit(0)


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_changes_nothing_or_all(place, tmp_path):
    publication = toy_publication("1.0.0")
    changed = toy_publication("1.0.0", code="Toy = 'corrected'\n")
    before = files_of(place)
    killed = 0
    for moment in range(100):
        trial = shutil.copytree(place, tmp_path / f"trial-{moment}")
        child = FORK.Process(target=publish_and_die, args=(trial, publication, moment))
        child.start()
        child.join(WAIT_S)
        releases = Registry.at(trial).releases("acme/toy")
        is_published = len(releases) == 5
        assert all(toy_publication(r.version).wheel == wheel_of(trial, r) for r in releases)
        if not is_published:
            assert (trial / "index/acme/toy.jsonl").read_bytes() == before["index/acme/toy.jsonl"]
        assert Registry.at(trial).catalog()[0].num_releases == len(releases)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        killed += 1
        if is_published:
            assert LocalStore(trial, lock_wait_s=0).publish(publication) is False
        else:
            assert LocalStore(trial, lock_wait_s=0).publish(changed) is True
            assert wheel_of(trial, changed.release) == changed.wheel
        assert set(files_of(trial)) == {*before, changed.release.wheel.urls[0]}
    assert killed > 8, "the moments at which a writer touches files"
    assert is_published


def wheel_of(place: Path, release) -> bytes:
    return Registry.at(place).wheel_bytes(release)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda p: (p / "namespaces/acme.toml").unlink(), "nobody may publish as 'acme'"),
        (
            lambda p: (p / "namespaces/acme.toml").write_text(
                'owner = "acme"\nstatus = "suspended"\n'
            ),
            "namespace 'acme' is suspended",
        ),
        (
            lambda p: (p / "namespaces/acme.toml").write_text('owner = "other"\n'),
            "belongs to owner 'other'",
        ),
        (lambda p: (p / "reserved.txt").write_text("Toy\n"), "'toy' is a reserved name"),
        (lambda p: (p / "index/acme/toy.jsonl").write_text("{"), "its writer was interrupted"),
    ],
    ids=["unowned", "suspended", "of-another", "reserved", "torn-index"],
)
def test_what_may_not_be_published_leaves_nothing_behind(place, plant, message):
    plant(place)
    before = files_of(place)
    with pytest.raises(RegistryError, match=message):
        LocalStore(place).publish(toy_publication("1.0.0"))
    assert files_of(place) == before


def test_a_name_that_would_be_the_same_package_is_refused(place):
    for owner in ("acme-toy", "acme"):
        (place / f"namespaces/{owner}.toml").write_text(f'owner = "{owner}"\n')
    assert LocalStore(place).publish(toy_publication(name="toy-two")) is True
    before = files_of(place)
    with pytest.raises(RegistryError, match=r"which acme/toy-two already uses"):
        LocalStore(place).publish(toy_publication(owner="acme-toy", name="two"))
    assert files_of(place) == before


@pytest.mark.parametrize("url", ["../x.whl", "index/acme/toy.jsonl", "https://example.org/{}"])
def test_a_wheel_that_would_be_stored_elsewhere_is_refused(place, url):
    publication = toy_publication("1.0.0")
    filename = publication.release.wheel.filename
    wheel = publication.release.wheel.changed(urls=(url.format(filename),))
    before = files_of(place)
    with pytest.raises(RegistryError, match="needs a URL relative to the registry"):
        LocalStore(place).publish(toy_publication("1.0.0", wheel=wheel))
    assert files_of(place) == before
