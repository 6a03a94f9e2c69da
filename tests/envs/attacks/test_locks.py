"""A `telescope.lock` that somebody else wrote: it starts nothing and names no file elsewhere."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_envs.install.data import (
    find_built,
    venv_folder,
    venvs_folder,
)
from telescope_envs.records.lockfile import (
    Lock,
    LockedEnvironment,
    digest_of,
    is_requirement_line,
    read_lock,
    write_lock,
)
from telescope_envs.records.model import converted

HASH = "--hash=sha256:" + "a" * 64
GOOD = f"six==1.17.0 {HASH}"
WHEEL = "telescope_env_acme_toy-0.1.0-py3-none-any.whl"


def text_of(**changes: object) -> str:
    lines = changes.get("requirements", (GOOD,))
    fields = {
        "id": "acme/toy",
        "version": "0.1.0",
        "wheel": WHEEL,
        "sha256": "b" * 64,
        "registry": "/srv/registry",
        "protocol": "1.0-1.0",
        "python": f"3.{sys.version_info.minor}",
        "requirements": lines,
        "requirements_sha256": digest_of(lines),  # type: ignore[arg-type]
        **changes,
    }
    rows = "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())
    return f"version = 1\n\n[[environments]]\n{rows}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_lock_as_it_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "telescope.lock").write_text(text_of())
    (entry,) = read_lock(tmp_path / "telescope.lock").environments
    assert entry.wheel == WHEEL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "0.1.0--1234567890abcdef/../../../../proc/self/cwd/fake"),
        ("version", "../fake"),
        ("version", "0.1.0/.."),
        ("version", "/tmp/fake"),
        ("version", ""),
        ("version", "0.1.0\n"),
        ("version", "1.0+local"),
        ("id", "acme/toy/.."),
        ("id", "acme--x/toy"),
        ("id", "-/-"),
        ("id", "acme/toy\n"),
        ("wheel", "../../outside.whl"),
        ("wheel", "/etc/passwd"),
        ("wheel", f"{WHEEL}\n"),
        ("wheel", "telescope_env_acme_other-0.1.0-py3-none-any.whl"),
        ("requirements", [f"six==1.17.0\n--index-url http://127.0.0.1/ {HASH}"]),
        ("requirements", [f"{GOOD}\n"]),
        ("requirements", [f"{GOOD}\n--extra-index-url=http://127.0.0.1/"]),
        ("requirements", [f"six==1.17.0 ; python_version > '3' \r-e . {HASH}"]),
        ("requirements", [f"six==1.17.0 ; python_version > '3'\u2028-e . {HASH}"]),
        ("requirements", [f"six==1.17.0 \\\n {HASH}"]),
        ("requirements", [f"six==1.17.0 \\ {HASH}"]),
        ("requirements", [f"six @ https://evil.example/x.whl {HASH}"]),
        ("requirements", [f"-r /etc/passwd {HASH}"]),
        ("requirements", [f"--find-links=/tmp {HASH}"]),
        ("requirements", ["six==1.17.0"]),
        ("requirements", [f"six==1.17.0 --no-binary=six {HASH}"]),
        ("requirements", [f"{GOOD} --index-url http://127.0.0.1/"]),
        ("requirements", [f"{GOOD} # --hash=sha256:{'b' * 64}\r\n-e ."]),
    ],
)
def test_a_field_that_is_not_as_it_is_written_is_refused(
    field: str, value: object, tmp_path: Path
) -> None:
    path = tmp_path / "telescope.lock"
    path.write_text(text_of(**{field: value}))
    with pytest.raises(ConfigError) as refusal:
        read_lock(path)
    assert re.search(rf"{re.escape(str(path))}:\d+: {field}(\.\d+)?: ", str(refusal.value))


@pytest.mark.parametrize("space", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\\\n"])
def test_no_line_break_of_any_kind_is_part_of_a_requirement(space: str) -> None:
    assert is_requirement_line(GOOD)
    assert is_requirement_line(f"six==1.17.0 ; python_full_version < '3.11' {HASH}")
    for at in range(len(GOOD) + 1):
        assert not is_requirement_line(GOOD[:at] + space + GOOD[at:])


def test_nothing_of_a_cloned_project_counts_as_built(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the folder of a project would have to look like, with an interpreter of its own.
    project = tmp_path / "project"
    (project / "fake" / "bin").mkdir(parents=True)
    started = tmp_path / "started"
    python = project / "fake" / "bin" / "python"
    python.write_text(f"#!/bin/sh\ntouch {started}\n")
    python.chmod(0o755)
    monkeypatch.chdir(project)
    venvs_folder().mkdir(parents=True)
    version = "0.1.0--1234567890abcdef/../../../../proc/self/cwd/fake"
    (project / "telescope.lock").write_text(text_of(version=version))
    with pytest.raises(ConfigError):
        read_lock(project / "telescope.lock")
    assert not started.exists()
    assert os.listdir(home) == ["venvs"]


def test_every_entry_that_can_be_read_is_built_directly_below_the_data_folder(
    tmp_path: Path, home: Path
) -> None:
    path = tmp_path / "telescope.lock"
    path.write_text(text_of())
    (entry,) = read_lock(path).environments
    folder = venv_folder(entry)
    assert folder.parent == venvs_folder() == home / "venvs"
    assert find_built(entry) is None
    write_lock(path, Lock(environments=(entry,)))
    assert read_lock(path).environments == (entry,)


def test_an_entry_cannot_be_made_in_code_either() -> None:
    with pytest.raises(ValueError, match="wheel"):
        converted(
            LockedEnvironment,
            {
                "id": "acme/toy",
                "version": "0.1.0",
                "wheel": "../x.whl",
                "sha256": "b" * 64,
                "registry": "/srv",
                "protocol": "1.0-1.0",
                "python": "3.11",
                "requirements": (),
                "requirements_sha256": digest_of(()),
            },
        )
