"""`telescope env list` and `info`: what they show, in 80 columns, and what they import."""

import errno
import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry
from tests.envs.using.conftest import change_record, lock_of

from telescope_cli.env.options import complete_installed, complete_name
from telescope_core.errors import EnvironmentLoadError, TelescopeError
from telescope_envs.install.loading import settings_in
from telescope_envs.install.pipeline import record_in_lock
from telescope_envs.install.steps import silent
from telescope_envs.records.installed import (
    Installation,
    installed_environments,
    write_record,
)
from telescope_envs.records.links import AdaptedLink, adapted_path
from telescope_envs.records.lockfile import (
    LOCK_NAME,
    Lock,
    write_lock,
)
from telescope_envs.records.release import (
    Deprecation,
    Setting,
    Status,
)

TITLE = "environment"


@pytest.fixture
def installed(published, make_project, home, tmp_path):
    """Record acme/toy 0.1.0 as installed for an interpreter that can import it."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={make_project()} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (release,) = published.releases("acme/toy")
    write_record(
        Installation(
            registry=published.address,
            installed_at=datetime.now(UTC),
            release=release,
            interpreter=str(python),
        )
    )
    return release


def test_what_is_published_is_listed_in_80_columns(published, telescope):
    published.store.change_status(
        "acme/toy", lambda status: Status(deprecated=Deprecation(reason="old"))
    )
    code, out, _ = telescope("env", "list", "--owner", "acme")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    title, row = out.splitlines()
    assert title.split() == [TITLE, "newest", "installed", "about"]
    assert row.split()[:3] == ["acme/toy", "0.1.0", "-"]
    assert "(deprecated)" in row


def test_filters_and_json_say_what_is_here(published, installed, telescope):
    write_lock(Path(LOCK_NAME), Lock(environments=(lock_of(installed, published.address),)))
    for flag in ("--installed", "--locked"):
        rows = json.loads(telescope("env", "list", flag, "--owner", "acme", "--json")[1])
        assert [(row["id"], row["version"], row["installed"], row["locked"]) for row in rows] == [
            ("acme/toy", None, "0.1.0", "0.1.0")
        ]
        row = telescope("env", "list", flag, "--owner", "acme")[1].splitlines()[1]
        assert row.split()[:4] == ["acme/toy", "-", "0.1.0", "0.1.0"]
    assert "locked" in telescope("env", "list")[1].splitlines()[0]
    assert json.loads(telescope("env", "list", "--outdated", "--json")[1]) == []
    code, _, err = telescope("env", "list", "--owner", "acmee")
    assert code == 2
    assert "did you mean 'acme'?" in err


@pytest.mark.parametrize("flags", [(), ("--owner", "acme"), ("--installed",)])
def test_that_nothing_is_outdated_is_said(published, installed, telescope, flags):
    assert telescope("env", "list", "--outdated", *flags) == (
        0,
        "Nothing is outdated; installed and compared with a registry: 1\n",
        "",
    )


def test_where_nothing_is_installed_none_is_called_current(published, telescope):
    assert telescope("env", "list", "--outdated")[1].startswith("No environment matches")


def test_what_is_outdated_is_asked_of_the_registry_it_came_from(
    published, installed, home, telescope, tmp_path
):
    def listed(*flags: str) -> tuple[list[tuple[str, bool]], str]:
        _, out, err = telescope("env", "list", *flags, "--owner", "acme", "--json")
        return [(row["version"], row["is_outdated"]) for row in json.loads(out)], err

    other = write_registry(tmp_path / "other")
    for version in ("0.1.0", "0.2.0"):
        other.store.publish(toy_publication(version))
    published.store.publish(toy_publication("0.3.0"))
    assert listed("--outdated") == ([("0.3.0", True)], "")
    change_record(home, registry=other.address)
    assert listed("--outdated") == listed() == ([("0.2.0", True)], "")
    assert listed("--registry", published.address) == ([("0.3.0", True)], "")
    other.store.change_status("acme/toy", lambda status: Status(yanked={"0.2.0": "wrong gold"}))
    assert listed() == ([("0.1.0", False)], "")
    shutil.rmtree(other.address)
    rows, err = listed()
    assert rows == [(None, False)]
    assert f"acme/toy, which came from {other.address}" in err


def test_a_search_shows_no_more_than_the_limit(published, installed, telescope):
    published.store.publish(toy_publication("0.3.0"))
    published.store.publish(toy_publication("0.2.0", name="toys"))
    code, out, _ = telescope("env", "search", "toys", "--limit", "1", "--json")
    assert (code, [row["id"] for row in json.loads(out)]) == (0, ["acme/toys"])
    _, out, _ = telescope("env", "search", "toy", "--json")
    assert {row["id"]: row["version"] for row in json.loads(out)} == {
        "acme/toy": "0.3.0",
        "acme/toys": "0.2.0",
    }


@pytest.mark.slow
def test_info_tells_settings_standing_and_use(published, installed, telescope):
    said = Status(
        yanked={"0.1.0": "wrong gold"},
        deprecated=Deprecation(reason="old", replacement="acme/new"),
        advisories=("do not",),
    )
    published.store.change_status("acme/toy", lambda status: said)
    code, out, _ = telescope("env", "info", "acme/toy@0.1.0")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    shown = " ".join(out.split())
    for text in (
        "installed 0.1.0",
        "yanked 0.1.0: wrong gold",
        "deprecated old; use acme/new",
        "advisory do not",
        "validated no",
        "settings: --env.NAME VALUE",
        "telescope eval toy --model ./my-model",
        'name = "toy"',
    ):
        assert text in shown
    about = json.loads(telescope("env", "info", "acme/toy@0.1.0", "--json")[1])
    assert (about["versions"], about["settings"]) == (["0.1.0"], [])


def test_info_tells_the_settings_of_what_is_not_installed(registry, telescope):
    url = Setting(name="url", type="text", default='""', help="")
    size = Setting(name="size", type="integer >= 1", default="3", help="How many.")
    registry.store.publish(toy_publication("0.1.0"))
    old = telescope("env", "info", "toy")[1]
    assert "settings: this release does not record them; install it to see them" in old
    assert json.loads(telescope("env", "info", "toy", "--json")[1])["settings"] is None
    registry.store.publish(toy_publication("0.2.0", settings=(url, size)))
    shown = " ".join(telescope("env", "info", "toy")[1].split())
    assert "size: integer >= 1; default 3 How many." in shown
    assert "--env.size 3" in shown
    assert "--env.url" not in shown
    about = json.loads(telescope("env", "info", "toy", "--json")[1])
    assert (about["installed"], about["settings"]) == (
        None,
        [url.as_table(), size.as_table()],
    )


def test_info_asks_the_registry_that_an_environment_was_installed_from(
    published, installed, telescope, tmp_path, monkeypatch
):
    published.store.change_status("acme/toy", lambda _: Status(yanked={"0.1.0": "wrong gold"}))
    default = write_registry(tmp_path / "default")
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(tmp_path / "default"))
    shown = " ".join(telescope("env", "info", "acme/toy")[1].split())
    assert "yanked 0.1.0: wrong gold" in shown
    assert published.address in shown.replace(" ", "") or str(tmp_path / "registry") in shown
    other = telescope("env", "info", "acme/toy", "--registry", str(tmp_path / "default"))[1]
    assert "it is not in the registry" in " ".join(other.split())
    default.store.publish(toy_publication("0.9.0"))
    assert "0.9.0" not in telescope("env", "info", "acme/toy")[1]
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(tmp_path / "none"))
    assert "yanked 0.1.0" in " ".join(telescope("env", "info", "acme/toy")[1].split())
    shutil.move(tmp_path / "registry", tmp_path / "moved")
    code, gone, _ = telescope("env", "info", "acme/toy")
    assert (code, "its registry cannot tell more" in " ".join(gone.split())) == (0, True)


def test_info_describes_an_environment_of_which_every_version_is_yanked(published, telescope):
    published.store.change_status("acme/toy", lambda _: Status(yanked={"0.1.0": "wrong gold"}))
    code, out, _ = telescope("env", "info", "toy")
    assert (code, "0.1.0: wrong gold" in out) == (0, True)
    assert "(every version is yanked)" in telescope("env", "list", "--owner", "acme")[1]


def test_info_warns_of_a_lock_that_is_not_the_registrys(
    published, installed, telescope, tmp_path, monkeypatch
):
    locked = lock_of(installed, published.address, sha256="0" * 64)
    write_lock(Path(LOCK_NAME), Lock(environments=(locked,)))
    shown = " ".join(telescope("env", "info", "toy")[1].split())
    assert "not the registry's wheel: do not use it" in shown
    assert "installed no; run: telescope env sync" in shown
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(tmp_path / "none"))
    assert "run: telescope env sync" in " ".join(telescope("env", "info", "toy")[1].split())
    assert json.loads(telescope("env", "info", "toy", "--json")[1])["locked"]["sha256"] == "0" * 64


def test_settings_are_read_from_a_schema():
    schema = {
        "$defs": {
            "Judge": {
                "properties": {"model": {"type": "string", "description": "Who."}},
                "required": ["model"],
            },
            "Level": {"enum": ["low", "high"]},
        },
        "properties": {
            "judge": {"anyOf": [{"$ref": "#/$defs/Judge"}, {"type": "null"}], "default": None},
            "level": {"$ref": "#/$defs/Level", "default": "low"},
            "size": {"type": "integer", "minimum": 1, "maximum": 9, "default": 3},
            "names": {"type": "array", "items": {"type": "string"}, "default": []},
        },
    }
    judge, level, size, names = settings_in(schema)
    assert (judge.name, judge.type, judge.default, judge.help) == (
        "judge.model",
        "text",
        "",
        "Who.",
    )
    assert (level.name, level.type, level.default) == ("level", '"low" or "high"', '"low"')
    assert (size.name, size.type, size.default) == ("size", "integer >= 1 and <= 9", "3")
    assert (names.name, names.type, names.default) == ("names", "list of text", "[]")


def test_listing_imports_only_what_it_needs(published, home):
    program = (
        "import sys\nfrom telescope_cli.main import main\n"
        "try: main(['env', 'list'])\nexcept SystemExit as ended: assert not ended.code\n"
        "heavy = {'rich', 'httpx', 'asyncio', 'zmq', 'aiohttp', 'uv',\n"
        "    'telescope_envs.install.install', 'telescope_core.open',\n"
        "    'telescope_core.environments', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_records_that_are_none_are_ignored(installed, home):
    (home / "environments" / "acme" / "broken.json").write_text("{")
    (home / "environments" / "acme" / "foreign.json").write_bytes(b'{"interpreter": "\xff"}')
    listed = {(one.id, one.version, one.is_recorded) for one in installed_environments()}
    assert ("acme/toy", "0.1.0", True) in listed
    assert not any("broken" in name or "foreign" in name for name, *_ in listed)


def known_ids() -> set[str]:
    return {one.id for one in installed_environments()}


def test_a_record_of_another_format_is_ignored_everywhere(installed, home):
    change_record(home, format=2)
    assert "acme/toy" not in known_ids()


def test_a_record_in_the_place_of_another_is_ignored_everywhere(installed, home):
    path = change_record(home)
    path.rename(path.with_name("pet.json"))
    assert "acme/toy" not in known_ids()


def test_a_damaged_record_is_listed_and_says_what_to_do_where_it_is_needed(
    published, installed, home, telescope
):
    path = change_record(home, installed_at="yesterday")
    assert "acme/toy" in known_ids()
    (found,) = [one for one in installed_environments() if one.id == "acme/toy"]
    assert (found.is_recorded, found.sha256) == (True, installed.wheel.sha256)
    with pytest.raises(EnvironmentLoadError) as damaged:
        _ = found.installation
    assert str(damaged.value).startswith(f"{path}: installed_at: ")
    assert "telescope env install acme/toy" in str(damaged.value)
    code, out, _ = telescope("env", "verify", "acme/toy")
    assert (code, "telescope env install acme/toy" in out) == (1, True)
    assert telescope("env", "uninstall", "acme/toy")[0] == 0
    assert not path.exists()


@pytest.mark.parametrize("obstacle", ["its lock", "its record"])
def test_a_failed_uninstall_leaves_the_environment_and_its_lock(
    published, installed, home, telescope, monkeypatch, obstacle
):
    write_lock(Path(LOCK_NAME), Lock(environments=(lock_of(installed, published.address),)))
    before = Path(LOCK_NAME).read_bytes()
    if obstacle == "its lock":
        (home / "locks").write_text("no folder")
    else:
        unlink = Path.unlink

        def refuse(path: Path, missing_ok: bool = False) -> None:
            if path.parent.name == "acme":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", refuse)
    assert telescope("env", "uninstall", "acme/toy")[0] == 2
    assert "acme/toy" in known_ids()
    assert Path(LOCK_NAME).read_bytes() == before


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EACCES, 2)])
def test_a_lock_that_cannot_be_written_has_the_code_of_a_refused_path(
    published, installed, home, monkeypatch, number, code
):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(TelescopeError, match="is installed, but not locked") as refused:
        record_in_lock(Path(LOCK_NAME), lock_of(installed, published.address), progress=silent)
    assert refused.value.exit_code == code


def test_an_uninstall_tells_what_it_removed_before_an_error(installed, telescope):
    code, out, err = telescope("env", "uninstall", "acme/toy", "nothing")
    assert (code, out) == (2, "acme/toy 0.1.0: removed\n")
    assert "'nothing'" in err


def test_an_installation_whose_python_has_gone_is_not_listed(installed, tmp_path):
    (tmp_path / "venv" / "bin" / "python").unlink()
    assert "acme/toy" not in known_ids()


@pytest.mark.parametrize("arguments", [("list",), ("search", "toy"), ("--help",)])
def test_listing_imports_no_library_that_takes_long(published, installed, arguments):
    code = (
        "import sys; from telescope_cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n"
        "    print({'pydantic', 'importlib.metadata', 'httpx'} & set(sys.modules), ended.code)"
    )
    command = [sys.executable, "-c", code, "env", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set() 0", done.stdout + done.stderr


def test_names_are_completed(published, installed, home):
    assert complete_name("acme/") == ["acme/toy"]
    assert complete_installed("to") == ["toy"]
    assert complete_installed("x") == []


def test_a_link_of_another_framework_has_the_version_of_its_package(telescope):
    for name, requirements, pins in (
        ("gym:FrozenLake-v1", ("gymnasium",), ("numpy==2.0", "gymnasium==1.4.1")),
        ("openenv:http://127.0.0.1:9", (), ()),
    ):
        link = AdaptedLink(
            name=name,
            factory="f:F",
            interpreter="",
            requirements=requirements,
            dependencies=pins,
            linked_at=datetime.now(UTC),
        )
        adapted_path(name).parent.mkdir(parents=True, exist_ok=True)
        adapted_path(name).write_bytes(link.as_json(indent=2))
    code, out, _ = telescope("env", "list", "--installed", "--json")
    assert code == 0
    shown = {row["id"]: (row["installed"], row["summary"]) for row in json.loads(out)}
    assert shown["gym:FrozenLake-v1"] == ("1.4.1", "the version is that of gymnasium")
    assert shown["openenv:http://127.0.0.1:9"][0] == "-"
    _, text, _ = telescope("env", "list", "--installed")
    assert max(map(len, text.splitlines())) <= 80
