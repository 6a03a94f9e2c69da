"""What is installed here, as far as it takes to list it and to find it.

Each installation leaves one small record in the data folder. What a record says beyond this is
read by `installed`, for code that works with it.
"""

import os
from pathlib import Path

import msgspec

from telescope_envs.records.distributions import (
    DeclaredEntry,
    entries_of,
    version_of,
)
from telescope_envs.records.files import data_folder
from telescope_envs.records.names import ENTRY_POINT_GROUP

LOCK_NAME = "telescope.lock"
RECORD_FORMAT = 1
"""Format of the records of installations. Those of another format are ignored."""


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


class _Record(msgspec.Struct):
    release: _Release
    registry: str
    interpreter: str = ""
    format: int = RECORD_FORMAT


class RecordedInstallation(msgspec.Struct, frozen=True, kw_only=True):
    """One installed environment that has a record."""

    path: Path
    """The record."""
    id: str
    name: str
    version: str
    summary: str
    distribution: str
    factory: str
    """`module:Class`."""
    registry: str
    sha256: str
    """Digest of the wheel."""
    interpreter: str
    """Python of its own virtual environment; empty if it shares the one that reads this."""


class ListedInstallation(msgspec.Struct, frozen=True, kw_only=True):
    """One installed environment."""

    id: str
    version: str
    summary: str
    """Empty for a package that did not come from a registry."""
    is_from_registry: bool


class _Link(msgspec.Struct):
    id: str
    folder: str


class _Adapted(msgspec.Struct):
    name: str
    requirements: list[str]
    interpreter: str


_ADAPTED = msgspec.json.Decoder(_Adapted)
_RECORD = msgspec.json.Decoder(_Record)
_LINK = msgspec.json.Decoder(_Link)


def records_folder() -> Path:
    """Return where the records of installations are."""
    return data_folder() / "environments"


def links_folder() -> Path:
    """Return where the records of links are."""
    return data_folder() / "links"


def record_path(environment_id: str) -> Path:
    """Return the place of the record of owner/name."""
    return records_folder() / f"{environment_id}.json"


def link_paths() -> list[Path]:
    """Return the records of links, in order."""
    return sorted(links_folder().glob("*/*.json"))


def _is_there(distribution: str, version: str, interpreter: str) -> bool:
    """Whether what a record describes still exists: its Python, or its package in this one."""
    if interpreter:
        return os.path.exists(interpreter)  # False as well for what cannot be a path
    return version_of(distribution) == version


def unrecorded(recorded: set[str]) -> list[DeclaredEntry]:
    """Return the environments in this interpreter's packages that have no record."""
    entries = entries_of(ENTRY_POINT_GROUP)
    return [entry for entry in entries if entry.distribution.name not in recorded]


def id_of(entry: DeclaredEntry) -> str:
    """Return owner/name if the distribution's name contains the owner, else the bare name."""
    distribution = entry.distribution.name
    owner = distribution.removeprefix("telescope-env-").removesuffix(f"-{entry.name}")
    is_named_so = distribution == f"telescope-env-{owner}-{entry.name}"
    return f"{owner}/{entry.name}" if is_named_so else entry.name


def recorded_installations() -> list[RecordedInstallation]:
    """Return every installation that has a record, in the order of their ids.

    A record whose package is gone is ignored, and so is what cannot be a record of this format.
    """
    found: list[RecordedInstallation] = []
    for path in sorted(records_folder().glob("*/*.json")):
        try:
            record = _RECORD.decode(path.read_bytes())
        except (ValueError, RecursionError):
            continue
        release = record.release
        environment_id = f"{release.owner}/{release.name}"
        if (
            record.format == RECORD_FORMAT
            and path == record_path(environment_id)
            and _is_there(release.distribution, release.version, record.interpreter)
        ):
            found.append(
                RecordedInstallation(
                    path=path,
                    id=environment_id,
                    name=release.name,
                    version=release.version,
                    summary=release.summary,
                    distribution=release.distribution,
                    factory=release.factory,
                    registry=record.registry,
                    sha256=release.wheel.sha256,
                    interpreter=record.interpreter,
                )
            )
    return found


def listed_installations() -> list[ListedInstallation]:
    """Return every environment that this interpreter can import."""
    recorded = recorded_installations()
    found = [
        ListedInstallation(
            id=one.id, version=one.version, summary=one.summary, is_from_registry=True
        )
        for one in recorded
    ]
    return found + [
        ListedInstallation(
            id=id_of(entry),
            version=entry.distribution.version,
            summary="",
            is_from_registry=False,
        )
        for entry in unrecorded({one.distribution for one in recorded})
    ]


def adapted_folder() -> Path:
    """Return where the records of linked environments of other frameworks are."""
    return data_folder() / "adapted"


def listed_adapted() -> list[ListedInstallation]:
    """Return every linked environment of another framework."""
    found: list[ListedInstallation] = []
    for path in sorted(adapted_folder().glob("*.json")):
        try:
            link = _ADAPTED.decode(path.read_bytes())
        except (ValueError, RecursionError):
            continue
        if link.interpreter and not os.path.exists(link.interpreter):
            continue
        about = f"played through its framework: {', '.join(link.requirements) or 'a server'}"
        found.append(
            ListedInstallation(id=link.name, version="-", summary=about, is_from_registry=True)
        )
    return found


def listed_links() -> dict[str, Path]:
    """Return the folder of every link by the link's id, including folders that are gone."""
    found: dict[str, Path] = {}
    for path in link_paths():
        try:
            link = _LINK.decode(path.read_bytes())
        except (ValueError, RecursionError):
            continue
        if path == links_folder() / f"{link.id}.json":
            found[link.id] = Path(link.folder)
    return found


def find_lock(folder: Path | None = None) -> Path | None:
    """Return the nearest telescope.lock in `folder` (default: here) or above; None if none."""
    start = (folder or Path.cwd()).resolve()
    paths = (above / LOCK_NAME for above in (start, *start.parents))
    return next((path for path in paths if path.is_file()), None)
