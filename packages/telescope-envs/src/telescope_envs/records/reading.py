"""Parses a registry's files into records; errors are RegistryErrors that name file and line."""

import json
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from telescope_core.errors import RegistryError
from telescope_envs.records.catalog import (
    FullReaders,
    Unreadable,
)
from telescope_envs.records.documents import read_toml
from telescope_envs.records.lines import (
    MAX_LINE_BYTES,
    ListedLine,
    ListedStatus,
    index_lines,
)
from telescope_envs.records.names import (
    PRINTABLE,
    VARIABLE,
)
from telescope_envs.records.release import (
    Aliases,
    Namespace,
    Release,
    Status,
)

_PATTERNS = {
    PRINTABLE: "contains control characters or line breaks",
    VARIABLE: "is not the name of an environment variable",
}
"""Pattern of a text -> what is wrong with a text that does not match it."""
RecordType = TypeVar("RecordType", bound=BaseModel)


class ReadReleases(NamedTuple):
    """The releases of an index file, and the lines that are not one."""

    releases: list[Release]
    unreadable: list[Unreadable]


def parse_record(record: type[RecordType], text: bytes, where: str) -> RecordType:
    """Return the record in the JSON `text`; `where` is its location, for errors."""
    if record in (Release, Status) and len(text) > MAX_LINE_BYTES:
        raise RegistryError(
            f"{where}: longer than {MAX_LINE_BYTES} bytes, the limit for a record; "
            "update the registry"
        )
    try:
        # One reader of JSON for all records: others also take NaN and infinities, which it has not.
        return record.model_validate(msgspec.json.decode(text))
    except ValidationError as error:
        raise RegistryError(_what_is_wrong(error, where)) from None
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"{where}: not JSON: {error}; update the registry") from None


def problem_of(error: ValidationError) -> str:
    """Return the field of a record that is wrong, and why."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "record"
    return f"{field}: {_PATTERNS.get(first.get('ctx', {}).get('pattern', ''), first['msg'])}"


def read_releases(data: bytes, environment_id: str, where: str) -> ReadReleases:
    """Return the releases of an index file in file order, the first published first.

    A line that cannot be read is left out and named, because one line must not make the other
    releases of an environment unusable.
    """
    releases: list[Release] = []
    unreadable: list[Unreadable] = []
    for number, line in enumerate(index_lines(data), 1):
        place = f"{where}:{number}"
        try:
            releases.append(_release_of(line, environment_id, place))
        except RegistryError as error:
            unreadable.append(_unreadable(line, place, str(error)))
    return ReadReleases(releases, unreadable)


def _release_of(line: bytes, environment_id: str, where: str) -> Release:
    if not line.endswith(b"\n"):
        raise RegistryError(
            f"{where}: the last line has no newline, so its writer was interrupted; "
            "restore the file"
        )
    release = parse_record(Release, line, where)
    if release.id != environment_id:
        raise RegistryError(f"{where}: contains a release of {release.id}; update the registry")
    return release


def _listed_line(line: bytes, environment_id: str, where: str) -> ListedLine:
    release = _release_of(line, environment_id, where)
    return ListedLine(
        version=release.version,
        summary=release.summary,
        tags=release.tags,
        license=release.license,
        published_at=release.model_dump(mode="json", include={"published_at"})["published_at"],
        verdict=release.validation.verdict,
    )


def _listed_status(data: bytes, where: str) -> ListedStatus:
    status = parse_record(Status, data, where)
    reason = status.deprecated.reason if status.deprecated else ""
    return ListedStatus(yanked=status.yanked, deprecated=reason)


FULL_READERS = FullReaders(line=_listed_line, status=_listed_status)


class _Stated(msgspec.Struct):
    """What is needed of a release that cannot be read, so that it is not published again."""

    version: str = ""
    wheel: dict[str, Any] = {}


def _unreadable(line: bytes, where: str, why: str) -> Unreadable:
    try:
        # Not as strict as the records are: old servers stored lines with NaN.
        stated = msgspec.convert(json.loads(line), _Stated)
    except (ValueError, msgspec.ValidationError, RecursionError):
        stated = _Stated()
    digest = stated.wheel.get("sha256", "")
    return Unreadable(where, why, version=stated.version, sha256=str(digest))


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
    return f"{where}: {problem_of(error)}; update the registry"
