"""Syncing: what is installed equals telescope.lock, by hash, and the lock changes only if asked."""

import json
import shutil
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry

from telescope_cli.main import main
from telescope_core.errors import RegistryError
from telescope_envs.install.data import remove_venv
from telescope_envs.install.install import (
    install,
    uninstall,
)
from telescope_envs.install.steps import InstallOptions
from telescope_envs.install.sync import sync_environment
from telescope_envs.records.installed import installed_environments
from telescope_envs.records.lockfile import (
    Lock,
    digest_of,
    read_lock,
    write_lock,
)
from telescope_envs.records.release import Status
from telescope_envs.registry import Registry

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed_once(tmp_path_factory):
    """The folder of `toy`, and a copy of it as it was made."""
    place = tmp_path_factory.mktemp("toy") / "place"
    registry = write_registry(place / "registry")
    for version in ("0.1.0", "0.2.0"):
        registry.store.publish(toy_publication(version))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELESCOPE_HOME", str(place / "home"))
        install(registry, "toy@0.1.0", options=InstallOptions(lock=place / "telescope.lock"))
    shutil.copytree(place, place.with_name("kept"), symlinks=True)
    return place


@pytest.fixture
def tmp_path(installed_once):
    """The folder of `toy`, which is where it was made: its records and scripts name it."""
    shutil.rmtree(installed_once)
    shutil.copytree(installed_once.with_name("kept"), installed_once, symlinks=True)
    return installed_once


@pytest.fixture
def toy(tmp_path, home):
    """A registry with acme/toy 0.1.0 and 0.2.0, of which a telescope.lock names the first."""
    return Registry.at(tmp_path / "registry")


def env(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["env", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def toys() -> dict[str, str]:
    found = installed_environments()
    return {one.id: one.version for one in found if one.id.startswith("acme/")}


def test_a_lock_is_reproduced_on_another_machine(toy, home, tmp_path, capsys):
    before = (tmp_path / "telescope.lock").read_bytes()
    shutil.rmtree(home)
    code, out, err = env(capsys, "sync", "--locked", "--json")
    assert code == 0, err
    row = {"name": "acme/toy", "state": "installed", "id": "acme/toy", "version": "0.1.0"}
    assert json.loads(out) == [row]
    assert (tmp_path / "telescope.lock").read_bytes() == before
    assert toys() == {"acme/toy": "0.1.0"}
    install(toy, "toy@0.2.0", options=InstallOptions())
    assert toys() == {"acme/toy": "0.2.0"}
    assert env(capsys, "sync")[0] == 0
    assert toys() == {"acme/toy": "0.1.0"}, "what is locked is active again"


def test_a_registry_that_has_moved_is_named_by_installing_again(toy, home, tmp_path, capsys):
    moved = str(Path(toy.address).rename(tmp_path / "moved"))
    code, _, err = env(capsys, "update", "toy")
    advice = "run: telescope env install acme/toy@0.1.0 --registry PLACE"
    assert (code, advice in err) == (2, True)
    command = ("install", "acme/toy@0.1.0", "--registry", f"{tmp_path}/registry/../moved")
    code, out, err = env(capsys, *command)
    assert (code, out) == (0, "acme/toy 0.1.0: already installed\n")
    assert f"from {moved} now, no longer {toy.address}" in err
    (entry,) = read_lock(tmp_path / "telescope.lock").environments
    (found,) = [one for one in installed_environments() if one.id == "acme/toy"]
    assert (entry.registry, found.registry) == (moved, moved)
    assert env(capsys, "update", "toy", "--dry-run")[0] == 0
    assert "no longer" not in env(capsys, *command)[2]
    (tmp_path / "moved").rename(toy.address)
    shutil.rmtree(home)
    code, _, err = env(capsys, "sync")
    assert (code, "has moved, add --registry PLACE" in err) == (2, True)
    assert env(capsys, "sync", "--registry", toy.address)[0] == 0


def test_locked_fails_where_the_lock_would_change(toy, home, tmp_path, capsys):
    path = tmp_path / "telescope.lock"
    (entry,) = read_lock(path).environments
    lines = tuple(line for line in entry.requirements if not line.startswith("pydantic=="))
    lacking = {"requirements": lines, "requirements_sha256": digest_of(lines)}
    for changes in ({"python": "3.99"}, lacking):
        write_lock(path, Lock().merged([entry.changed(**changes)]))
        changed = path.read_bytes()
        code, _, err = env(capsys, "sync", "--locked")
        assert code == 2
        assert "the entry of acme/toy in telescope.lock would have to change" in err
        assert path.read_bytes() == changed
    assert env(capsys, "sync")[0] == 0
    assert read_lock(path).environments == (entry,)


def test_prune_removes_what_the_lock_does_not_name(toy, home, tmp_path, capsys):
    toy.store.publish(toy_publication(name="other"))
    install(toy, "acme/other")
    assert set(toys()) == {"acme/toy", "acme/other"}
    assert env(capsys, "sync")[0] == 0
    assert set(toys()) == {"acme/toy", "acme/other"}
    assert "acme/other 0.1.0: removed" in env(capsys, "sync", "--prune")[1]
    assert set(toys()) == {"acme/toy"}
    assert [path.name[:9] for path in (home / "venvs").iterdir()] == ["acme--toy"]


def test_a_registry_with_other_bytes_is_refused(toy, home, tmp_path):
    root = Path(toy.address)
    release = toy_publication(code="evil = 1\n").release
    (root / "index/acme/toy.jsonl").write_text(f"{release.as_json().decode()}\n")
    with pytest.raises(RegistryError, match=r"is installed with wheel sha256 .* never replaced"):
        install(toy, "toy", options=InstallOptions())
    shutil.rmtree(home)
    (entry,) = read_lock(tmp_path / "telescope.lock").environments
    with pytest.raises(RegistryError, match=r"is locked with wheel sha256 .* never replaced"):
        sync_environment(
            entry,
            options=InstallOptions(),
            may_change=True,
            open_registry=lambda named: Registry.at(Path(named)),
            progress=lambda step: None,
        )
    assert toys() == {}


def suspend(toy: Registry) -> None:
    """Say everything that a registry can say against toy 0.1.0."""
    path = Path(toy.address) / "namespaces/acme.toml"
    path.write_text('owner = "acme"\nstatus = "suspended"\n')
    toy.store.change_status("acme/toy", lambda _: Status(yanked={"0.1.0": "wrong gold"}))


def test_what_speaks_against_a_locked_release_is_told_where_it_is_installed(toy, home, capsys):
    suspend(toy)
    said = ("namespace 'acme' is suspended", "acme/toy 0.1.0 is yanked: wrong gold")
    code, _, err = env(capsys, "sync", "--locked")
    assert code == 0
    assert "warning" not in err, "it is here already, and the registry is not asked"
    shutil.rmtree(home)
    code, _, err = env(capsys, "sync", "--locked", "--strict")
    assert code == 4
    assert all(text in err for text in said)
    assert toys() == {}
    code, out, err = env(capsys, "sync", "--locked")
    assert (code, out) == (0, "acme/toy 0.1.0: installed\n")
    assert all(f"warning: {text}" in err or f"acme/toy: {text}" in err for text in said)
    assert toys() == {"acme/toy": "0.1.0"}
    code, _, err = env(capsys, "sync", "--strict")
    assert code == 4, "also where all of it is here"
    assert all(text in err for text in said)
    toy.store.change_status("acme/toy", lambda _: Status())
    path = Path(toy.address) / "namespaces/acme.toml"
    path.write_text('owner = "acme"\nstatus = "active"\n')
    assert env(capsys, "sync", "--strict")[0] == 0


def test_and_by_the_other_ways_to_use_it(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TELESCOPE_REGISTRY", toy.address)
    suspend(toy)
    path = Path(toy.address) / "namespaces/acme.toml"
    path.write_text(f"{path.read_text()}withheld = false\n")
    _, out, _ = env(capsys, "list")
    assert "(namespace 'acme' is suspended" in out
    (row,) = [row for row in json.loads(env(capsys, "list", "--json")[1]) if row["installed"]]
    assert [text.partition(": ")[2] for text in row["warnings"]] == [
        "namespace 'acme' is suspended: it publishes nothing new",
        "wrong gold",
    ]
    assert "acme is suspended" in env(capsys, "info", "toy")[1]
    _, out, _ = env(capsys, "update", "--dry-run")
    assert "warning: acme/toy: namespace 'acme' is suspended" in out
    code, _, err = env(capsys, "bundle", "-o", "b.zip")
    assert code == 0, err
    assert "warning: acme/toy 0.1.0 is yanked: wrong gold" in err


def test_uninstall_leaves_the_lock_and_the_folder_of_virtual_environments(toy, home, tmp_path):
    lock = tmp_path / "telescope.lock"
    removed = uninstall("toy", lock=lock)
    assert (removed.id, removed.version) == ("acme/toy", "0.1.0")
    assert read_lock(lock).environments == ()
    assert list((home / "venvs").iterdir()) == []
    assert toys() == {}


def test_a_virtual_environment_that_was_deleted_is_built_again(toy, home, tmp_path, capsys):
    (venv,) = (home / "venvs").iterdir()
    remove_venv(venv, "acme/toy")
    assert toys() == {}
    code, _, err = env(capsys, "install", "toy@0.1.0")
    assert code == 0, err
    assert toys() == {"acme/toy": "0.1.0"}
    assert venv.exists()


def test_what_is_wrong_is_said_before_anything_is_done(tmp_path_factory, monkeypatch, capsys):
    home = tmp_path_factory.mktemp("empty") / "home"
    monkeypatch.setenv("TELESCOPE_HOME", str(home))
    monkeypatch.chdir(home.parent)
    for arguments, message in (
        (("sync",), "there is no telescope.lock in this folder or above"),
        (("install",), "give at least one NAME"),
        (("install", "--from-bundle", "no.zip"), "there is no bundle no.zip"),
        (("install", "--from-bundle", "no.zip", "--shared"), "cannot be combined with --shared"),
        (("bundle",), "telescope.lock lists no environments"),
        (("bundle", "-o", "no/such/folder.zip"), "does not exist"),
    ):
        code, _, err = env(capsys, *arguments)
        assert code == 2
        assert message in err
    assert not home.exists()
