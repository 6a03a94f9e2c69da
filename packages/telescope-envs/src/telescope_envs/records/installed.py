"""Installed content of this interpreter: its environments, their releases, its packages.

Each installation leaves one record in the data folder. The fields that a list shows are read on
their own, so that damage elsewhere in the record does not hide the installation. Packages are read
from the folders of the import path: importing `importlib.metadata` and reading the entry points of
every package takes longer than listing a registry of ten thousand releases.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from packaging.utils import canonicalize_name

from telescope_core.base.errors import EnvironmentLoadError
from telescope_envs.records.files import data_folder, write_atomically
from telescope_envs.records.lockfile import LockedEnvironment
from telescope_envs.records.model import Record, read
from telescope_envs.records.names import ENTRY_POINT_GROUP, id_in_distribution
from telescope_envs.records.release import Release, check_part

RECORD_FORMAT = 1
"""Format of the records of installations. Those of another format are ignored."""
_FOLDERS = {".dist-info": "METADATA", ".egg-info": "PKG-INFO"}
"""Suffix of a metadata folder -> the file in the folder that holds name and version."""


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


class Installation(Record, frozen=True, kw_only=True):
    """The record that `env install` writes."""

    format: int = RECORD_FORMAT
    registry: str
    """Its address, in the form that `--registry` accepts."""
    installed_at: datetime
    release: Release
    interpreter: str = ""
    """Python of its own virtual environment; empty if it shares this record's interpreter."""
    locked: LockedEnvironment | None = None
    """Its lock entry; None if it shares the interpreter that this record belongs to."""

    def check(self) -> None:
        """Raise RecordProblem if its release or its lock entry has one."""
        check_part("release", self.release)
        if self.locked is not None:
            check_part("locked", self.locked)


class _Wheel(msgspec.Struct):
    sha256: str


class _Release(msgspec.Struct):
    owner: str
    name: str
    version: str
    summary: str
    distribution: str
    factory: str
    wheel: _Wheel


class _Head(msgspec.Struct):
    """The part of an installation's record that lists show."""

    release: _Release
    registry: str
    interpreter: str = ""
    format: int = RECORD_FORMAT


_HEAD = msgspec.json.Decoder(_Head)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEnvironment:
    """One environment that this interpreter can import."""

    id: str
    """`owner/name`, or the bare name if the owner of a package is not known."""
    name: str
    version: str
    distribution: str
    factory: str
    interpreter: str
    """The Python that can import it."""
    summary: str = ""
    """Empty without a record."""
    record: Path | None = None
    """None if it was installed by other means, such as an editable install."""
    registry: str = ""
    """Address of the registry it came from; empty without a record."""
    sha256: str = ""
    """sha256 of the wheel it was installed from; empty without a record."""

    @property
    def is_recorded(self) -> bool:
        """Whether it came from a registry."""
        return self.record is not None

    @property
    def installation(self) -> Installation | None:
        """The whole record, if it has one; raises EnvironmentLoadError if it is damaged."""
        if self.record is None:
            return None
        try:
            return read(Installation, self.record.read_bytes())
        except ValueError as error:
            raise EnvironmentLoadError(
                f"{self.record}: {error}; the record of this installation is damaged, "
                f"so install it again: telescope env install {self.id}"
            ) from None

    @property
    def is_damaged(self) -> bool:
        """Whether its record cannot be read completely."""
        try:
            _ = self.installation
        except EnvironmentLoadError:
            return True
        return False


def installed_environments() -> list[InstalledEnvironment]:
    """Return every environment this interpreter can import, by id.

    A record whose package is gone is ignored, and so is what cannot be a record of this format.
    """
    paths = sorted((data_folder() / "environments").glob("*/*.json"))
    folders = _folders_by_name()  # once for all, as there may be hundreds
    found = [one for path in paths if (one := _recorded(path, folders)) is not None]
    recorded = {one.distribution for one in found}
    for entry in entries_of(ENTRY_POINT_GROUP):
        if entry.distribution.name not in recorded:
            found.append(_unrecorded(entry))
    return sorted(found, key=lambda environment: environment.id)


def write_record(installation: Installation) -> None:
    """Write the record of an installation atomically."""
    write_atomically(record_path(installation.release.id), installation.as_json(indent=2))


def remove_record(environment_id: str) -> None:
    """Remove the record of the installation of owner/name, if there is one."""
    record_path(environment_id).unlink(missing_ok=True)


def record_path(environment_id: str) -> Path:
    """Return the place of the record of owner/name."""
    return data_folder() / "environments" / f"{environment_id}.json"


def _recorded(path: Path, folders: Mapping[str, list[str]]) -> InstalledEnvironment | None:
    try:
        head = _HEAD.decode(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    release = head.release
    environment_id = f"{release.owner}/{release.name}"
    if head.format != RECORD_FORMAT or path != record_path(environment_id):
        return None
    if head.interpreter:
        is_there = os.path.exists(head.interpreter)  # False as well for what cannot be a path
    else:
        is_there = _version_in(folders, release.distribution) == release.version
    if not is_there:
        return None
    return InstalledEnvironment(
        id=environment_id,
        name=release.name,
        version=release.version,
        summary=release.summary,
        distribution=release.distribution,
        factory=release.factory,
        interpreter=head.interpreter or sys.executable,
        record=path,
        registry=head.registry,
        sha256=release.wheel.sha256,
    )


def _unrecorded(entry: DeclaredEntry) -> InstalledEnvironment:
    distribution = entry.distribution
    return InstalledEnvironment(
        id=id_in_distribution(distribution.name, entry.name) or entry.name,
        name=entry.name,
        version=distribution.version,
        distribution=distribution.name,
        factory=entry.target,
        interpreter=sys.executable,
    )


def version_of(name: str) -> str | None:
    """Return the version of the installed package `name`; None when it is not installed."""
    return _version_in(_folders_by_name(), name)


def _version_in(folders: Mapping[str, list[str]], name: str) -> str | None:
    """Return the version that the first package of that name has which is whole."""
    found = map(_distribution, folders.get(canonicalize_name(name), []))
    return next((one.version for one in found if one is not None), None)


def _folders_by_name() -> dict[str, list[str]]:
    """Return the metadata folders of each package, in the order of the import path."""
    found: dict[str, list[str]] = {}
    for folder in _metadata_folders():
        stem = os.path.basename(folder).rpartition(".")[0]
        found.setdefault(canonicalize_name(stem.partition("-")[0]), []).append(folder)
    return found


def entries_of(group: str) -> list[DeclaredEntry]:
    """Return the entry points in `group`, except those of shadowed packages."""
    found: dict[str, list[DeclaredEntry]] = {}
    for folder in _metadata_folders():
        text = _text(f"{folder}/entry_points.txt")
        own = _distribution(folder) if f"[{group}]" in text else None
        if own is not None:
            entries = [DeclaredEntry(*pair, own) for pair in _pairs(text, group)]
            found.setdefault(canonicalize_name(own.name), entries)
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
