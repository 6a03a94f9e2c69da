"""`telescope hub check`: every invariant, broken on purpose, is found by its own check."""

import json
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.publish.status import deprecate, unyank, yank
from telescope_envs.records.release import Status
from telescope_envs.records.schemas import write_schemas
from telescope_envs.registry import Registry
from telescope_envs.registry.static_view import render
from telescope_envs.rules.check import check_registry
from telescope_envs.rules.tree import (
    CHECKS,
    TreeFinding,
)

ROOT = Path(__file__).parents[3]
INDEX = "index/acme/toy.jsonl"
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(place: Path, *arguments: str) -> None:
    subprocess.run([*GIT, *arguments], cwd=place, check=True, capture_output=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A registry in a git repository of its own: two releases of acme/toy, one of acme/other."""
    place = tmp_path_factory.mktemp("prepared") / "registry"
    registry = write_registry(place)
    for publication in (
        toy_publication("0.1.0"),
        toy_publication("0.2.0"),
        toy_publication(name="other"),
    ):
        registry.store.publish(publication)
    (place / "reserved.txt").write_text("numpy\n")
    git(place, "init", "--quiet", "--initial-branch=main")
    commit(place)
    return place


@pytest.fixture
def committed(prepared, tmp_path) -> Path:
    """A copy of the prepared registry, with its history."""
    return shutil.copytree(prepared, tmp_path / "registry")


@pytest.fixture
def place(committed) -> Path:
    """The same without a history."""
    shutil.rmtree(committed / ".git")
    (committed / "status/acme").mkdir(parents=True, exist_ok=True)
    return committed


def commit(place: Path) -> None:
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--allow-empty", "--message=change")


def findings(place: Path, **options) -> list[TreeFinding]:
    return check_registry(place, **options).findings


def edit(place: Path, path: str, old: str, new: str) -> None:
    text = (place / path).read_text()
    assert old in text
    (place / path).write_text(text.replace(old, new))


def append(place: Path, publication) -> None:
    with (place / f"index/{publication.release.id}.jsonl").open("a") as lines:
        lines.write(f"{publication.release.as_json().decode()}\n")
    (place / publication.release.wheel.urls[0]).write_bytes(publication.wheel)


def test_the_committed_registry_holds():
    report = check_registry(ROOT / "registry")
    assert report.findings == []
    assert (ROOT / "registry/schema").is_dir()
    sources = ROOT / "packages/telescope-envs/environments"
    assert report.num_environments == len([*sources.glob("*/pyproject.toml")])


def test_a_registry_that_holds_has_no_findings(committed):
    report = check_registry(committed)
    assert (report.findings, report.notes) == ([], [])
    assert (report.num_environments, report.num_releases, report.num_commits) == (2, 3, 1)
    assert report.unchecked == []


def other_owner(place: Path) -> None:
    (place / "namespaces/acme-toy.toml").write_text('owner = "acme-toy"\n')
    (place / "namespaces/acme.toml").write_text('owner = "acme"\n')
    for owner, name in (("acme", "toy-two"), ("acme-toy", "two")):
        (place / f"index/{owner}").mkdir(exist_ok=True)
        append(place, toy_publication(owner=owner, name=name))


def requirement(text: str):
    def plant(place: Path) -> None:
        edit(place, "index/acme/other.jsonl", '"telescope-core"', json.dumps(text))

    return plant


def wheel_of_other_version(place: Path) -> None:
    """A wheel whose digest is in the index, but which says something else than the index."""
    edit(place, "index/acme/other.jsonl", '"requires_python":">=3.11"', '"requires_python":">=3"')


def later(place: Path) -> None:
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    edit(place, "index/acme/other.jsonl", "2026-11-21T12:00:00Z", tomorrow)


def remove(place: Path, version: str, **changed: str) -> None:
    """Name a release of acme/toy in the list of removed ones, and remove nothing."""
    wheel = toy_publication(version).release.wheel
    fields = {"id": "acme/toy", "version": version, "sha256": wheel.sha256, "reason": "a secret"}
    lines = "".join(f'{key} = "{text}"\n' for key, text in {**fields, **changed}.items())
    with (place / "removed.toml").open("a") as listed:
        listed.write(f"[[removed]]\n{lines}")


PLANTS = {
    "config-missing": ("config", "config.json", lambda p: (p / "config.json").write_text("{")),
    "namespace-gone": ("namespace", "index/acme/", lambda p: (p / "namespaces/acme.toml").unlink()),
    "namespace-of-other": (
        "namespace",
        "namespaces/corp.toml",
        lambda p: (p / "namespaces/corp.toml").write_text('owner = "acme"'),
    ),
    "line-broken": ("index-line", f"{INDEX}:2", lambda p: edit(p, INDEX, '"0.2.0"', "2")),
    "line-of-other": (
        "index-line",
        f"{INDEX}:1",
        lambda p: edit(p, INDEX, '"name":"toy","version":"0.1.0"', '"name":"to","version":"0.1.0"'),
    ),
    "no-lines": ("index-line", INDEX, lambda p: (p / INDEX).write_text("")),
    "line-half": (
        "index-line",
        f"{INDEX}:3",
        lambda p: (p / INDEX).write_text((p / INDEX).read_text() + '{"schema":1'),
    ),
    "version-twice": (
        "version-once",
        f"{INDEX}:3",
        lambda p: append(p, toy_publication("0.2")),
    ),
    "time-in-future": ("published-at", "index/acme/other.jsonl:1", later),
    "time-backwards": (
        "published-at",
        f"{INDEX}:3",
        lambda p: append(p, toy_publication("3.0", published_at=datetime(2020, 1, 1, tzinfo=UTC))),
    ),
    "protocol": (
        "index-line",
        f"{INDEX}:1",
        lambda p: edit(p, INDEX, '"maximum":"1.0"', '"maximum":"0.5"'),
    ),
    "needs-address": ("requirement", "index/acme/other.jsonl:1", requirement("x @ git+https://x")),
    "needs-environment": (
        "requirement",
        "index/acme/other.jsonl:1",
        requirement("telescope-env-acme-toy"),
    ),
    "same-distribution": ("unique-name", "index/acme/toy-two.jsonl", other_owner),
    "reserved-alias": (
        "reserved-name",
        "aliases.toml",
        lambda p: edit(p, "aliases.toml", "toy =", 'numpy = "acme/toy"\ntoy ='),
    ),
    "reserved-name": (
        "reserved-name",
        INDEX,
        lambda p: edit(p, "reserved.txt", "numpy", "toy\n"),
    ),
    "alias-to-nothing": (
        "alias",
        "aliases.toml",
        lambda p: edit(p, "aliases.toml", "acme/toy", "acme/toi"),
    ),
    "alias-unreadable": ("alias", "aliases.toml", lambda p: (p / "aliases.toml").write_text("=")),
    "wheel-gone": (
        "artifact",
        f"{INDEX}:2",
        lambda p: next((p / "artifacts").glob("*toy-0.2*")).unlink(),
    ),
    "wheel-changed": (
        "artifact",
        f"{INDEX}:2",
        lambda p: next((p / "artifacts").glob("*toy-0.2*")).write_bytes(b"PK"),
    ),
    "wheel-unlike-index": ("wheel", "index/acme/other.jsonl:1", wheel_of_other_version),
    "status-of-nothing": (
        "status",
        "status/acme/none.json",
        lambda p: (p / "status/acme/none.json").write_text("{}"),
    ),
    "status-of-no-version": (
        "status",
        "status/acme/toy.json",
        lambda p: (p / "status/acme/toy.json").write_text('{"yanked": {"9.0": "why"}}'),
    ),
    "status-unreadable": (
        "status",
        "status/acme/toy.json",
        lambda p: (p / "status/acme/toy.json").write_text("[]"),
    ),
    "removed-unreadable": (
        "removed",
        "removed.toml",
        lambda p: (p / "removed.toml").write_text('removed = ["toy"]'),
    ),
    "removed-but-there": ("removed", "removed.toml", lambda p: remove(p, "0.2.0")),
    "removed-and-published-again": (
        "removed",
        "removed.toml",
        lambda p: remove(p, "0.2.0", sha256="0" * 64),
    ),
    "layout": ("layout", "index/stray.txt", lambda p: (p / "index/stray.txt").write_text("")),
}


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_is_found(place, name):
    check, where, plant = PLANTS[name]
    plant(place)
    found = findings(place)
    assert (check, where) in {(finding.check, finding.where) for finding in found}, found
    assert all(finding.fix and finding.what for finding in found)


def test_a_stale_schema_is_found(place):
    write_schemas(place)
    assert findings(place) == []
    edit(place, "schema/status.json", "yanked", "pulled")
    (place / "schema/old.json").write_text("{}")
    (place / "schema/config.json").unlink()
    found = [(finding.check, finding.where) for finding in findings(place)]
    assert found == [("schema", f"schema/{name}.json") for name in ("config", "old", "status")]


def test_every_check_is_planted_somewhere():
    planted = {check for check, *_ in PLANTS.values()} | {"schema", "history", "alias-history"}
    assert planted == set(CHECKS)


HISTORY = {
    "edited": (lambda lines: [lines[0].replace("Says yes", "Says no"), lines[1]], ":1", "changed"),
    "removed": (lambda lines: lines[1:], ":1", "moved|removed"),
    "last-removed": (lambda lines: lines[:1], ":2", "removed"),
    "reordered": (lambda lines: lines[::-1], ":1", "moved"),
    "inserted": (lambda lines: [lines[0], lines[0], lines[1]], ":2", "moved"),
    "emptied": (lambda lines: [], ":1", "the file was removed"),
}


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("name", HISTORY)
def test_a_line_that_does_not_stay_is_found(committed, name, is_committed):
    change, line, what = HISTORY[name]
    lines = (committed / INDEX).read_text().splitlines(keepends=True)
    (committed / INDEX).write_text("".join(change(lines)))
    if is_committed:
        commit(committed)
    (finding,) = [found for found in findings(committed) if found.check == "history"]
    assert finding.where.startswith(f"{INDEX}{line}")
    assert (" in commit " in finding.where) == is_committed
    assert any(word in finding.what for word in what.split("|"))


def test_a_line_put_back_later_is_still_found(committed):
    whole = (committed / INDEX).read_text()
    (committed / INDEX).write_text(whole.splitlines(keepends=True)[0])
    commit(committed)
    (committed / INDEX).write_text(whole)
    commit(committed)
    (finding,) = findings(committed)
    assert (finding.check, finding.where[: len(INDEX)]) == ("history", INDEX)


@pytest.mark.slow
def test_what_was_removed_and_listed_is_accepted(committed):
    lines = (committed / INDEX).read_text().splitlines(keepends=True)
    wheel = next((committed / "artifacts").glob("*toy-0.1*"))
    wheel.unlink()
    remove(committed, "0.1.0")
    (finding,) = findings(committed)
    assert (finding.check, "without being yanked" in finding.what) == ("removed", True)
    Registry.at(committed).store.change_status("acme/toy", lambda _: Status(yanked={"0.1.0": "x"}))
    assert findings(committed) == [], "the wheel may be gone and its line stay"
    assert render(committed, committed.parent / "view")
    (committed / "status/acme/toy.json").unlink()
    (committed / INDEX).write_text(lines[1])
    commit(committed)
    assert findings(committed) == [], "and so may the line"
    (committed / INDEX).unlink()
    next((committed / "artifacts").glob("*toy-0.2*")).unlink()
    assert {f.check for f in findings(committed)} == {"history"}, "0.2.0 is not listed"
    remove(committed, "0.2.0")
    assert findings(committed) == [], "the bare name stays, and means nothing now"
    edit(committed, "removed.toml", "a secret", "")
    assert {f.check for f in findings(committed)} == {"removed", "alias", "history"}


def test_a_yanked_version_may_be_taken_down_and_its_status_still_changes(place):
    store = Registry.at(place).store
    store.change_status("acme/toy", lambda _: Status(yanked={"0.1.0": "a secret"}))
    (place / INDEX).write_text((place / INDEX).read_text().splitlines(keepends=True)[1])
    next((place / "artifacts").glob("*toy-0.1*")).unlink()
    (finding,) = findings(place)
    assert "yanks 0.1.0, which is not published" in finding.what
    remove(place, "0.1.0")
    assert findings(place) == []
    assert yank(store, "toy@0.2.0", reason="so does this").status.yanked.keys() == {
        "0.1.0",
        "0.2.0",
    }
    assert deprecate(store, "toy", reason="too easy").status.deprecated
    with pytest.raises(RegistryError, match=r"cannot yank 9\.0: "):
        store.change_status("acme/toy", lambda status: status.changed(yanked={"9.0": "why"}))
    with pytest.raises(ConfigError, match=r"has no version 0\.1;"):
        yank(store, "toy@0.1", reason="again")
    assert unyank(store, "toy@0.1").status.yanked.keys() == {"0.2.0"}
    assert findings(place) == []


def test_a_yanked_version_whose_line_cannot_be_read_was_published(place):
    Registry.at(place).store.change_status("acme/toy", lambda _: Status(yanked={"0.1.0": "why"}))
    edit(place, INDEX, '"version":"0.1.0","', '"version":"0.1.0","summary":1,"')
    assert [(one.check, one.where) for one in findings(place)] == [("index-line", f"{INDEX}:1")]


def test_what_was_removed_is_never_published_again(committed):
    (committed / INDEX).unlink()
    for version in ("0.1.0", "0.2.0"):
        remove(committed, version)
        with pytest.raises(RegistryError, match=r"was removed from this registry \(a secret\)"):
            Registry.at(committed).store.publish(toy_publication(version))
    assert Registry.at(committed).store.publish(toy_publication("0.3.0"))


def test_an_index_file_that_was_removed_is_found(committed):
    (committed / INDEX).unlink()
    (finding,) = [f for f in findings(committed) if f.check == "history"]
    assert finding.where.startswith(INDEX)
    assert "removed" in finding.what


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize(
    ("aliases", "what"),
    [('toy = "acme/other"', "now points to 'acme/other'"), ('yes = "acme/toy"', "is now missing")],
)
def test_a_bare_name_that_changed_its_meaning_is_found(committed, aliases, what, is_committed):
    (committed / "aliases.toml").write_text(f"[aliases]\n{aliases}\n")
    if is_committed:
        commit(committed)
    (finding,) = findings(committed)
    assert finding.check == "alias-history"
    assert finding.what == f"'toy' pointed to 'acme/toy' and {what}"


def test_what_was_appended_and_added_is_fine(committed):
    Registry.at(committed).store.publish(toy_publication("0.3.0"))
    edit(committed, "aliases.toml", "toy =", 'other = "acme/other"\ntoy =')
    assert findings(committed) == []
    commit(committed)
    report = check_registry(committed)
    assert (report.findings, report.num_commits) == ([], 2)


def test_merges_are_compared_with_their_first_parent(committed):
    git(committed, "checkout", "--quiet", "-b", "branch")
    Registry.at(committed).store.publish(toy_publication("0.3.0"))
    commit(committed)
    git(committed, "checkout", "--quiet", "main")
    commit(committed)
    git(committed, "merge", "--quiet", "--no-ff", "branch")
    assert findings(committed) == []
    edit(committed, INDEX, "Says yes", "Says no")
    git(committed, "commit", "--quiet", "--all", "--amend", "--no-edit")
    assert {finding.check for finding in findings(committed)} == {"history"}


@pytest.mark.slow
def test_a_branch_is_compared_with_where_it_left_the_other(committed):
    git(committed, "checkout", "--quiet", "-b", "branch")
    Registry.at(committed).store.publish(toy_publication("0.3.0"))
    commit(committed)
    git(committed, "checkout", "--quiet", "main")
    Registry.at(committed).store.publish(toy_publication("0.2.1"))
    commit(committed)
    git(committed, "checkout", "--quiet", "branch")
    assert findings(committed, against="main") == []
    git(committed, "checkout", "--quiet", "--orphan", "forged")
    edit(committed, INDEX, "Says yes", "Says no")
    commit(committed)
    assert findings(committed) == [], "a history of its own begins with any index"
    against = findings(committed, against="main")
    assert {finding.check for finding in against} == {"history"}
    steps: list[str] = []
    with pytest.raises(ConfigError, match="is not a commit or branch"):
        check_registry(committed, against="mian", progress=steps.append)
    assert steps == [], "nothing is checked before that is known"


def test_without_git_the_report_says_what_was_not_checked(place):
    report = check_registry(place)
    assert report.notes == ["history: not checked, because this folder is not in a git repository"]
    assert report.unchecked == ["history", "alias-history"]
    with pytest.raises(ConfigError, match="is not in a git repository"):
        check_registry(place, against="main")


def test_a_shallow_clone_says_so(committed, tmp_path):
    commit(committed)
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{committed}", "clone")
    (note,) = check_registry(tmp_path / "clone").notes
    assert "shallow clone" in note


def test_a_registry_in_a_folder_of_a_repository(committed, tmp_path):
    (tmp_path / "repository").mkdir()
    git(tmp_path / "repository", "init", "--quiet")
    inner = tmp_path / "repository" / "a" / "registry"
    inner.parent.mkdir()
    (committed / ".git").rename(tmp_path / "unused")
    committed.rename(inner)
    commit(tmp_path / "repository")
    assert check_registry(inner).num_commits == 1
    edit(inner, INDEX, "Says yes", "Says no")
    commit(inner)
    assert {finding.check for finding in findings(inner)} == {"history"}
