"""Parses a registry's files into records; errors are RegistryErrors that name file and line."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from telescope_core.errors import RegistryError
from telescope_envs.documents import read_toml
from telescope_envs.registry.records import Aliases, Namespace, Release, Status

RecordType = TypeVar("RecordType", bound=BaseModel)


def parse_record(record: type[RecordType], text: bytes, where: str) -> RecordType:
    """Return the record in the JSON `text`; `where` is its location, for errors."""
    try:
        return record.model_validate_json(text)
    except ValidationError as error:
        raise RegistryError(_what_is_wrong(error, where)) from None


def parse_releases(data: bytes, environment_id: str, where: str) -> list[Release]:
    """Return the releases of an index file in file order, the first published first."""
    lines = data.split(b"\n")
    if lines.pop():
        raise RegistryError(
            f"{where}:{len(lines) + 1}: the last line has no newline, so its writer was "
            "interrupted; restore the file"
        )
    releases = [parse_record(Release, line, f"{where}:{i + 1}") for i, line in enumerate(lines)]
    for number, release in enumerate(releases):
        if release.id != environment_id:
            raise RegistryError(f"{where}:{number + 1}: contains a release of {release.id}")
    return releases


def parse_status(data: bytes | None, where: str) -> Status:
    """Return a status record; an empty one if there is no file."""
    return parse_record(Status, data, where) if data is not None else Status()


def parse_namespace(data: bytes, where: str) -> Namespace:
    """Return a namespace record, of whatever owner."""
    return _of_tables(Namespace, data, where)


def parse_namespace_of(owner: str, data: bytes, where: str) -> Namespace:
    """Return the namespace record of `owner`; RegistryError if it says that it is another's."""
    found = parse_namespace(data, where)
    if found.owner != owner:
        raise RegistryError(
            f"{where} belongs to owner {found.owner!r}; tell the registry's maintainers"
        )
    return found


def parse_aliases(data: bytes, where: str) -> Aliases:
    """Return the record of the bare names."""
    return _of_tables(Aliases, data, where)


def _of_tables(record: type[RecordType], data: bytes, where: str) -> RecordType:
    try:
        return record.model_validate(read_toml(data))
    except ValidationError as error:
        raise RegistryError(_what_is_wrong(error, where)) from None
    except ValueError as error:
        raise RegistryError(f"{where}: not TOML: {error}; update the registry") from error


def _what_is_wrong(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "record"
    return f"{where}: {field}: {first['msg']}; update the registry"
