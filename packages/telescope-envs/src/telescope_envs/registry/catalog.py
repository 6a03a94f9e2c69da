"""One row per environment: what listing and searching show, small enough to hold all of them.

Rows are made from index lines without the whole records, so that listing ten thousand releases
takes a fraction of a second. Nothing here reads a file.
"""

import re
from collections.abc import Sequence

import msgspec
from packaging.version import InvalidVersion, Version

from telescope_core.errors import RegistryError

CATALOG_PATH = "v1/index.json"
"""Where a place that cannot be listed keeps its catalogue: a JSON array of rows."""
_PLAIN_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*")


class CatalogRow(msgspec.Struct, frozen=True, kw_only=True):
    """The newest release of one environment that is not yanked, in short."""

    id: str
    """`owner/name`."""
    version: str
    """The newest final release; a pre-release only where there is no other."""
    summary: str
    tags: tuple[str, ...] = ()
    license: str = ""
    published_at: str = ""
    """ISO 8601."""
    verdict: str = "none"
    deprecated: str = ""
    """The reason; empty = it is not."""
    num_releases: int = 1


class _Verdict(msgspec.Struct, gc=False):
    verdict: str = "none"


class _Line(msgspec.Struct, gc=False):
    """The fields of an index line that a row shows."""

    version: str
    summary: str
    tags: tuple[str, ...] = ()
    license: str = ""
    published_at: str = ""
    validation: _Verdict = msgspec.field(default_factory=_Verdict)


class _Deprecation(msgspec.Struct):
    reason: str


class _Status(msgspec.Struct):
    yanked: dict[str, str] = {}
    deprecated: _Deprecation | None = None


_LINES = msgspec.json.Decoder(_Line)
_STATUS = msgspec.json.Decoder(_Status)
_ROWS = msgspec.json.Decoder(list[CatalogRow])


def catalog_row(environment_id: str, index: bytes, status: bytes | None) -> CatalogRow | None:
    """Return the row of an environment from its index and status files; None without a release."""
    where = f"index/{environment_id}.jsonl"
    try:
        lines = _LINES.decode_lines(index)
        where = f"status/{environment_id}.json"
        said = _STATUS.decode(status) if status is not None else _Status()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RegistryError(f"{where}: {error}; update the registry") from None
    if not lines:
        return None
    newest = lines[newest_version([line.version for line in lines], said.yanked)]
    deprecated = said.deprecated.reason if said.deprecated else ""
    if newest.version in said.yanked:
        deprecated = deprecated or f"every version is yanked: {said.yanked[newest.version]}"
    return CatalogRow(
        id=environment_id,
        version=newest.version,
        summary=newest.summary,
        tags=newest.tags,
        license=newest.license,
        published_at=newest.published_at,
        verdict=newest.validation.verdict,
        deprecated=deprecated,
        num_releases=len(lines),
    )


def newest_version(versions: Sequence[str], yanked: dict[str, str]) -> int:
    """Return the place of the version a person is shown: final before preview before yanked."""
    if all(map(_PLAIN_VERSION.fullmatch, versions)):
        plain = [tuple(map(int, version.split("."))) for version in versions]
        return max(range(len(plain)), key=lambda i: (versions[i] not in yanked, plain[i]))
    try:
        parsed = [Version(version) for version in versions]
    except InvalidVersion as error:
        raise RegistryError(f"{error}; update the registry") from None
    return max(
        range(len(parsed)),
        key=lambda i: (versions[i] not in yanked, not parsed[i].is_prerelease, parsed[i]),
    )


def read_catalog(data: bytes, where: str) -> list[CatalogRow]:
    """Return the rows of a `v1/index.json`, by id."""
    try:
        rows = _ROWS.decode(data)
    except msgspec.DecodeError as error:
        raise RegistryError(f"{where}: {error}; render the registry again") from None
    return sorted(rows, key=lambda row: row.id)


def write_catalog(rows: Sequence[CatalogRow]) -> bytes:
    """Return the bytes of a `v1/index.json`."""
    return msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n"
