"""A quick inventory of what is installed here, with just enough detail to list it.

`installed` reads the same records in full, for code that works with them. Both ignore a record
whose package is gone.
"""

import os
from pathlib import Path

import msgspec

from telescope_envs.distributions import DeclaredEntry, entries_of, version_of
from telescope_envs.home import data_folder
from telescope_envs.registry.names import ENTRY_POINT_GROUP

LOCK_NAME = "telescope.lock"


class _Release(msgspec.Struct):
    owner: str
    name: str
    version: str
    summary: str
    distribution: str


class _Record(msgspec.Struct):
    """The fields of an installation's record that a list shows."""

    release: _Release
    interpreter: str = ""


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


_RECORD = msgspec.json.Decoder(_Record)
_LINK = msgspec.json.Decoder(_Link)


def records_folder() -> Path:
    """Return where the records of installations are."""
    return data_folder() / "environments"


def links_folder() -> Path:
    """Return where the records of links are."""
    return data_folder() / "links"


def record_paths() -> list[Path]:
    """Return the records of installations, in order."""
    return sorted(records_folder().glob("*/*.json"))


def link_paths() -> list[Path]:
    """Return the records of links, in order."""
    return sorted(links_folder().glob("*/*.json"))


def is_there(distribution: str, version: str, interpreter: str) -> bool:
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


def listed_installations() -> list[ListedInstallation]:
    """Return every environment that this interpreter can import."""
    found: list[ListedInstallation] = []
    recorded: set[str] = set()
    for path in record_paths():
        try:
            record = _RECORD.decode(path.read_bytes())
        except (ValueError, RecursionError):
            continue  # written by another version of Telescope, so ignored
        release = record.release
        if is_there(release.distribution, release.version, record.interpreter):
            recorded.add(release.distribution)
            found.append(
                ListedInstallation(
                    id=f"{release.owner}/{release.name}",
                    version=release.version,
                    summary=release.summary,
                    is_from_registry=True,
                )
            )
    return found + [
        ListedInstallation(
            id=id_of(entry),
            version=entry.distribution.version,
            summary="",
            is_from_registry=False,
        )
        for entry in unrecorded(recorded)
    ]


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
