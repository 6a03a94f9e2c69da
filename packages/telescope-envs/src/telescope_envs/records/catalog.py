"""The catalog of a registry: one row per environment, for listing and searching.

Nothing here reads a file.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
from packaging.version import Version

from telescope_core.base.errors import RegistryError
from telescope_core.base.terminal import acts_on_terminals
from telescope_envs.records.names import near_names
from telescope_envs.records.reading import Unreadable, parse_status, read_releases
from telescope_envs.records.release import Release, Status

CATALOG_PATH = "v1/index.json"
"""Path of the catalog, a JSON array of rows, in a registry whose folders cannot be listed."""
_PLAIN_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*")
_WORDS = re.compile(r"[^\W_]+")
_SHORTEST_WITH_TYPO = 4
"""Shortest word that may match with a typo; many shorter words differ in one letter."""
_IS_NAME, _BEGINS_NAME = 0, 1
_WORD_OF_NAME, _BEGINS_WORD, _TAG, _IN_NAME, _OWNER, _SUMMARY, _TYPO = range(2, 9)


class CatalogRow(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the newest release of one environment that is not yanked."""

    id: str
    """`owner/name`."""
    version: str
    """The newest final release, or the newest pre-release if there is no final one."""
    summary: str
    tags: tuple[str, ...] = ()
    license: str = ""
    published_at: str = ""
    """ISO 8601."""
    verdict: str = "none"
    deprecated: str = ""
    """The reason why it is deprecated; empty if it is not."""
    num_releases: int = 1


class ReadRow(NamedTuple):
    """An environment's row, and its records that cannot be read."""

    row: CatalogRow | None
    """None if there is nothing to show."""
    unreadable: list[Unreadable]


class ReadCatalog(NamedTuple):
    """The rows of a whole registry, and its records that cannot be read."""

    rows: list[CatalogRow]
    unreadable: list[Unreadable]


_ALL_YANKED = "every version is yanked"
_ROW = msgspec.json.Decoder(CatalogRow)
_ROWS = msgspec.json.Decoder(list[msgspec.Raw])


def catalog_row(environment_id: str, index: bytes, status: bytes | None) -> ReadRow:
    """Return an environment's row from its index and status files.

    Records that cannot be read are skipped and named. An environment whose status cannot be read
    has no row, because the status could say that nobody should use it.
    """
    found = read_releases(index, environment_id, f"index/{environment_id}.jsonl")
    where = f"status/{environment_id}.json"
    try:
        said = parse_status(status, where)
    except RegistryError as error:
        return ReadRow(None, [*found.unreadable, Unreadable(where, str(error))])
    row = _row(environment_id, found.releases, said) if found.releases else None
    return ReadRow(row, found.unreadable)


def _row(environment_id: str, releases: Sequence[Release], said: Status) -> CatalogRow:
    newest = releases[newest_version([one.version for one in releases], said.yanked)]
    deprecated = said.deprecated.reason if said.deprecated else ""
    if newest.version in said.yanked:
        deprecated = deprecated or f"{_ALL_YANKED}: {said.yanked[newest.version]}"
    return CatalogRow(
        id=environment_id,
        version=newest.version,
        summary=newest.summary,
        tags=newest.tags,
        license=newest.license,
        published_at=newest.published_at.isoformat().replace("+00:00", "Z"),
        verdict=newest.validation.verdict,
        deprecated=deprecated,
        num_releases=len(releases),
    )


def mark_of(deprecated: str) -> str:
    """Return the mark beside an environment whose row says this of its deprecation."""
    if not deprecated:
        return ""
    return f"({_ALL_YANKED if deprecated.startswith(_ALL_YANKED) else 'deprecated'})"


def newest_version(versions: Sequence[str], yanked: dict[str, str]) -> int:
    """Return the index in `versions` of the version to show.

    A final version is preferred over a pre-release, and either over a yanked version.
    """
    plain = [_plain_key(version) for version in versions]
    if all(plain):
        return max(range(len(plain)), key=lambda i: (versions[i] not in yanked, plain[i]))
    parsed = [Version(version) for version in versions]
    return max(
        range(len(parsed)),
        key=lambda i: (versions[i] not in yanked, not parsed[i].is_prerelease, parsed[i]),
    )


def _printable(row: CatalogRow) -> CatalogRow:
    """Return a row of texts that may be printed; raises ValidationError for any other."""
    texts = (row.id, row.version, row.summary, row.license, row.published_at, row.verdict)
    if acts_on_terminals("".join((*texts, row.deprecated, *row.tags))):
        raise msgspec.ValidationError("contains control characters")
    return row


@cache
def _plain_key(version: str) -> tuple[int, ...]:
    """Return a purely numeric version as integers for sorting; empty for any other version."""
    is_plain = _PLAIN_VERSION.fullmatch(version)
    return tuple(map(int, version.split("."))) if is_plain else ()


def read_catalog(data: bytes, where: str) -> ReadCatalog:
    """Return the rows of a `v1/index.json`, sorted by id; rows that cannot be read are named."""
    try:
        texts = _ROWS.decode(data)
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"{where}: {error}; render the registry again") from None
    rows: list[CatalogRow] = []
    unreadable: list[Unreadable] = []
    for number, text in enumerate(texts, 1):
        place = f"{where}, row {number}"
        try:
            rows.append(_printable(_ROW.decode(text)))
        except (ValueError, RecursionError) as error:
            why = f"{place}: {error}; render the registry again"
            unreadable.append(Unreadable(place, why))
    return ReadCatalog(sorted(rows, key=lambda row: row.id), unreadable)


def write_catalog(rows: Sequence[CatalogRow]) -> bytes:
    """Return the bytes of a `v1/index.json`."""
    return msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n"


def search(rows: Iterable[CatalogRow], query: str, tags: Sequence[str] = ()) -> list[CatalogRow]:
    """Return the rows that have all `tags` and match every word of `query`, best first.

    A name that equals the query comes first, then names that begin with it, then matches on words
    of the name, tags, words of the summary, and words with one typo. Deprecated environments come
    last.
    """
    wanted = {tag.lower() for tag in tags}
    text = query.strip().lower()
    words = _WORDS.findall(text)
    found: list[tuple[bool, int, str, CatalogRow]] = []
    for row in rows:
        row_tags = {tag.lower() for tag in row.tags}
        if wanted <= row_tags:
            rank = _rank(row, row_tags, text, words)
            if rank is not None:
                found.append((bool(row.deprecated), rank, row.id, row))
    return [row for *_, row in sorted(found, key=lambda entry: entry[:3])]


def _rank(row: CatalogRow, tags: set[str], text: str, words: list[str]) -> int | None:
    """Return the row's distance from the query, 0 for an equal name; None if it does not match."""
    owner, _, name = row.id.partition("/")
    joined = "-".join(words)
    if text in (name, row.id) or joined == name:
        return _IS_NAME
    if joined and name.startswith(joined):
        return _BEGINS_NAME
    name_words = name.split("-")
    summary: list[str] = []
    total = 0
    for word in words:
        rank = _rank_in_name(word, name, name_words, tags)
        if rank is None:
            summary = summary or _WORDS.findall(row.summary.lower())
            rank = _rank_elsewhere(word, owner, name_words, summary)
        if rank is None:
            return None
        total += rank
    return total


def _rank_in_name(word: str, name: str, name_words: list[str], tags: set[str]) -> int | None:
    if word in name_words:
        return _WORD_OF_NAME
    if word in name:
        return _BEGINS_WORD if any(other.startswith(word) for other in name_words) else _IN_NAME
    return _TAG if word in tags or any(word in tag.split("-") for tag in tags) else None


def _rank_elsewhere(word: str, owner: str, name_words: list[str], summary: list[str]) -> int | None:
    if owner.startswith(word):
        return _OWNER
    if any(other.startswith(word) for other in summary):
        return _SUMMARY
    is_typo = len(word) >= _SHORTEST_WITH_TYPO and near_names(word, name_words)
    return _TYPO if is_typo else None
