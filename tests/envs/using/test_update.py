"""`telescope env update`: the newest that fits, what changes, and what is never done unasked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.envs.projects import TOY, toy_publication, write_registry
from tests.envs.using.test_locator import install, lock

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.records.lockfile import LOCK_NAME, read_lock
from telescope_envs.records.release import (
    Dataset,
    RewardRange,
    Status,
)
from telescope_envs.registry.resolving import plan_update

__all__ = ["install"]


def plan(registry, before: str, *, allow_major: bool = False):
    release = next(one for one in registry.releases("acme/toy") if one.version == before)
    return plan_update(registry, release, allow_major=allow_major)


@pytest.fixture
def publish(registry):
    """Publish releases of the toy by version."""

    def versions(*listed: str, **fields) -> None:
        for version in listed:
            registry.store.publish(toy_publication(version, **fields))

    return versions


def test_a_new_major_version_is_never_chosen_unasked(registry, publish):
    publish("1.0.0", "1.1.0", "2.0.0")
    found = plan(registry, "1.0.0")
    assert found.after is not None
    assert found.after.version == "1.1.0"
    assert "2.0.0 is a new major version, whose scores are not comparable" in found.refused
    newest = plan(registry, "1.1.0")
    assert (newest.after, "--major" in newest.refused) == (None, True)
    asked = plan(registry, "1.1.0", allow_major=True)
    assert asked.after is not None
    assert (asked.after.version, asked.refused) == ("2.0.0", "")


def test_nothing_yanked_and_nothing_older_is_chosen(registry, publish):
    publish("0.1.0", "0.2.0", "0.3.0")
    registry.store.change_status("acme/toy", lambda s: Status(yanked={"0.3.0": "wrong gold"}))
    found = plan(registry, "0.1.0")
    assert found.after is not None
    assert found.after.version == "0.2.0"
    back = plan(registry, "0.3.0")
    assert back.after is None
    assert back.refused == (
        "0.2.0 is older and 0.3.0 is yanked: wrong gold; to go back, run: telescope env install "
        "acme/toy@0.2.0"
    )


def test_what_changes_is_said(registry, publish):
    publish("0.1.0")
    publish(
        "0.2.0",
        reward=RewardRange(minimum=-1, maximum=1, success=0.5),
        splits={"train": None, "eval": 7},
        network="always",
        secrets=("KEY",),
        datasets=(Dataset(repo="a/b", revision="c" * 40),),
        config_schema_sha256="1" * 64,
    )
    changes = dict(line.split(": ", 1) for line in plan(registry, "0.1.0").changes)
    assert changes == {
        "reward range": "0 to 1 -> -1 to 1",
        "success threshold": "1 -> 0.5",
        "splits": "eval 1, train 1 -> eval 7, train endless",
        "settings schema": f"{'0' * 12} -> {'1' * 12}",
        "network": "none -> always",
        "secrets": "none -> KEY",
        "datasets": f"none -> a/b@{'c' * 12}",
    }


def test_the_command_says_what_it_would_do_and_does_nothing(telescope, install, publish):
    publish("0.1.0", "0.2.0", "1.0.0")
    locked = install("0.1.0")
    path = lock(locked)
    before = path.read_bytes()
    code, out, _ = telescope("env", "update", "--dry-run")
    assert code == 0
    first, second = out.splitlines()
    assert first == "acme/toy 0.1.0 -> 0.2.0 (not changed: --dry-run)"
    assert "add --major" in second
    (row,) = json.loads(telescope("env", "update", "toy", "--dry-run", "--json")[1])
    assert (row["before"], row["after"], row["updated"]) == ("0.1.0", "0.2.0", False)
    assert path.read_bytes() == before
    for name, message in (
        ("toi", "did you mean"),
        ("toy@0.2.0", "run: telescope env install toy@0.2.0"),
    ):
        code, _, err = telescope("env", "update", name)
        assert (code, message in err) == (2, True)


def test_only_the_registry_it_came_from_is_asked(telescope, install, tmp_path, publish):
    """A newer release in the default registry is another publisher's, and is not looked at."""
    publish("0.1.0", "0.9.0")
    theirs = write_registry(tmp_path / "theirs")
    theirs.store.publish(toy_publication("0.1.0"))
    path = lock(install("0.1.0", registry=theirs.address))
    before = path.read_bytes()
    code, out, _ = telescope("env", "update", "toy")
    assert code == 0
    assert "0.9.0" not in out
    assert path.read_bytes() == before


def test_an_installation_that_fails_stays_in_the_lock(
    telescope, install, registry, publish, monkeypatch
):
    publish("0.1.0")
    lock(install("0.1.0"))
    before = Path(LOCK_NAME).read_bytes()

    def fail(*_):
        raise EnvironmentLoadError("there is no room")

    monkeypatch.setattr("telescope_envs.install.install.missing_requirements", fail)
    code, _, err = telescope("env", "install", "toy", "--shared")
    assert (code, "there is no room" in err) == (3, True)
    assert Path(LOCK_NAME).read_bytes() == before


SECRET = '"""Says yes."""\n\n    secrets = ("A_KEY",)'


@pytest.mark.slow
def test_updating_installs_and_locks_the_newer_one(telescope, registry, publish):
    publish("0.1.0", code=TOY.replace('"""Says yes."""', SECRET), secrets=("A_KEY",))
    code, _, err = telescope("env", "install", "toy")
    assert code == 0, err
    assert "acme/toy may read these environment variables: A_KEY (not set)" in err
    code = TOY.replace('"""Says yes."""', '"""Says yes."""\n\n    network = "load"')
    publish("0.2.0", code=code, network="load")
    code, out, err = telescope("env", "update", "toy")
    assert code == 0, err
    assert out == ("acme/toy 0.1.0 -> 0.2.0\n  network: none -> load\n  secrets: A_KEY -> none\n")
    (entry,) = read_lock(Path(LOCK_NAME)).environments
    assert entry.version == "0.2.0"
    (row,) = json.loads(telescope("env", "list", "--locked", "--json")[1])
    assert (row["installed"], row["locked"]) == ("0.2.0", "0.2.0")
    assert telescope("env", "verify", "toy")[0] == 0
    assert "telescope-core" in telescope("env", "tree", "toy")[1]
    assert first_words_of_a_worker("acme/toy").startswith("serving acme/toy 0.2.0 on 127.0.0.1:")


def first_words_of_a_worker(name: str) -> str:
    """Start a worker that listens, from this Python, and return what it says first."""
    command = [sys.executable, "-m", "telescope_core.processes.worker", name]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"],
        env={**os.environ, "TELESCOPE_WORKER_TOKEN": "a secret of many characters"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        return process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def take_down(registry, version: str) -> None:
    """Remove a release of the toy, as the reference of the registry's format says."""
    root = Path(registry.address)
    wheel = toy_publication(version).release.wheel
    index = root / "index/acme/toy.jsonl"
    lines = [line for line in index.read_text().splitlines(True) if wheel.sha256 not in line]
    index.write_text("".join(lines))
    (root / wheel.urls[0]).unlink()
    (root / "removed.toml").write_text(
        f'[[removed]]\nid = "acme/toy"\nversion = "{version}"\nsha256 = "{wheel.sha256}"\n'
        'reason = "a secret"\n'
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_only", [False, True])
def test_every_command_says_why_a_release_was_taken_down(
    telescope, install, registry, publish, is_only
):
    publish("0.1.0", *([] if is_only else ["0.2.0"]))
    lock(install("0.1.0"))
    assert telescope("env", "sync", "--strict")[0] == 0
    take_down(registry, "0.1.0")
    commands = (
        ("sync", "--strict"),
        ("sync", "--locked", "--strict"),
        ("update",),
        ("info", "acme/toy@0.1.0"),
        ("install", "acme/toy@0.1.0", "--shared"),
        ("verify", "acme/toy"),
    )
    for command in commands:
        code, out, err = telescope("env", *command)
        said = " ".join(f"{out} {err}".split())
        assert "removed: a secret" in said, command
        assert "never removed" not in said
        assert "lost a release" not in said
        assert code or command[0] == "info", command
    assert telescope("env", "sync", "--locked")[0] == 0, "what is here asks no registry"


@pytest.mark.slow
def test_strict_refuses_a_release_that_the_registry_lacks_or_replaced(
    telescope, install, registry, publish
):
    publish("0.1.0")
    lock(install("0.1.0"))
    index = Path(registry.address) / "index/acme/toy.jsonl"
    whole = index.read_text()
    digest = toy_publication("0.1.0").release.wheel.sha256
    for text, message in (
        (whole.replace(digest, "1" * 64), "releases are never replaced"),
        (whole.replace('"version":"0.1.0"', '"version":"0.1.9"'), "does not have it"),
        ("", "does not have it"),
    ):
        index.write_text(text)
        code, _, err = telescope("env", "sync", "--strict")
        assert (code, message in err) == (4, True), err
    index.write_text(whole)
    assert telescope("env", "sync", "--strict")[0] == 0
