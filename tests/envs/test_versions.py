"""Which version comes next, and that raising it changes nothing else in pyproject.toml."""

import re

import pytest

from telescope_core.errors import ConfigError
from telescope_envs.publish.source import (
    bumped,
    require_above,
    with_version,
    write_version,
)
from telescope_envs.records.changes import is_major_step

PYPROJECT = """# version = "0.1.0" of what?
[build-system]
requires = ["hatchling"]   # as it is

[tool.ruff]
target-version = "py311"
version = "0.1.0"

[project]
name   =   "telescope-env-acme-toy"
version   =  "0.1.0"   # raised by hand, version = "0.1.0"

[tool.mypy]
python_version = "3.11"
"""


@pytest.mark.parametrize(
    ("current", "bump", "expected"),
    [
        ("0.1.0", "patch", "0.1.1"),
        ("0.1.9", "patch", "0.1.10"),
        ("0.1.3", "minor", "0.2.0"),
        ("0.1.3", "major", "1.0.0"),
        ("1", "patch", "1.0.1"),
        ("1.2.3.4", "patch", "1.2.4"),
        ("1.0.1rc1", "patch", "1.0.1"),
        ("1.1.0b2", "minor", "1.1.0"),
        ("2.0.0a1", "major", "2.0.0"),
        ("1.0.1rc1", "minor", "1.1.0"),
        ("1.1.0rc1", "major", "2.0.0"),
        ("1.0.0.dev3", "patch", "1.0.0"),
        ("1.0.post1", "patch", "1.0.1"),
        ("3!1.0", "minor", "3!1.1.0"),
        ("0.1.0", "0.2.0-rc.1", "0.2.0rc1"),
        ("0.1.0", "1.0.post1", "1.0.post1"),
    ],
)
def test_the_next_version(current, bump, expected):
    assert bumped(current, bump) == expected


@pytest.mark.parametrize(
    ("bump", "message"),
    [
        ("pach", "major, minor, patch"),
        ("1.0+local", "local"),
        ("1!1.0", "epoch"),
    ],
)
def test_what_is_no_version_to_publish(bump, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        bumped("0.1.0", bump)
    assert repr(bump) in str(refusal.value)


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_raising_changes_the_version_of_the_project_and_no_other_byte(ends):
    before = PYPROJECT.replace("\n", ends)
    line = 'version   =  "0.1.0"   #'
    assert with_version(before, "0.2.0") == before.replace(line, line.replace("0.1.0", "0.2.0"))


@pytest.mark.parametrize(
    "text",
    ['project = {name = "a", version = "1.0"} # x\n', 'project.version = "1.0"\nproject.name="a"'],
)
def test_other_ways_to_write_it(text):
    assert with_version(text, "1.1") == text.replace("1.0", "1.1")


def test_the_file_keeps_its_line_ends(tmp_path):
    path = tmp_path / "pyproject.toml"
    path.write_bytes(PYPROJECT.replace("\n", "\r\n").encode())
    write_version(path, "0.2.0")
    assert path.read_bytes().count(b"\r\n") == PYPROJECT.count("\n")


@pytest.mark.parametrize("text", ['[project]\nname = "a"\n', "", '[project]\nversion = ["1"]\n'])
def test_a_version_that_is_not_there_cannot_be_raised(text):
    with pytest.raises(ConfigError, match=r"project\.version"):
        with_version(text, "0.2.0")


@pytest.mark.parametrize("version", ["0.1.9", "0.2.0rc1", "0.2.0"])
def test_a_version_that_is_not_above_the_newest_is_refused(version):
    with pytest.raises(ConfigError, match=rf"{re.escape(version)} .*0\.2\.0"):
        require_above(version, ["0.1.0", "0.2.0", "0.1.5"], "acme/toy")


def test_a_version_above_the_newest_is_fine():
    require_above("0.10.0", ["0.1.0", "0.9.0"], "acme/toy")
    require_above("0.1.0", [], "acme/toy")


def test_a_major_step_is_one_of_the_first_number_or_the_epoch():
    assert is_major_step("0.9", "1.0")
    assert is_major_step("2.0", "1!1.0")
    assert not is_major_step("1.0", "1.9.post1")
