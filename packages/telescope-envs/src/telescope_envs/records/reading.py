"""A registry's files: their paths, and parsing them; errors are RegistryErrors that name the place.

A release with its bytes, ready to be published, is a `Publication`.
"""

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec
from packaging.version import InvalidVersion, Version

from telescope_core.base.decoders import convert
from telescope_core.base.errors import RegistryError
from telescope_core.base.terminal import escaped
from telescope_envs.records.files import read_file, sha256_of
from telescope_envs.records.model import (
    RecordProblem,
    RecordType,
    converted,
    is_plain_json,
    read,
    read_toml,
)
from telescope_envs.records.release import Aliases, Namespace, Release, Removals, Status

MAX_WHEEL_BYTES = 100 * 1024 * 1024
"""Largest wheel of an environment, which is read into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One release with its bytes, ready to be published."""

    release: Release
    wheel: bytes
    attestation: bytes = b""
    """A Sigstore bundle; empty if there is none."""


def check_bytes(data: bytes, release: Release) -> None:
    """Raise RegistryError unless `data` has the size and sha256 recorded in `release`."""
    digest = sha256_of(data)
    if len(data) != release.wheel.size or digest != release.wheel.sha256:
        raise RegistryError(
            f"wheel {release.wheel.filename} is not the one that was published: expected "
            f"{release.wheel.size} bytes, sha256 {release.wheel.sha256}, got {len(data)} bytes, "
            f"sha256 {digest}; nothing was installed. Restore the file in the registry"
        )


def attestation_path(wheel_path: str) -> str:
    """Return the path of the Sigstore bundle, which is beside the wheel at `wheel_path`."""
    return f"{wheel_path}.sigstore.json"


def metadata_path(wheel_path: str) -> str:
    """Return the path of the wheel's METADATA file in a rendered registry (PEP 658)."""
    return f"{wheel_path}.metadata"


def is_registry_path(path: str) -> bool:
    """Return whether `path` can name a registry file: relative, without `..` or hidden parts.

    Every store checks this before it touches a file, because index lines are untrusted.
    """
    parts = path.split("/")
    return (
        path.isprintable()
        and not any(mark in path for mark in (":", "\\", "?", "#", "%"))
        and all(part and not part.startswith(".") for part in parts)
    )


def is_web_address(url: str) -> bool:
    """Return whether a wheel's address is on a web server, not a path below the registry."""
    return url.startswith(("https://", "http://"))


def artifact_files(publication: Publication, address: str) -> dict[str, bytes]:
    """Return path -> bytes of the artifacts to store in the registry at `address`."""
    wheel = publication.release.wheel
    inside = [url for url in wheel.urls if is_registry_path(url)]
    if not inside or PurePosixPath(inside[0]).name != wheel.filename:
        raise RegistryError(
            f"{wheel.filename}: a wheel in {address} needs a URL relative to the registry, "
            f"such as artifacts/{wheel.filename}, got {', '.join(wheel.urls)}"
        )
    files = {inside[0]: publication.wheel}
    if publication.attestation:
        files[attestation_path(inside[0])] = publication.attestation
    return files


def ids_of(paths: Iterable[str]) -> list[str]:
    """Return owner/name of every index file among the paths of a registry, sorted."""
    found = (_INDEX_PATH.fullmatch(path) for path in paths)
    return sorted(path["id"] for path in found if path)


def tree_files(root: Path) -> list[str]:
    """Return the sorted paths of a registry's plain files, without hidden ones."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        base = Path(folder).relative_to(root)
        paths = [(base / name).as_posix() for name in files]
        inside = (path for path in paths if is_registry_path(path))
        # Neither links, nor what may never end when it is read, such as named pipes.
        found += [path for path in inside if stat.S_ISREG((root / path).lstat().st_mode)]
    return sorted(found)


class Listing(NamedTuple):
    """The files of a registry, wherever they are."""

    paths: list[str]
    """Sorted, relative to the registry."""
    read: Callable[[str], bytes]
    """Returns the bytes of one of `paths`; raises OSError if they cannot be read."""
    lost: tuple[str, ...] = ()
    """Paths of files that must exist, and do not or have another size."""


def folder_listing(root: Path) -> Listing:
    """Return the files of the registry in the folder `root`."""

    def read(path: str) -> bytes:
        return read_file(root / path, max_bytes=MAX_WHEEL_BYTES)

    return Listing(tree_files(root), read)


_INDEX_PATH = re.compile(r"index/(?P<id>[^/]+/[^/]+)\.jsonl")
log = logging.getLogger(__name__)
_NAMED = 5
"""Most skipped records that are named."""
REMOVED_PATH = "removed.toml"
MAX_LINE_BYTES = 256 * 1024
"""Longest index line or status record that is read."""


class Unreadable(NamedTuple):
    """A record that is skipped because it cannot be read."""

    where: str
    """Its place: `path`, or `path:line` for a line of an index file."""
    why: str
    """The reason, which begins with the place."""
    version: str = ""
    """The version that it states; empty if it states none."""
    sha256: str = ""
    """The digest of the wheel that it states; empty if it states none."""


class LineProblem(ValueError):
    """A problem of a record, with advice; its place is put before it."""


class ReadReleases(NamedTuple):
    """The releases of an index file, and the lines that are not one."""

    releases: list[Release]
    unreadable: list[Unreadable]


def parse_record(record: type[RecordType], text: bytes, where: str) -> RecordType:
    """Return the record in the JSON `text`; `where` is its location, for errors."""
    try:
        return _whole(record, text, is_plain=False)
    except LineProblem as error:
        raise RegistryError(f"{where}: {error}") from None


def _whole(record: type[RecordType], text: bytes, *, is_plain: bool) -> RecordType:
    """Return the record in `text`; raises LineProblem."""
    if len(text) > MAX_LINE_BYTES and record in (Release, Status):
        raise LineProblem(
            f"longer than {MAX_LINE_BYTES} bytes, the limit for a record; update the registry"
        )
    try:
        return read(record, text, is_plain=is_plain)
    except RecordProblem as problem:
        raise LineProblem(f"{problem}; update the registry") from None
    except ValueError as error:
        raise LineProblem(f"not JSON: {error}; update the registry") from None


def index_lines(data: bytes) -> list[bytes]:
    """Return the lines of an index file, with their newlines; the last may lack its own.

    Only a newline ends a line: not a carriage return, and no separator within a text.
    """
    if b"\r" not in data:
        return data.splitlines(keepends=True)
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def read_releases(data: bytes, environment_id: str, where: str) -> ReadReleases:
    """Return the releases of an index file in file order, the first published first.

    A line that cannot be read is left out and named, because one line must not make the other
    releases of an environment unusable. If a version has several lines, all of them are left out:
    otherwise, whoever can add a line could replace the contents of a version.
    """
    releases: list[Release] = []
    places: list[str] = []
    unreadable: list[Unreadable] = []
    try:
        is_plain = is_plain_json(data)  # of all lines at once, which takes half as long
    except ValueError:  # which is said of the line
        is_plain = False
    for number, line in enumerate(index_lines(data), 1):
        place = f"{where}:{number}"
        try:
            releases.append(_release_of(line, environment_id, is_plain=is_plain))
            places.append(place)
        except LineProblem as error:
            unreadable.append(_unreadable(line, place, f"{place}: {error}"))
    stated = [*(one.version for one in releases), *(line.version for line in unreadable)]
    repeated = repeated_versions(stated)
    if not repeated:
        return ReadReleases(releases, unreadable)
    kept: list[Release] = []
    for number, (release, place) in enumerate(zip(releases, places, strict=True)):
        if number in repeated:
            why = (
                f"{place}: {release.version} has more than one line, and nobody can tell which is "
                "right; do not install it, and ask the registry's maintainers to run telescope hub "
                "check"
            )
            unreadable.append(Unreadable(place, why, release.version, release.wheel.sha256))
        else:
            kept.append(release)
    return ReadReleases(kept, unreadable)


def repeated_versions(versions: Sequence[str]) -> dict[int, int]:
    """Return the position of each version that is there more than once -> that of its first.

    Versions are compared as PEP 440 does: 1.0 is 1.0.0. Texts that are no version are passed over.
    """
    if len(versions) < 2:
        return {}
    positions: dict[Version, list[int]] = {}
    for position, text in enumerate(versions):
        version = _version(text)
        if version is not None:
            positions.setdefault(version, []).append(position)
    several = (found for found in positions.values() if len(found) > 1)
    return {position: found[0] for found in several for position in found}


@lru_cache(maxsize=4096)
def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _release_of(line: bytes, environment_id: str, *, is_plain: bool) -> Release:
    """Return the release in `line`; raises LineProblem."""
    if not line.endswith(b"\n"):
        raise LineProblem(
            "the last line has no newline, so its writer was interrupted; restore the file"
        )
    release = _whole(Release, line, is_plain=is_plain)
    if release.id != environment_id:
        raise LineProblem(f"contains a release of {release.id}; update the registry")
    return release


class _Stated(msgspec.Struct):
    """The parts of an unreadable release that prevent publishing it again."""

    version: str = ""
    wheel: dict[str, Any] = {}


def _unreadable(line: bytes, where: str, why: str) -> Unreadable:
    try:
        # Not as strict as the records are: old servers stored lines with NaN.
        stated = convert(json.loads(line), _Stated)
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


def parse_removals(data: bytes | None) -> Removals:
    """Return the record of the removed releases; an empty one if there is no file."""
    return _of_tables(Removals, data, REMOVED_PATH) if data is not None else Removals()


def parse_aliases(data: bytes, where: str) -> Aliases:
    """Return the record of the bare names."""
    return _of_tables(Aliases, data, where)


def _of_tables(record: type[RecordType], data: bytes, where: str) -> RecordType:
    try:
        return converted(record, read_toml(data))
    except RecordProblem as problem:
        raise RegistryError(f"{where}: {problem}; update the registry") from None
    except ValueError as error:
        raise RegistryError(f"{where}: not TOML: {error}; update the registry") from error


def log_unreadable(unreadable: Sequence[Unreadable]) -> None:
    """Log the skipped records: the first few, and the number of others."""
    for one in unreadable[:_NAMED]:
        log.warning("skipped: %s", escaped(one.why))
    if len(unreadable) > _NAMED:
        log.warning(
            "skipped %d more records that cannot be read; telescope hub check names them",
            len(unreadable) - _NAMED,
        )
