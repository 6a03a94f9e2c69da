"""Inspects an environment's wheel without running any of its code.

An environment is one pure-Python package and its metadata. Anything else that a wheel may contain
(startup hooks, scripts, data files, binaries, a second package) is refused, because installing it
would run code or write files outside the environment.
"""

import base64
import csv
import hashlib
import io
import re
import stat
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from unicodedata import normalize

from packaging.metadata import RawMetadata
from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from telescope_core.errors import RegistryError
from telescope_envs.records.names import ENTRY_POINT_GROUP
from telescope_envs.records.release import Release
from telescope_envs.rules.archive import check_wheel_file, layout_problem, read_metadata

_ENTRY_POINTS = re.compile(
    rf"\n*\[{re.escape(ENTRY_POINT_GROUP)}\]\n+"
    r"(?P<name>[A-Za-z0-9._-]+) ?= ?(?P<factory>[A-Za-z0-9_.]+:[A-Za-z0-9_.]+)\n*"
)
_MAX_FILES = 5000
_MAX_DEPTH = 32
"""Most folders in a path: some programs fail on paths that are much deeper, and cannot remove them.
"""
_MAX_COMPONENT = 200
"""Most bytes in the name of a file or folder; file systems take 255."""
_MAX_UNPACKED_BYTES = 200 * 1024 * 1024
_MAX_RATIO = 100
"""Largest ratio of unpacked to packed size, for files that unpack to more than 1 MiB.

Text reaches about 20; the maximum of deflate is 1032.
"""
_RATIO_COUNTS_FROM_BYTES = 1024 * 1024
_END_BYTES = 22
"""Length in bytes of the last record of a zip archive without a comment."""
_IS_ENCRYPTED = 0x1
_IS_UTF8 = 0x800
_REFUSED_SUFFIXES = {".pth", ".so", ".pyd", ".dll", ".dylib", ".exe"}
_BYTE_CODE_SUFFIXES = {".pyc", ".pyo"}
_REFUSED_MODULES = {"sitecustomize", "usercustomize"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelContents:
    """What a wheel declares about itself."""

    distribution: str
    version: str
    module: str
    entry_name: str
    """The environment's name, taken from its entry point."""
    factory: str
    """`module:Class`."""
    summary: str
    license: str
    tags: tuple[str, ...]
    requires_python: str
    requires_dist: tuple[str, ...]
    metadata: bytes
    """The METADATA file."""
    metadata_sha256: str
    files: Mapping[str, bytes] = field(repr=False)
    """Path in the wheel -> content, of every file: what is installed is written from these."""


def read_wheel(data: bytes, filename: str) -> WheelContents:
    """Return what the wheel declares; raises RegistryError for anything that is not allowed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_container(archive, data, filename)
            _check_members(archive, filename)
            _check_layout(archive, data, filename)
            files = _unpacked(archive, filename)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise RegistryError(f"wheel {filename}: not a readable zip file: {error}") from error
    distribution, version = _named_by(filename)
    info_folder = f"{distribution.replace('-', '_')}-{version}.dist-info"
    module = distribution.replace("-", "_")
    for path in files:
        _check_path(path, filename, module, info_folder)
    _check_record(files, info_folder, filename)
    _check_is_pure(files, info_folder, filename)
    entry_name, factory = _entry_point(files, info_folder, filename)
    raw = read_metadata(files[f"{info_folder}/METADATA"], filename)
    contents = _contents(files, info_folder, raw, entry_name, factory)
    if (contents.distribution, contents.version) != (distribution, version):
        raise RegistryError(
            f"wheel {filename}: its METADATA is for {contents.distribution} {contents.version}; "
            "build it again"
        )
    return contents


def check_release(contents: WheelContents, release: Release) -> None:
    """Raise RegistryError when the wheel does not match its release record."""
    pairs: dict[str, tuple[object, object]] = {
        "distribution": (canonicalize_name(release.distribution), contents.distribution),
        "version": (release.version, contents.version),
        "module": (release.module, contents.module),
        "name": (release.name, contents.entry_name),
        "factory": (release.factory, contents.factory),
        "requires_python": (release.requires_python, contents.requires_python),
        "requires_dist": (sorted(release.requires_dist), sorted(contents.requires_dist)),
        "metadata_sha256": (release.wheel.metadata_sha256, contents.metadata_sha256),
    }
    for name, (expected, got) in pairs.items():
        if expected != got:
            raise RegistryError(
                f"wheel {release.wheel.filename}: its {name} is {got!r}, but the registry says "
                f"{expected!r}; do not install it, and tell the registry's maintainers"
            )


def _named_by(filename: str) -> tuple[str, str]:
    try:
        name, version, build, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename as error:
        raise RegistryError(f"wheel {filename!r}: {error}") from error
    if build or {str(tag) for tag in tags} != {"py3-none-any"}:
        raise RegistryError(f"wheel {filename}: expected a pure Python wheel, py3-none-any")
    return str(name), str(version)


def _check_container(archive: zipfile.ZipFile, data: bytes, filename: str) -> None:
    """Refuse bytes around the archive, because two programs could then read different archives."""
    is_whole = data.startswith(b"PK\x03\x04") and data[-_END_BYTES:].startswith(b"PK\x05\x06")
    if not is_whole or archive.comment:
        raise RegistryError(f"wheel {filename}: has bytes before or after its zip archive")


def _check_layout(archive: zipfile.ZipFile, data: bytes, filename: str) -> None:
    problem = layout_problem(archive, data)
    if problem is not None:
        raise RegistryError(
            f"wheel {filename}: its zip archive may be read differently by different programs: "
            f"{problem}; build it again with an ordinary build backend"
        )


def _unpacked(archive: zipfile.ZipFile, filename: str) -> dict[str, bytes]:
    """Return the unpacked files, counting the actual bytes, because declared sizes may be wrong."""
    files: dict[str, bytes] = {}
    left = _MAX_UNPACKED_BYTES
    for info in archive.infolist():
        with archive.open(info) as member:
            content = member.read(min(left, info.file_size) + 1)
        left -= len(content)
        if len(content) != info.file_size or left < 0:
            raise RegistryError(
                f"wheel {filename}: {info.filename} does not unpack to the size it declares"
            )
        files[info.filename] = content
    return files


def _check_members(archive: zipfile.ZipFile, filename: str) -> None:
    members = archive.infolist()
    if len(members) > _MAX_FILES or sum(m.file_size for m in members) > _MAX_UNPACKED_BYTES:
        raise RegistryError(
            f"wheel {filename}: has more than {_MAX_FILES} files or {_MAX_UNPACKED_BYTES} bytes"
        )
    names = [member.orig_filename for member in members]
    if len({normalize("NFC", name).casefold() for name in names}) < len(names):
        raise RegistryError(f"wheel {filename}: two of its files have the same name")
    for member in members:
        _check_member(member, filename)
        mode = member.external_attr >> 16
        if member.is_dir() or (mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode)):
            raise RegistryError(f"wheel {filename}: {member.filename} is not a plain file")


def _check_member(member: zipfile.ZipInfo, filename: str) -> None:
    name = member.orig_filename
    is_text = name.isascii() or member.flag_bits & _IS_UTF8
    if not is_text or not name.isprintable():
        raise RegistryError(f"wheel {filename}: the file name {name!r} is not plain UTF-8 text")
    if member.flag_bits & _IS_ENCRYPTED:
        raise RegistryError(f"wheel {filename}: {name} is encrypted")
    if member.file_size > max(_RATIO_COUNTS_FROM_BYTES, _MAX_RATIO * member.compress_size):
        raise RegistryError(
            f"wheel {filename}: {name} unpacks to {member.file_size} bytes from "
            f"{member.compress_size}, which looks like a zip bomb"
        )


def _check_path(path: str, filename: str, module: str, info_folder: str) -> None:
    parts = PurePosixPath(path).parts
    is_plain = path == "/".join(parts) and not path.startswith("/") and "\\" not in path
    if not is_plain or ".." in parts or parts[0] not in (module, info_folder) or len(parts) < 2:
        raise RegistryError(
            f"wheel {filename}: contains {path!r}; an environment may only contain {module}/ and "
            f"{info_folder}/"
        )
    if len(parts) > _MAX_DEPTH or any(len(part.encode()) > _MAX_COMPONENT for part in parts):
        raise RegistryError(
            f"wheel {filename}: contains a path of {len(parts)} parts, {path[:60]!r}...; expected "
            f"at most {_MAX_DEPTH} parts, each of at most {_MAX_COMPONENT} bytes"
        )
    last = PurePosixPath(parts[-1])
    if last.suffix.lower() in _BYTE_CODE_SUFFIXES or "__pycache__" in map(str.lower, parts):
        raise RegistryError(
            f"wheel {filename}: contains {path!r}: Python may run byte code in place of the source "
            "beside it, so a wheel may not contain any; build it again without it"
        )
    if last.suffix.lower() in _REFUSED_SUFFIXES or last.stem.lower() in _REFUSED_MODULES:
        raise RegistryError(
            f"wheel {filename}: contains {path!r}, which an environment may not contain"
        )


def _check_record(files: Mapping[str, bytes], info_folder: str, filename: str) -> None:
    record_path = f"{info_folder}/RECORD"
    if record_path not in files:
        raise RegistryError(f"wheel {filename}: has no RECORD")
    table = io.StringIO(_text(files, record_path, filename))
    try:
        rows = [row for row in csv.reader(table, strict=True) if row]
    except csv.Error as error:
        raise RegistryError(f"wheel {filename}: RECORD: {error}") from error
    listed = {row[0]: row[1] for row in rows if len(row) == 3}
    if set(listed) != set(files) or len(listed) != len(rows):
        odd = sorted(set(listed) ^ set(files)) or "a malformed or repeated line"
        raise RegistryError(f"wheel {filename}: its RECORD does not match its files: {odd}")
    for path, data in files.items():
        if path != record_path and listed[path] != record_hash(data):
            raise RegistryError(f"wheel {filename}: {path} is not the file that RECORD lists")


def _text(files: Mapping[str, bytes], path: str, filename: str) -> str:
    """Return a text file of the wheel; empty when there is no such file."""
    try:
        return files.get(path, b"").decode()
    except UnicodeDecodeError as error:
        raise RegistryError(f"wheel {filename}: {path} is not UTF-8: {error}") from error


def record_hash(data: bytes) -> str:
    """Return the hash as a RECORD line writes it."""
    digest = hashlib.sha256(data).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _check_is_pure(files: Mapping[str, bytes], info_folder: str, filename: str) -> None:
    for name in ("WHEEL", "METADATA"):
        if f"{info_folder}/{name}" not in files:
            raise RegistryError(f"wheel {filename}: has no {name}")
    check_wheel_file(_text(files, f"{info_folder}/WHEEL", filename), filename)


def _entry_point(files: Mapping[str, bytes], info_folder: str, filename: str) -> tuple[str, str]:
    text = _text(files, f"{info_folder}/entry_points.txt", filename)
    # The whole text, not a parser's reading of it: parsers differ in what ends a line.
    found = _ENTRY_POINTS.fullmatch(text)
    module = info_folder.partition("-")[0]
    if found is None:
        raise RegistryError(
            f"wheel {filename}: expected one entry point, in group {ENTRY_POINT_GROUP}, and no "
            f"scripts; got {text[:300]!r}"
        )
    name, factory = found["name"], found["factory"]
    if factory.partition(":")[0].partition(".")[0] != module:
        raise RegistryError(f"wheel {filename}: entry point {factory!r} is not in {module}")
    return name, factory


def _contents(
    files: Mapping[str, bytes], info_folder: str, raw: RawMetadata, entry_name: str, factory: str
) -> WheelContents:
    metadata = files[f"{info_folder}/METADATA"]
    name = str(canonicalize_name(raw.get("name", "")))
    requires_dist = [_requirement(text, name) for text in raw.get("requires_dist", [])]
    return WheelContents(
        distribution=name,
        version=raw.get("version", ""),
        module=info_folder.partition("-")[0],
        entry_name=entry_name,
        factory=factory,
        summary=raw.get("summary", ""),
        license=raw.get("license_expression", ""),
        tags=tuple(sorted(raw.get("keywords", []))),
        requires_python=raw.get("requires_python", ""),
        requires_dist=tuple(requires_dist),
        metadata=metadata,
        metadata_sha256=hashlib.sha256(metadata).hexdigest(),
        files=files,
    )


def _requirement(text: str, distribution: str) -> str:
    try:
        requirement = Requirement(text)
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"{distribution}: requirement {text!r}: {error}") from error
    if requirement.url:
        raise RegistryError(
            f"{distribution}: requirement {text!r} names a URL; environments may only depend on "
            "packages from the package index"
        )
    return str(requirement)
