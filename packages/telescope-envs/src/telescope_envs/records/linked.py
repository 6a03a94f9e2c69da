"""Linked environments: project folders that are used in place while somebody works on them.

A link is one small record of where the project is. The project's name, version and class are read
from its pyproject.toml each time, and its folder goes to the front of the import path of the
process that plays it. No package is installed, so no change needs a new installation.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from packaging.requirements import Requirement
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from telescope_core.errors import ConfigError, EnvironmentLoadError, TelescopeError
from telescope_envs.records.documents import (
    Table,
    read_pyproject,
    table_at,
    texts_at,
)
from telescope_envs.records.inventory import (
    link_paths,
    links_folder,
)
from telescope_envs.records.names import (
    ENTRY_POINT_GROUP,
    check_name,
    check_owner,
    distribution_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedProject:
    """What a project's pyproject.toml declares."""

    folder: Path
    source: Path
    """The folder to import it from: the project's folder, or its `src`."""
    owner: str
    name: str
    version: str
    summary: str
    module: str
    factory: str
    """`module:Class`."""
    requires_dist: tuple[str, ...]

    @property
    def id(self) -> str:
        """`owner/name`."""
        return f"{self.owner}/{self.name}"


def _is_path(folder: Path) -> Path:
    if "\0" in str(folder):
        raise ValueError("the name of a folder cannot hold a null character")
    return folder


class Link(BaseModel):
    """The record that `env link` writes."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    id: str
    folder: Annotated[Path, AfterValidator(_is_path)]
    linked_at: datetime

    @property
    def name(self) -> str:
        """The bare name."""
        return self.id.partition("/")[2]

    def project(self) -> LinkedProject:
        """Read the project again; raises EnvironmentLoadError if it is gone or a different one."""
        return linked_project(self.id, self.folder)


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
    record = Link(id=project.id, folder=project.folder, linked_at=datetime.now(UTC))
    path = _record_path(project.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    scratch.write_text(record.model_dump_json(indent=2))
    os.replace(scratch, path)


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
    """Return every link in order of id, each once, including links to folders that are gone."""
    found: list[Link] = []
    for path in link_paths():
        try:
            link = Link.model_validate_json(path.read_bytes())
        except ValidationError:
            continue  # written by another version of Telescope, so ignored
        if path == _record_path(link.id):
            found.append(link)
    return found


def read_project(folder: Path) -> LinkedProject:
    """Return what the pyproject.toml in `folder` declares; raises ConfigError if it is invalid."""
    folder = folder.expanduser().resolve()
    path = folder / "pyproject.toml"
    if not os.path.isfile(path):
        why = "holds no pyproject.toml" if os.path.isdir(folder) else "is not a folder"
        raise ConfigError(
            f"{folder} {why}; expected the folder of an environment's project, such as "
            "`telescope env init` creates"
        )
    document = read_pyproject(folder)
    if "project" not in document:
        raise ConfigError(f"{path}: has no table [project]")
    table = table_at(document, "project", path=path)
    name, factory = _entry_point(table, path)
    distribution = _text(table, "name", path)
    owner = distribution.removeprefix("telescope-env-").removesuffix(f"-{name}")
    if distribution != distribution_name(owner, name):
        raise ConfigError(
            f"{path}: project.name must be telescope-env-<owner>-{name}, got {distribution!r}"
        )
    module = distribution.replace("-", "_")
    if factory.partition(":")[0].partition(".")[0] != module or ":" not in factory:
        raise ConfigError(f"{path}: the entry point {name} must be {module}:Class, got {factory!r}")
    return LinkedProject(
        folder=folder,
        source=_source(folder, module),
        owner=_valid(check_owner, owner, path),
        name=_valid(check_name, name, path),
        version=_version(_text(table, "version", path), path),
        summary=str(table.get("description", "")),
        module=module,
        factory=factory,
        requires_dist=_requirements(table, path),
    )


def source_digest(project: LinkedProject) -> str:
    """Return the sha256 of the names and bytes of the package's files, except byte code."""
    digest = hashlib.sha256()
    for path in _package_files(project):
        content = path.read_bytes()
        name = path.relative_to(project.source).as_posix()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _package_files(project: LinkedProject) -> Iterator[Path]:
    for path in sorted((project.source / project.module).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _record_path(environment_id: str) -> Path:
    return links_folder() / f"{environment_id}.json"


def _text(table: Table, key: str, path: Path) -> str:
    value: object = table.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: project.{key} must be a non-empty string, got {value!r}")
    return value


def _entry_point(table: Table, path: Path) -> tuple[str, str]:
    entries = list(table_at(table, "entry-points", ENTRY_POINT_GROUP, path=path).items())
    if len(entries) != 1 or not isinstance(entries[0][1], str):
        raise ConfigError(
            f"{path}: expected one environment in "
            f'[project.entry-points."{ENTRY_POINT_GROUP}"], got {len(entries)}'
        )
    return entries[0][0], str(entries[0][1])


def _source(folder: Path, module: str) -> Path:
    for source in (folder, folder / "src"):
        if (source / module / "__init__.py").is_file():
            return source
    raise ConfigError(
        f"{folder}: expected the package {module}/ with an __init__.py, in the folder or its src"
    )


def _valid(check: Any, text: str, path: Path) -> str:
    try:
        return str(check(text))
    except TelescopeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _version(text: str, path: Path) -> str:
    try:
        return str(Version(text))
    except ValueError as error:
        raise ConfigError(f"{path}: project.version: {error}") from error


def _requirements(table: Table, path: Path) -> tuple[str, ...]:
    texts = texts_at(table, "dependencies", "project", path=path)
    try:
        return tuple(str(Requirement(text)) for text in texts)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: project.dependencies: {error}") from error
