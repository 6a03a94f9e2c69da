"""Links: environments that are used in place, or played through a framework.

A link is one small record of where a project or a framework is. A project's name, version and class
are read from its pyproject.toml each time, and its folder goes to the front of the import path of
the process that plays it. No package is installed, so no change needs a new installation.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from telescope_core.base.errors import ConfigError, EnvironmentLoadError
from telescope_envs.records.files import data_folder, sha256_of, write_atomically
from telescope_envs.records.model import Record, RecordProblem, read_known
from telescope_envs.records.projects import LinkedProject, read_project

_DIGITS = 16


class Link(Record, frozen=True, kw_only=True):
    """The record that `env link FOLDER` writes."""

    id: str
    folder: str
    linked_at: datetime

    @property
    def name(self) -> str:
        """The bare name."""
        return self.id.partition("/")[2]

    def project(self) -> LinkedProject:
        """Read the project again; raises EnvironmentLoadError if it is gone or a different one."""
        return linked_project(self.id, Path(self.folder))

    def check(self) -> None:
        """Raise RecordProblem for a path that cannot be a folder."""
        if "\0" in self.folder:
            raise RecordProblem("folder: the name of a folder cannot hold a null character")


class AdaptedLink(Record, frozen=True, kw_only=True):
    """The record that `env link SCHEME:ID` writes."""

    name: str
    """`SCHEME:ID`."""
    factory: str
    interpreter: str
    """Python that has the framework; empty = the running one, where the adapter needs none."""
    config: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    requirements: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ()
    """`name==version` of each package beside it; one that came from a file, a folder or a URL has
    the digest of its files as its local version."""
    secrets: tuple[str, ...] = ()
    """Names of the environment variables that it may read."""
    linked_at: datetime


def linked_project(environment_id: str, folder: Path) -> LinkedProject:
    """Read the project in `folder`, to which `environment_id` is linked.

    Raises EnvironmentLoadError if it cannot be used or is now a different environment.
    """
    try:
        found = read_project(folder)
    except ConfigError as error:
        raise EnvironmentLoadError(
            f"{environment_id} is linked to {folder}, which cannot be used: {error}. Fix "
            f"that, or run: telescope env uninstall {environment_id}"
        ) from error
    if found.id != environment_id:
        raise EnvironmentLoadError(
            f"{environment_id} is linked to {folder}, which is now {found.id}; run: telescope "
            f"env uninstall {environment_id}; telescope env link {folder}"
        )
    return found


def write_link(project: LinkedProject) -> None:
    """Write the record of a link atomically."""
    record = Link(id=project.id, folder=str(project.folder), linked_at=datetime.now(UTC))
    write_atomically(_record_path(project.id), record.as_json(indent=2))


def unlink(name: str) -> Link | None:
    """Remove and return the link of `name` or `owner/name`, but not its folder; None if none."""
    fitting = [link for link in links() if name in (link.id, link.name)]
    if len(fitting) > 1:
        raise ConfigError(
            f"{name!r} is linked for {len(fitting)} owners: "
            f"{', '.join(link.id for link in fitting)}; use one of these names"
        )
    for found in fitting:
        _record_path(found.id).unlink(missing_ok=True)
    return fitting[0] if fitting else None


def links() -> list[Link]:
    """Return every link in order of id, each once, including links to missing folders."""
    found = read_known(Link, (data_folder() / "links").glob("*/*.json"))
    return [link for path, link in found if path == _record_path(link.id)]


def adapted_links() -> list[AdaptedLink]:
    """Return every link whose Python still exists, in order of name."""
    found = read_known(AdaptedLink, (data_folder() / "adapted").glob("*.json"))
    usable = (one for _, one in found if not one.interpreter or os.path.exists(one.interpreter))
    return sorted(usable, key=lambda link: link.name)


def adapted_path(name: str) -> Path:
    """Return the place of the record of the linked `SCHEME:ID`."""
    digest = sha256_of(name)[:_DIGITS]
    return data_folder() / "adapted" / f"{digest}.json"


def _record_path(environment_id: str) -> Path:
    return data_folder() / "links" / f"{environment_id}.json"
