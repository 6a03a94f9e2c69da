"""Reads the pyproject.toml of a project: tables are tables and texts are texts, or a ConfigError.

What each command needs of it is that command's matter.
"""

from pathlib import Path
from typing import cast

from telescope_core.errors import ConfigError
from telescope_envs.documents import read_toml

Table = dict[str, object]


def read_pyproject(project: Path) -> Table:
    """Return the tables of the project's pyproject.toml; raises ConfigError if it has none."""
    path = project / "pyproject.toml"
    try:
        return read_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def table_at(document: Table, *names: str, path: Path) -> Table:
    """Return the table at `names`, empty if it is not there; ConfigError if it is no table."""
    here = document
    for depth, name in enumerate(names, 1):
        found = here.get(name, {})
        if not isinstance(found, dict):
            where = ".".join(names[:depth])
            raise ConfigError(f"{path}: {where} must be a table, got {found!r}")
        here = cast(Table, found)
    return here


def texts_at(table: Table, key: str, where: str, *, path: Path) -> list[str]:
    """Return the list of texts under `key`, empty if it is not there; else ConfigError."""
    listed = table.get(key, [])
    if not isinstance(listed, list) or not all(
        isinstance(text, str) for text in cast(list[object], listed)
    ):
        raise ConfigError(f"{path}: {where}.{key} must be a list of texts, got {listed!r}")
    return cast(list[str], listed)
