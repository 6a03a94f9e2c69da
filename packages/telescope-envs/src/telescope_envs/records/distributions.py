"""Installed packages, read from the folders of the import path.

`importlib.metadata` offers the same and far more. But importing it and reading the entry points of
every package takes longer than listing a registry of ten thousand releases, so code that only lists
packages uses this module.
"""

import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

_FOLDERS = {".dist-info": "METADATA", ".egg-info": "PKG-INFO"}
"""Suffix of a metadata folder -> the file in the folder that holds name and version."""
_SEPARATORS = re.compile(r"[-_.]+")


class Distribution(NamedTuple):
    """One installed package."""

    name: str
    version: str


class DeclaredEntry(NamedTuple):
    """One entry point of an installed package."""

    name: str
    target: str
    """`module:attribute`."""
    distribution: Distribution


def version_of(name: str) -> str | None:
    """Return the version of the installed package `name`; None when it is not installed."""
    wanted = _normalized(name)
    for folder in _metadata_folders():
        stem = os.path.basename(folder).rpartition(".")[0]
        if _normalized(stem.partition("-")[0]) == wanted:
            found = _distribution(folder)
            if found is not None:
                return found.version
    return None


def entries_of(group: str) -> list[DeclaredEntry]:
    """Return the entry points in `group`, except those of shadowed packages."""
    found: dict[str, list[DeclaredEntry]] = {}
    for folder in _metadata_folders():
        text = _text(f"{folder}/entry_points.txt")
        own = _distribution(folder) if f"[{group}]" in text else None
        if own is not None:
            entries = [DeclaredEntry(*pair, own) for pair in _pairs(text, group)]
            found.setdefault(_normalized(own.name), entries)
    return [entry for entries in found.values() for entry in entries]


def _metadata_folders() -> Iterator[str]:
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue  # gone, or an archive
        for name in names:
            if os.path.splitext(name)[1] in _FOLDERS:
                yield os.path.join(folder, name)


def _distribution(folder: str) -> Distribution | None:
    """Return the package of `folder`; None for one that an interrupted installer left."""
    fields: dict[str, str] = {}
    for line in _text(f"{folder}/{_FOLDERS[os.path.splitext(folder)[1]]}").splitlines():
        name, colon, value = line.partition(":")
        if not colon:
            break
        fields.setdefault(name.lower(), value.strip())
    if "name" not in fields or "version" not in fields:
        return None
    return Distribution(fields["name"], fields["version"])


def _pairs(text: str, group: str) -> Iterator[tuple[str, str]]:
    """Yield name and target of each line of the section `group`."""
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        elif section == group and line and not line.startswith("#"):
            name, _, target = line.partition("=")
            yield name.strip(), target.strip()


def _text(path: str) -> str:
    """Return a file's text; empty where there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _normalized(name: str) -> str:
    return _SEPARATORS.sub("-", name).lower()
