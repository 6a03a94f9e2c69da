"""Reads TOML and JSON that somebody else wrote: whatever is wrong with it is one kind of error.

The parsers of the standard library fail in several ways: by their own error, by one about UTF-8, by
recursion, and by the length of a number. They also return values that nobody can print afterwards.
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

from telescope_core.errors import ConfigError

_MAX_DEPTH = 100
_MAX_INTEGER = 2**63 - 1
"""As TOML requires of its readers; Python cannot even print integers of any size."""
Document = TypeVar("Document")


def read_toml(data: str | bytes) -> dict[str, object]:
    """Return the tables of a TOML document; raises ValueError with the reason."""
    return _read(lambda: tomllib.loads(data if isinstance(data, str) else data.decode()))


def read_json(data: str | bytes) -> object:
    """Return a JSON document; raises ValueError with the reason."""
    return _read(lambda: cast(object, json.loads(data)))


def _read(parse: Callable[[], Document]) -> Document:
    try:
        document = parse()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _require_plain(document)
    return document


def _require_plain(document: object) -> None:
    """Raise ValueError for what cannot be printed: deep nesting, huge integers, half characters."""
    level: list[object] = [document]
    for _ in range(_MAX_DEPTH):
        for value in level:
            if isinstance(value, int) and abs(value) > _MAX_INTEGER:
                raise ValueError("an integer in it has more than 64 bits")
            if isinstance(value, str):
                value.encode()  # fails for half of a pair of surrogates
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for key, inner in cast(dict[object, object], value).items():
            yield key
            yield inner
    elif isinstance(value, list):
        yield from cast(list[object], value)


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
