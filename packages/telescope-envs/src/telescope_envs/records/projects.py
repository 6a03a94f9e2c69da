"""Read a project's pyproject.toml: the identity of its environment, and its package.

The table of datasets beside it is read here too. Each command checks the fields that it needs.
"""

import codecs
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.version import Version

from telescope_core.base.decoders import json_decoder
from telescope_core.base.errors import ConfigError
from telescope_envs.records.files import read_file
from telescope_envs.records.model import explained, read_pyproject, table_at, texts_at
from telescope_envs.records.names import (
    ENTRY_POINT_GROUP,
    check_name,
    check_owner,
    distribution_name,
    id_in_distribution,
    module_name,
)
from telescope_envs.records.release import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The owner, name and version of a project."""

    owner: str
    name: str
    version: str
    """Empty if the version is dynamic, so only the build determines it."""
    factory: str
    """`module:Class`, as it is declared."""

    @property
    def id(self) -> str:
        """`owner/name`."""
        return f"{self.owner}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedProject(Identity):
    """Declarations in a project's pyproject.toml; the version is never empty."""

    folder: Path
    source: Path
    """The folder to import it from: the project's folder, or its `src`."""
    summary: str
    module: str
    requires_dist: tuple[str, ...]


def read_identity(project: Path) -> Identity:
    """Return the identity that `project` declares; raises ConfigError or RegistryError."""
    path = project / "pyproject.toml"
    document = read_pyproject(project)
    about = table_at(document, "project", path=path)
    entries = table_at(document, "project", "entry-points", ENTRY_POINT_GROUP, path=path)
    if not isinstance(about.get("name"), str) or len(entries) != 1:
        raise ConfigError(
            f"{path}: expected project.name, and exactly one line under "
            f'[project.entry-points."{ENTRY_POINT_GROUP}"], such as toy = "module:Class"; '
            "telescope env init writes both"
        )
    ((name, factory),) = entries.items()
    distribution = str(about["name"])
    owner = id_in_distribution(distribution, name).partition("/")[0]
    if not owner:
        raise ConfigError(
            f"distribution {distribution!r} must be named {distribution_name('<owner>', name)}, "
            f"because its entry point is {name!r}; rename one of them in pyproject.toml"
        )
    return Identity(
        owner=check_owner(owner),
        name=check_name(name),
        version=str(about.get("version", "")),
        factory=str(factory),
    )


def require_project(folder: Path) -> None:
    """Raise ConfigError unless `folder` is one with a pyproject.toml."""
    # Not by methods of Path, which fail for what cannot be a path.
    if not os.path.isfile(folder / "pyproject.toml"):
        lacks = "contains no pyproject.toml" if os.path.isdir(folder) else "is not a folder"
        raise ConfigError(
            f"{folder} {lacks}; give the folder of an environment's project, or create one: "
            "telescope env init NAME --template single-turn"
        )


def read_project(folder: Path) -> LinkedProject:
    """Return the declarations in pyproject.toml of `folder`; raises ConfigError if invalid."""
    folder = folder.expanduser().resolve()
    path = folder / "pyproject.toml"
    require_project(folder)
    try:
        identity = read_identity(folder)
    except ConfigError as error:
        named = str(error).startswith(str(path))
        raise ConfigError(str(error) if named else f"{path}: {error}") from error
    module, factory = module_name(identity.owner, identity.name), identity.factory
    if factory.partition(":")[0].partition(".")[0] != module or ":" not in factory:
        raise ConfigError(
            f"{path}: the entry point {identity.name} must be {module}:Class, got {factory!r}"
        )
    table = table_at(read_pyproject(folder), "project", path=path)
    try:
        version = str(Version(identity.version))
    except ValueError as error:
        raise ConfigError(f"{path}: project.version: {error}") from error
    texts = texts_at(table, "dependencies", "project", path=path)
    try:
        requires_dist = tuple(str(Requirement(text)) for text in texts)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: project.dependencies: {error}") from error
    return LinkedProject(
        folder=folder,
        source=_source(folder, module),
        owner=identity.owner,
        name=identity.name,
        version=version,
        summary=str(table.get("description", "")),
        module=module,
        factory=factory,
        requires_dist=requires_dist,
    )


def read_datasets(project: Path) -> list[Dataset] | None:
    """Return the datasets in the project's datasets.json; None if there is no such file.

    Raises ConfigError, which begins with the field, if it is no list of datasets.
    """
    path = project / "datasets.json"
    if not path.is_file():
        return None
    try:
        data = read_file(path, follows_link=True).removeprefix(codecs.BOM_UTF8)
        return json_decoder(list[Dataset]).decode(data)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(explained(error)) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from None


def _source(folder: Path, module: str) -> Path:
    for source in (folder, folder / "src"):
        if (source / module / "__init__.py").is_file():
            return source
    raise ConfigError(
        f"{folder}: expected the package {module}/ with an __init__.py, in the folder or its src"
    )
