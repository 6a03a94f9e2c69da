"""Permitted forms of a wheel's zip archive, METADATA and WHEEL, on which all readers agree. Pure.

A zip file states most facts twice: in a header before each file, and in the directory at its end.
Programs differ in which of the two they believe, in the extra fields they obey, and in how they
treat bytes between files. An archive must therefore have the layout that the usual build backends
write. Anything that installers would refuse, or could read in two ways, is refused, because a
published archive can never be replaced.
"""

import re
import struct
import zipfile
from collections.abc import Iterator
from mmap import mmap
from typing import NamedTuple

from packaging.metadata import InvalidMetadata, Metadata, RawMetadata, parse_email

from telescope_envs.records.names import (
    LONGEST_TEXT,
    MAX_REQUIREMENTS,
    check_requirement,
    check_specifier,
)

_LOCAL = struct.Struct("<4s5H3I2H")
_LOCAL_MARK = b"PK\x03\x04"
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_CENTRAL_MARK = b"PK\x01\x02"
_END = struct.Struct("<4s4H2IH")
_END_MARK = b"PK\x05\x06"
_LOCATOR_64_BYTES = 20
_LOCATOR_64_MARK = b"PK\x06\x07"
_IS_UTF8 = 0x800
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def has_plain_ends(data: bytes | mmap) -> bool:
    """Return whether `data` begins with a zip file entry, and ends with its end and no comment.

    With bytes before or after it, two programs could read different archives.
    """
    end = data[-_END.size :]
    return data[:4] == _LOCAL_MARK and end[:4] == _END_MARK and end[-2:] == b"\0\0"


def has_long_directory(data: bytes, max_bytes: int) -> bool:
    """Return whether the archive's directory, which takes long to read, exceeds `max_bytes`.

    `data` has plain ends. A directory of the 64-bit format counts as long.
    """
    size = _END.unpack(data[-_END.size :])[5]
    end_64 = data[-_END.size - _LOCATOR_64_BYTES : -_END.size]
    return size > max_bytes or end_64[:4] == _LOCATOR_64_MARK


class _Header(NamedTuple):
    """Fields on which both descriptions of a file must agree."""

    version: int
    """Format version needed to unpack it; the upper byte must be 0."""
    flags: int
    method: int
    time: int
    date: int
    crc: int
    packed_bytes: int
    size: int
    name: bytes


def layout_problem(archive: zipfile.ZipFile, data: bytes) -> str | None:
    """Return how the archive in `data` differs from a build backend's; None if it does not."""
    return next(_problems(archive, data), None)


def _problems(archive: zipfile.ZipFile, data: bytes) -> Iterator[str]:
    position = 0
    members = archive.infolist()
    for member in members:
        name = member.orig_filename
        if member.header_offset != position:
            yield f"{name!r} does not follow the file before it"
            return
        if member.extra or member.comment or member.volume:
            yield f"{name!r} has an extra field or a comment, which programs read differently"
        if member.compress_type not in _METHODS:
            yield f"{name!r} is packed by method {member.compress_type}, not stored or deflated"
        if member.reserved:
            yield f"{name!r} needs a version of the zip format that there is not"
        if member.flag_bits & ~_IS_UTF8:
            yield f"{name!r} has the flags {member.flag_bits:#x}; only UTF-8 names are known"
        if len(data) < position + _LOCAL.size:
            yield f"{name!r} is cut"
            return
        local, extra_bytes = _local_header(data, position)
        if extra_bytes:
            yield f"{name!r} has an extra field or a comment, which programs read differently"
        if local != _central_header(member):
            yield f"{name!r} is described differently before it and at the end"
        position += _LOCAL.size + len(local.name) + extra_bytes + member.compress_size
    yield from _directory_problems(data, archive)
    yield from _end_problems(data, archive.start_dir, position, len(members))


def _local_header(data: bytes, position: int) -> tuple[_Header, int]:
    mark, *fields, name_bytes, extra = _LOCAL.unpack_from(data, position)
    start = position + _LOCAL.size
    name = data[start : start + name_bytes] if mark == _LOCAL_MARK else b""
    return _Header._make([*fields, name]), extra


def _central_header(member: zipfile.ZipInfo) -> _Header:
    year, month, day, hour, minute, second = member.date_time
    return _Header(
        member.extract_version,
        member.flag_bits,
        member.compress_type,
        hour << 11 | minute << 5 | second // 2,
        (year - 1980) << 9 | month << 5 | day,
        member.CRC,
        member.compress_size,
        member.file_size,
        member.orig_filename.encode("utf-8" if member.flag_bits & _IS_UTF8 else "cp437"),
    )


def _directory_problems(data: bytes, archive: zipfile.ZipFile) -> Iterator[str]:
    """Yield errors in the lengths in the directory, which zipfile reads leniently."""
    position = archive.start_dir
    for member in archive.infolist():
        name = member.orig_filename
        if len(data) < position + _CENTRAL.size:
            yield f"{name!r} is cut in the directory"
            return
        mark, *_, name_bytes, extra, comment, disk, _, _, _ = _CENTRAL.unpack_from(data, position)
        expected = len(_central_header(member).name)
        if (mark, name_bytes, extra, comment, disk) != (_CENTRAL_MARK, expected, 0, 0, 0):
            yield f"{name!r} has lengths in the directory that do not fit it"
            return
        position += _CENTRAL.size + name_bytes
    if position + _END.size != len(data):
        yield "it has bytes between its directory and its end"


def _end_problems(data: bytes, directory: int, position: int, num_files: int) -> Iterator[str]:
    if len(data) < _END.size or data[-_END.size :][:4] != _END_MARK:
        yield "it has bytes after its end"
        return
    _, disk, first_disk, here, total, size, offset, comment = _END.unpack(data[-_END.size :])
    if directory != position or offset != directory:
        yield "it has bytes between its files and its directory"
    if directory + size + _END.size != len(data):
        yield "it has bytes between its directory and its end"
    if (disk, first_disk, comment) != (0, 0, 0) or (here, total) != (num_files, num_files):
        yield "its end does not describe it"


class WheelProblem(Exception):
    """An error in a wheel, with advice; the reader adds the name of the wheel."""


AGAIN = "build it again with an ordinary build backend"
_ODD_ENDS = re.compile(rb"\r(?!\n)|\0")
_WHEEL_FIELDS = {
    "Wheel-Version": ("1.0",),
    "Root-Is-Purelib": ("true",),
    "Tag": ("py3-none-any",),
}
"""Field of WHEEL that must occur once -> its permitted values."""


def read_metadata(data: bytes) -> RawMetadata:
    """Return the fields of METADATA; raises WheelProblem unless each is valid and occurs once."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise WheelProblem(f"METADATA is not UTF-8: {error}") from error
    if _ODD_ENDS.search(data):
        raise WheelProblem(
            "its METADATA has a carriage return or a zero byte, at which programs end lines "
            f"differently; {AGAIN}"
        )
    raw, unparsed = parse_email(data)
    requirements = raw.get("requires_dist", [])
    if len(requirements) > MAX_REQUIREMENTS or any(len(one) > LONGEST_TEXT for one in requirements):
        raise WheelProblem(
            f"its METADATA has {len(requirements)} requirements, or a very long one; expected at "
            f"most {MAX_REQUIREMENTS}, each of at most {LONGEST_TEXT} characters"
        )
    odd = sorted(field for field in unparsed if _is_known(field))
    if odd:
        raise WheelProblem(
            f"its METADATA has {', '.join(odd)} more than once, or not as text; {AGAIN}"
        )
    if "metadata_version" not in raw:
        raise WheelProblem(f"its METADATA has no Metadata-Version; {AGAIN}")
    # Not validated as a whole: build backends wrote newer fields into older versions of the format.
    checked = Metadata.from_raw(raw, validate=False)
    for field in raw:
        try:
            getattr(checked, field, None)
            if field == "requires_python":
                check_specifier(raw.get("requires_python", ""))
            for requirement in requirements if field == "requires_dist" else ():
                check_requirement(requirement)
        except (InvalidMetadata, ValueError, RecursionError) as error:
            cause = f": {error.__cause__}" if error.__cause__ is not None else ""
            raise WheelProblem(
                f"its METADATA cannot be read: {error}{cause}; correct pyproject.toml and build "
                "it again"
            ) from error
    return raw


def check_wheel_file(text: str) -> None:
    """Raise WheelProblem unless WHEEL describes a pure Python wheel of version 1.0."""
    found: dict[str, list[str]] = {}
    for line in filter(None, text.split("\n")):
        field, mark, value = line.partition(": ")
        if not mark or not line.isprintable() or line[0].isspace():
            raise WheelProblem(f"its WHEEL has the line {line!r}; {AGAIN}")
        found.setdefault(field.lower(), []).append(value)
    for field, values in _WHEEL_FIELDS.items():
        given = found.get(field.lower(), [])
        if len(given) != 1 or given[0] not in values:
            raise WheelProblem(
                f"its WHEEL must have the line '{field}: {values[0]}' once, as a pure Python wheel "
                f"has it, got {', '.join(given) or 'none'}; {AGAIN}"
            )


def _is_known(field: str) -> bool:
    """Return whether a field's name, as it is written in METADATA, is one of the format."""
    name = field.lower().replace("-", "_")
    known = RawMetadata.__annotations__
    return name in known or f"{name}s" in known
