"""Installed packages read from folders: the same as `importlib.metadata` finds."""

import sys
from importlib import metadata

import pytest

from telescope_envs.records.installed import (
    DeclaredEntry,
    Distribution,
    entries_of,
    version_of,
)


@pytest.mark.parametrize("group", ["console_scripts", "pytest11"])
def test_entry_points_are_those_of_the_standard_library(group):
    expected = {
        (point.name, point.value, point.dist.name, point.dist.version)
        for point in metadata.entry_points(group=group)
    }
    assert expected
    found = {(one.name, one.target, *one.distribution) for one in entries_of(group)}
    assert found == expected


def test_versions_are_those_of_the_standard_library():
    every = sorted({found.name for found in metadata.distributions()})
    names = {"telescope-envs", "pytest", *every[::12]}  # each is looked for among all others
    assert names < {*every}
    assert {name: version_of(name) for name in names} == {
        name: metadata.version(name) for name in names
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "gone"), str(tmp_path)])
    return tmp_path


def write(folder, name: str, metadata_file: str, head: str, entries: str = "") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / metadata_file).write_text(head)
    if entries:
        (folder / name / "entry_points.txt").write_text(entries)


def test_names_are_compared_as_installers_do(folder):
    write(folder, "My_Env-1.0.dist-info", "METADATA", "Name: My.Env\nVersion: 1.0\n\nName: text\n")
    write(folder, "old.egg-info", "PKG-INFO", "Name: old\nVersion: 2\n")
    assert (version_of("my-env"), version_of("old"), version_of("my")) == ("1.0", "2", None)


def test_entries_are_those_of_the_first_folder_that_has_the_package(folder, monkeypatch):
    first = folder / "first"
    lines = "[other]\nx = y:z\n# a remark\n[group]\n Name = module:Class \n[last]\na = b\n"
    for place, version in ((first, "2"), (folder, "1")):
        head = f"Name: toy\nVersion: {version}\n"
        write(place, f"toy-{version}.dist-info", "METADATA", head, lines)
    monkeypatch.setattr(sys, "path", [str(first), str(folder)])
    entry = DeclaredEntry("Name", "module:Class", Distribution("toy", "2"))
    assert entries_of("group") == [entry]


def test_what_an_interrupted_installer_left_is_no_package(folder):
    write(folder, "half-1.0.dist-info", "METADATA", "", "[group]\na = b:c\n")
    assert (version_of("half"), entries_of("group")) == (None, [])
