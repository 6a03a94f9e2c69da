"""From a name to code: the link, then the lock, then what is installed; never another one."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry
from tests.envs.using.conftest import change_record, lock_of

from telescope_core.base.environment_record import changes, record_of
from telescope_core.errors import ConfigError, EnvironmentLoadError, UnknownNameError
from telescope_core.finding.locate import locate_environment
from telescope_core.protocols import EnvironmentPlace
from telescope_envs.install.data import venv_folder
from telescope_envs.install.pipeline import activate
from telescope_envs.install.steps import silent
from telescope_envs.records.installed import (
    Installation,
    write_record,
)
from telescope_envs.records.links import write_link
from telescope_envs.records.lockfile import (
    LOCK_NAME,
    Lock,
    LockedEnvironment,
    digest_of,
    write_lock,
)
from telescope_envs.records.projects import read_project
from telescope_envs.records.release import Status

SIX = ("six==1.16.0 --hash=sha256:" + "1" * 64,)


@pytest.fixture
def install(home, registry, tmp_path) -> Callable[..., LockedEnvironment]:
    """Record a toy as installed in a virtual environment of its own; returns what locks it."""

    def record(version: str = "0.1.0", **fields) -> LockedEnvironment:
        owner, name = fields.pop("owner", "acme"), fields.pop("name", "toy")
        release = toy_publication(version, owner=owner, name=name).release
        needs = fields.pop("requirements", ())
        locked = lock_of(
            release,
            fields.pop("registry", registry.address),
            requirements=needs,
            requirements_sha256=digest_of(needs),
        )
        python = venv_folder(locked) / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        installation = Installation(
            registry=locked.registry,
            installed_at=datetime.now(UTC),
            release=release,
            interpreter=str(python),
            locked=locked,
        )
        (venv_folder(locked) / "telescope.json").write_text(installation.as_json().decode())
        write_record(installation)
        return locked

    return record


def lock(*entries: LockedEnvironment) -> Path:
    path = Path(LOCK_NAME).absolute()
    write_lock(path, Lock(environments=entries))
    return path


def test_a_digest_names_what_is_installed_or_locked(install):
    older = install("0.1.0")
    newer = install("0.2.0")
    assert locate_environment(f"toy@sha256:{newer.sha256}").version == "0.2.0"
    with pytest.raises(UnknownNameError, match="unknown environment"):
        locate_environment(f"toy@sha256:{older.sha256}")
    lock(older)
    assert locate_environment(f"toy@sha256:{older.sha256}").version == "0.1.0"
    with pytest.raises(ConfigError, match=r"locks acme/toy to 0\.1\.0, but sha256:"):
        locate_environment(f"toy@sha256:{newer.sha256}")


def test_the_lock_comes_before_what_is_active(install):
    older = install("0.1.0", requirements=SIX)
    install("0.2.0")
    assert locate_environment("acme/toy").version == "0.2.0"
    lock(older)
    found = locate_environment("toy")
    assert (found.version, found.lock_digest) == ("0.1.0", older.digest)
    assert (found.wheel_sha256, found.registry) == (older.sha256, older.registry)
    assert found.dependencies == ("six==1.16.0",)
    assert found.place is EnvironmentPlace.ISOLATED
    assert Path(found.interpreter).parents[1] == venv_folder(older)


def test_a_lock_is_found_above_the_working_directory(install, monkeypatch):
    lock(install("0.1.0"))
    install("0.2.0")
    Path("inner/most").mkdir(parents=True)
    monkeypatch.chdir("inner/most")
    assert locate_environment("toy").version == "0.1.0"


def test_what_is_locked_and_not_installed_is_synced_first(install):
    installed = install("0.1.0")
    wanted = installed.changed(requirements=SIX, requirements_sha256=digest_of(SIX))
    path = lock(wanted)
    with pytest.raises(EnvironmentLoadError, match="run: telescope env sync") as refused:
        locate_environment("toy")
    assert str(path) in str(refused.value)


def test_versions_are_respected(install):
    path = lock(install("0.1.0"))
    assert locate_environment("toy@0.1.0").version == "0.1.0"
    with pytest.raises(ConfigError, match=r"locks acme/toy to 0\.1\.0, but 0\.2\.0 was requested"):
        locate_environment("toy@0.2.0")
    path.unlink()
    assert locate_environment("acme/toy@>=0.1").version == "0.1.0"
    with pytest.raises(UnknownNameError):
        locate_environment("acme/toy@0.2.0")


def test_a_lock_of_another_python_is_not_used(install):
    lock(install().changed(python="3.4"))
    with pytest.raises(EnvironmentLoadError, match=r"Python 3\.4") as refusal:
        locate_environment("toy")
    assert f"Python 3.{sys.version_info.minor}" in str(refusal.value)


def test_a_bare_name_of_two_owners_is_an_error(install):
    install()
    install(owner="other")
    with pytest.raises(ConfigError, match="2 owners: acme/toy, other/toy; use one of these names"):
        locate_environment("toy")
    assert locate_environment("other/toy").id == "other/toy"
    lock(install(owner="other", requirements=SIX))
    assert locate_environment("toy").id == "other/toy", "the lock names one of them"


def test_owners_of_another_registry_are_kept_apart(install, tmp_path, monkeypatch):
    theirs = write_registry(tmp_path / "theirs")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "telescope").mkdir()
    (tmp_path / "telescope" / "config.toml").write_text(
        f'[registries]\ncorp = "{theirs.address}"\nmain = "{tmp_path / "registry"}"\n'
    )
    install()
    assert locate_environment("main:acme/toy").version == "0.1.0"
    with pytest.raises(UnknownNameError):
        locate_environment("corp:acme/toy")
    install("0.2.0", registry=theirs.address)
    assert locate_environment("corp:acme/toy").version == "0.2.0"
    assert locate_environment("corp:toy").version == "0.2.0"
    assert locate_environment("corp:Toy").factory == "corp:Toy", "a class of the module corp"
    with pytest.raises(UnknownNameError, match="did you mean 'corp'"):
        locate_environment("crop:acme/toy")
    with pytest.raises(UnknownNameError, match="did you mean 'corp'"):
        locate_environment("crop:toy")


def test_commands_keep_to_the_registry_that_a_name_begins_with(
    install, registry, telescope, tmp_path, monkeypatch
):
    theirs = write_registry(tmp_path / "theirs")
    (tmp_path / "theirs/namespaces/zoo.toml").write_text('owner = "zoo"\n')
    for store, owner in ((registry.store, "acme"), (theirs.store, "zoo")):
        store.publish(toy_publication("0.1.0", owner=owner))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "telescope").mkdir()
    lines = f'corp = "{theirs.address}"\nmain = "{registry.address}"\n'
    (tmp_path / "telescope" / "config.toml").write_text(f"[registries]\n{lines}")
    (tmp_path / "theirs/aliases.toml").write_text("[aliases]\n")
    yanked = telescope("env", "yank", "corp:toy@0.1.0", "--reason", "wrong")
    assert (yanked[0], theirs.status("zoo/toy").yanked) == (0, {"0.1.0": "wrong"})
    assert telescope("env", "deprecate", "corp:toy", "--reason", "old")[0] == 0
    assert (theirs.status("zoo/toy").deprecated is None) is False
    assert registry.status("acme/toy") == Status()
    install()
    for command in ("update", "verify", "uninstall"):
        code, _, said = telescope("env", command, "corp:toy")
        assert (code, "unknown installed environment 'corp:toy'" in said) == (2, True)
    install(owner="zoo", registry=theirs.address)
    theirs.store.publish(toy_publication("0.2.0", owner="zoo"))
    updated = json.loads(telescope("env", "update", "corp:toy", "--dry-run", "--json")[1])
    assert [row["id"] for row in updated] == ["zoo/toy"]
    assert telescope("env", "uninstall", "corp:toy")[1] == "zoo/toy 0.1.0: removed\n"
    assert locate_environment("toy").id == "acme/toy"


def test_a_missing_one_is_answered_with_the_command(home, published, tmp_path, monkeypatch):
    for name, command in (
        ("toy", "telescope env install toy"),
        ("acme/toy@>=0.1", "telescope env install 'acme/toy@>=0.1'"),
    ):
        with pytest.raises(UnknownNameError, match="is not installed") as missing:
            locate_environment(name)
        assert str(missing.value).endswith(f"run: {command}")
    with pytest.raises(UnknownNameError, match=r"did you mean 'toy'"):
        locate_environment("toyy")
    corp = write_registry(tmp_path / "corp")
    corp.store.publish(toy_publication(name="rare"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "telescope").mkdir()
    (tmp_path / "telescope" / "config.toml").write_text(f'[registries]\ncorp = "{corp.address}"\n')
    with pytest.raises(UnknownNameError, match=r"run: telescope env install corp:acme/rare"):
        locate_environment("corp:acme/rare")
    with pytest.raises(UnknownNameError, match="unknown environment 'acme/rare'") as unasked:
        locate_environment("acme/rare")
    assert "corp" not in str(unasked.value), "no other registry is told what somebody looks for"


def test_a_link_comes_first_and_its_digest_is_that_of_its_files(install, make_project):
    lock(install("0.1.0"))
    project = read_project(make_project(version="0.3.0"))
    write_link(project)
    first = locate_environment("toy")
    assert (first.place, first.version, first.interpreter) == (EnvironmentPlace.LINKED, "0.3.0", "")
    assert first.search_path == (str(project.folder),)
    assert locate_environment("toy@0.1.0").place is EnvironmentPlace.ISOLATED
    (project.folder / "README.md").write_text("not part of the package")
    assert locate_environment("toy") == first
    (project.folder / project.module / "more.py").write_text("")
    (line,) = changes(record_of(first), record_of(locate_environment("toy")))
    assert line.startswith("digest: ")


def test_what_has_a_damaged_record_is_not_played_and_is_mended_by_installing(install, home):
    entry = install()
    path = change_record(home, locked={"id": "acme/toy"})
    with pytest.raises(EnvironmentLoadError, match="install it again: telescope env install acme"):
        locate_environment("toy")
    assert activate(entry, progress=silent)
    assert locate_environment("toy").id == "acme/toy"
    before = path.read_bytes()
    assert not activate(entry, progress=silent)
    assert path.read_bytes() == before


def test_the_data_folder_may_be_named_by_a_way_up(tmp_path, monkeypatch):
    """Paths below it are compared, and must not seem to lead out of it."""
    monkeypatch.chdir(tmp_path)
    locked = lock_of(toy_publication().release, "x")
    for named in (f"{tmp_path}/elsewhere/../home", f"../{tmp_path.name}/home"):
        monkeypatch.setenv("TELESCOPE_HOME", named)
        assert venv_folder(locked).parent == tmp_path / "home/venvs"
