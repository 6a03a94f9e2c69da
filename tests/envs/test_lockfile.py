"""`telescope.lock`: stable bytes, whole or not at all, and damage is named with its line."""

import codecs
import os
import threading
import tomllib
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_envs.records.lockfile import (
    Lock,
    LockedDataset,
    LockedEnvironment,
    change_lock,
    digest_of,
    find_lock,
    lock_path,
    read_lock,
    write_lock,
)

LINES = (
    "six==1.17.0 --hash=sha256:" + "a" * 64,
    "tomli==2.0.1 ; python_full_version < '3.11' --hash=sha256:" + "b" * 64,
)


def entry(environment_id="acme/toy", **changes) -> LockedEnvironment:
    module = "telescope_env_" + environment_id.replace("/", "_").replace("-", "_")
    fields = {
        "id": environment_id,
        "version": "0.1.0",
        "wheel": f"{module}-0.1.0-py3-none-any.whl",
        "sha256": "b" * 64,
        "registry": "/srv/registry",
        "protocol": "1.0-1.0",
        "python": "3.11",
        "requirements": LINES,
        "requirements_sha256": digest_of(LINES),
        "datasets": (LockedDataset(repo="acme/sums", revision="c" * 40),),
    }
    return LockedEnvironment(**(fields | changes))


def test_what_is_written_is_read_and_written_again_to_the_same_bytes(tmp_path):
    path = tmp_path / "telescope.lock"
    odd = entry(
        "acme/odd",
        registry='corp "q" \\ \x7f\n\u00e9\U0001f600',
        requirements=(),
        requirements_sha256=digest_of(()),
        datasets=(),
    )
    write_lock(path, Lock().merged([entry(), odd]))
    first = path.read_bytes()
    assert read_lock(path) == Lock(environments=(odd, entry()))
    write_lock(path, Lock().merged([odd]).merged([entry()]))
    assert path.read_bytes() == first
    assert [row["id"] for row in tomllib.loads(first.decode())["environments"]] == [
        "acme/odd",
        "acme/toy",
    ]
    assert [found.name for found in tmp_path.iterdir()] == ["telescope.lock"]


def test_the_digest_follows_wheel_requirements_and_python_alone():
    one = entry()
    assert one.digest == entry(registry="elsewhere", revision="1", version="0.1.0").digest
    others = [
        entry(sha256="d" * 64),
        entry(requirements=(), requirements_sha256=digest_of(())),
        entry(python="3.12"),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4


def test_the_nearest_lock_above_is_found_and_is_the_one_to_write(tmp_path):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert lock_path(below) == below / "telescope.lock"
    write_lock(tmp_path / "telescope.lock", Lock())
    assert find_lock(below) == lock_path(below) == tmp_path / "telescope.lock"
    write_lock(tmp_path / "a" / "telescope.lock", Lock())
    assert find_lock(below) == tmp_path / "a" / "telescope.lock"


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "telescope.lock"
    write_lock(path, Lock().merged([entry()]))
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read_lock(path) == Lock(environments=(entry(),))


def test_a_missing_file_is_empty(tmp_path):
    assert read_lock(tmp_path / "telescope.lock") == Lock()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "version = 1\n",
            "version = 2\n",
            "format version 2, but this Telescope reads only up to 1",
        ),
        ("version = 1\n", "", "expected version = 1, got None"),
        ("version = 1\n", "version = 1\n<<<<<<< ours\n", r"not TOML: .*line 3"),
        ("bbbbbbbb", "zzzzzzzz", r"telescope.lock:8: sha256: expected 64 hexadecimal digits"),
        ("six==1.17.0", "six==1.16.0", "telescope.lock:12: requirements_sha256: is not the digest"),
        (
            "protocol =",
            "protcol =",
            r"telescope.lock:10: protcol: unknown key",
        ),
        ("version = 1\n", "version = 1\nwheels = 3\n", "telescope.lock:3: wheels: unknown key"),
        ('python = "3.11"', 'python = "3.11"\npythn = "3"', "did you mean 'python'"),
    ],
)
def test_damage_is_named_with_line_and_remedy(tmp_path, before, after, message):
    path = tmp_path / "telescope.lock"
    write_lock(path, Lock().merged([entry()]))
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ConfigError, match=message) as raised:
        read_lock(path)
    assert str(path) in str(raised.value)
    assert "version control" in str(raised.value) or "upgrade" in str(raised.value)


def test_an_id_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "telescope.lock"
    write_lock(path, Lock(environments=(entry(), entry())))
    with pytest.raises(ConfigError, match="acme/toy") as refusal:
        read_lock(path)
    assert str(path) in str(refusal.value)


def test_changes_made_at_the_same_time_are_all_kept(tmp_path):
    path = tmp_path / "telescope.lock"
    threads = [
        threading.Thread(
            target=change_lock,
            args=(path, lambda lock, n=n: lock.merged([entry(f"acme/toy-{n}")])),
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_lock(path).environments) == 8


def test_a_failed_change_leaves_the_file_and_nothing_else(tmp_path):
    path = tmp_path / "telescope.lock"
    change_lock(path, lambda lock: lock.merged([entry()]))
    before = path.read_bytes()
    with pytest.raises(RuntimeError):
        change_lock(path, lambda lock: (_ for _ in ()).throw(RuntimeError("no")))
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["telescope.lock"]


@pytest.mark.parametrize(
    ("git", "registry", "held"),
    [
        ("", "registry", "../registry"),
        ("", "app/own/registry", "./own/registry"),
        ("", "app/.registry", ".registry"),
        ("", ".", ".."),
        ("", "app", "."),
        ("", "current", "../current"),
        ("", "app/../current/../registry", None),
        ("app", "registry", None),
        (None, "registry", None),
        (None, "app/registry", "./registry"),
        ("", "../outside", None),
        ("", "../link/registry", "../registry"),
        ("", "../to-registry", None),
    ],
)
def test_a_folder_that_moves_with_the_lock_is_held_relative_to_it(tmp_path, git, registry, held):
    root = tmp_path / "mono"
    for folder in ("app/own/registry", "registry", "../outside/deep"):
        (root / folder).mkdir(parents=True)
    (root / "current").symlink_to(tmp_path / "outside" / "deep")
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "to-registry").symlink_to(root / "registry")
    if git is not None:
        (root / git / ".git").mkdir()
    text = f"{root}/{registry}" if registry != "." else str(root)
    if registry.startswith("../"):
        text = f"{tmp_path}/{registry[3:]}"
    path = root / "app" / "telescope.lock"
    change_lock(path, lambda lock: lock.merged([entry(registry=text)]))
    (row,) = tomllib.loads(path.read_text())["environments"]
    assert row["registry"] == (held or text)
    (found,) = read_lock(path).environments
    assert found.registry == text or (
        held and Path(found.registry).resolve() == Path(text).resolve()
    )
    if held and not registry.startswith("../"):
        clone = tmp_path / "clone"
        root.rename(clone)
        (found,) = read_lock(clone / "app" / "telescope.lock").environments
        assert found.registry == os.path.normpath(clone / registry)


def test_other_registries_of_a_lock_stay_as_they_are(tmp_path):
    (tmp_path / ".git").mkdir()
    path = tmp_path / "telescope.lock"
    places = ("corp", "https://hub.example", "hf://acme/reg@main", "~/registry", "/x\0y/z")
    for number, place in enumerate(places):
        changed = entry(f"acme/toy{number}", registry=place)
        change_lock(path, lambda lock, changed=changed: lock.merged([changed]))
    assert tuple(one.registry for one in read_lock(path).environments) == places
    assert [row["registry"] for row in tomllib.loads(path.read_text())["environments"]] == [*places]
