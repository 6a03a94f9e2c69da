"""Reads a project's owner, name and version from its pyproject.toml before it is built."""

from dataclasses import dataclass
from pathlib import Path

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.records.documents import (
    read_pyproject,
    table_at,
)
from telescope_envs.records.names import (
    ENTRY_POINT_GROUP,
    check_name,
    check_owner,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The owner, name and version of a project."""

    owner: str
    name: str
    version: str
    """Empty if the version is dynamic, so only the build determines it."""

    @property
    def id(self) -> str:
        """`owner/name`."""
        return f"{self.owner}/{self.name}"


def read_identity(project: Path) -> Identity:
    """Return the identity that `project` declares; raises ConfigError or RegistryError."""
    path = project / "pyproject.toml"
    document = read_pyproject(project)
    about = table_at(document, "project", path=path)
    entries = table_at(document, "project", "entry-points", ENTRY_POINT_GROUP, path=path)
    if "name" not in about or len(entries) != 1:
        raise ConfigError(
            f"{path}: expected project.name, and exactly one line under "
            f'[project.entry-points."{ENTRY_POINT_GROUP}"], such as toy = "module:Class"; '
            "telescope env init writes both"
        )
    (name,) = entries
    owner = owner_of(str(about["name"]), name)
    return Identity(owner=owner, name=name, version=str(about.get("version", "")))


def owner_of(distribution: str, name: str) -> str:
    """Return the owner in `telescope-env-<owner>-<name>`; raises RegistryError for other forms."""
    prefix, suffix = "telescope-env-", f"-{name}"
    owner = distribution.removeprefix(prefix).removesuffix(suffix)
    if distribution != f"{prefix}{owner}{suffix}":
        raise RegistryError(
            f"distribution {distribution!r} must be named {prefix}<owner>-{name}, because its "
            f"entry point is {name!r}; rename one of them in pyproject.toml"
        )
    check_owner(owner)
    check_name(name)
    return owner
