"""Reads a project's owner, name and version from its pyproject.toml before it is built."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.registry.names import ENTRY_POINT_GROUP, check_name, check_owner


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
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    about: dict[str, Any] = table.get("project", {})
    entries: dict[str, Any] = about.get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
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
