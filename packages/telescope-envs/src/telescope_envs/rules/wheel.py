"""Inspect an environment's wheel without running any of its code.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from unicodedata import normalize

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_envs.records.names import ENTRY_POINT_GROUP, check_version
from telescope_envs.records.reading import check_bytes
from telescope_envs.records.release import Release
from telescope_envs.rules.archive import (
    AGAIN,
    WheelProblem,
    check_wheel_file,
    has_long_directory,
    has_plain_ends,
    layout_problem,
    read_metadata,
)

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
_MAX_PATH = 512
"""Most bytes in a path; systems take 1024 or 4096, of which the folder it is written to has some.
"""
_MAX_DIRECTORY_BYTES = _MAX_FILES * (_MAX_PATH + 46)
"""Most bytes of the directory at the end of the archive, with 46 and its path for each file."""
_MAX_UNPACKED_BYTES = 200 * 1024 * 1024
_UNREADABLE = "not a readable zip file"
_TOO_LARGE = f"has more than {_MAX_FILES} files or {_MAX_UNPACKED_BYTES} bytes"
_MAX_RATIO = 100
"""Largest ratio of unpacked to packed size of all files together, if they unpack to over 1 MiB.

Text reaches about 20; the maximum of deflate is 1032.
"""
_RATIO_COUNTS_FROM_BYTES = 1024 * 1024
_MAX_INFO_BYTES = {
    "METADATA": 256 * 1024,
    "WHEEL": 16 * 1024,
    "entry_points.txt": 16 * 1024,
    "RECORD": 4 * 1024 * 1024,
}
"""Most bytes of the files that are parsed, so that no wheel takes long to inspect."""
_IS_ENCRYPTED = 0x1
_IS_UTF8 = 0x800
_REFUSED_SUFFIXES = {".pth", ".so", ".pyd", ".dll", ".dylib", ".exe"}
_BYTE_CODE_SUFFIXES = {".pyc", ".pyo"}
_REFUSED_MODULES = {"sitecustomize", "usercustomize"}
INSTALLERS_FILES = {"INSTALLER", "REQUESTED", "direct_url.json"}
"""Files of a dist-info that say how a package was installed, so that a wheel cannot know them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelContents:
    """The declarations of a wheel."""

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
    """Path in the wheel -> content, of every file; these are installed."""


class OddVersionError(RegistryError):
    """The version of a wheel is valid, but spelled in another way than versions of releases are."""


def read_wheel(data: bytes, filename: str) -> WheelContents:
    """Return the declarations of a wheel; raises RegistryError for forbidden content."""
    try:
        return _contents(_files_in(data), *_named_by(filename))
    except WheelProblem as problem:
        raise RegistryError(f"wheel {filename}: {problem}") from problem.__cause__


def read_release(data: bytes, release: Release) -> WheelContents:
    """Return the content of a wheel; raises RegistryError unless it is that of `release`."""
    check_bytes(data, release)
    contents = read_wheel(data, release.wheel.filename)
    check_release(contents, release)
    return contents


def check_publishable(contents: WheelContents) -> None:
    """Raise RegistryError for files that only installers write, which published wheels may hold."""
    kept = {_as_file(name) for name in INSTALLERS_FILES}
    for path in contents.files:
        folder, _, name = path.rpartition("/")
        if folder.endswith(".dist-info") and _as_file(name) in kept:
            raise RegistryError(
                f"the wheel of {contents.distribution} {contents.version} contains {path!r}, which "
                f"whoever installs it writes; {AGAIN} without it"
            )


def check_release(contents: WheelContents, release: Release) -> None:
    """Raise RegistryError when the wheel does not match its release record."""
    for name, expected, got in unlike(contents, release):
        raise RegistryError(
            f"wheel {release.wheel.filename}: its {name} is {got!r}, but the registry says "
            f"{expected!r}; do not install it, and tell the registry's maintainers"
        )


def unlike(contents: WheelContents, release: Release) -> Iterator[tuple[str, object, object]]:
    """Yield each field in which a wheel differs from its record: its name, and both values."""
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
            yield name, expected, got


def _named_by(filename: str) -> tuple[str, str]:
    try:
        name, version, build, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename as error:
        raise RegistryError(f"wheel {filename!r}: {error}") from error
    if build or {str(tag) for tag in tags} != {"py3-none-any"}:
        raise WheelProblem("expected a pure Python wheel, py3-none-any")
    return str(name), str(version)


def _files_in(data: bytes) -> dict[str, bytes]:
    if not has_plain_ends(data):
        is_inside = zipfile.is_zipfile(io.BytesIO(data))
        what = "has bytes before or after its zip archive" if is_inside else _UNREADABLE
        raise WheelProblem(what)
    if has_long_directory(data, _MAX_DIRECTORY_BYTES):
        raise WheelProblem(_TOO_LARGE)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_members(archive)
            problem = layout_problem(archive, data)
            if problem is not None:
                raise WheelProblem(
                    "its zip archive may be read differently by different programs: "
                    f"{problem}; {AGAIN}"
                )
            return _unpacked(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise WheelProblem(f"{_UNREADABLE}: {error}") from error


def _unpacked(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """Return the unpacked files, each of the size that it declares; their sum is checked."""
    files: dict[str, bytes] = {}
    for info in archive.infolist():
        with archive.open(info) as member:
            content = member.read(info.file_size + 1)
        if len(content) != info.file_size:
            raise WheelProblem(f"{info.filename} does not unpack to the size it declares")
        files[info.filename] = content
    return files


def _check_members(archive: zipfile.ZipFile) -> None:
    members = archive.infolist()
    size = sum(member.file_size for member in members)
    packed_bytes = sum(member.compress_size for member in members)
    if len(members) > _MAX_FILES or size > _MAX_UNPACKED_BYTES:
        raise WheelProblem(_TOO_LARGE)
    if size > max(_RATIO_COUNTS_FROM_BYTES, _MAX_RATIO * packed_bytes):
        raise WheelProblem(
            f"unpacks to {size} bytes from {packed_bytes}, which looks like a zip bomb"
        )
    seen: dict[str, str] = {}
    for member in members:
        name = member.orig_filename
        other = seen.get(_as_file(name))
        if other is not None:
            raise WheelProblem(
                f"contains {name[:_MAX_PATH]!r} twice, under the same name; {AGAIN}"
                if other == name
                else f"contains {other[:_MAX_PATH]!r} and {name[:_MAX_PATH]!r}, which are the same "
                "name on systems where capitals do not count; rename one of them"
            )
        seen[_as_file(name)] = name
    for member in members:
        name = member.orig_filename
        is_text = name.isascii() or member.flag_bits & _IS_UTF8
        if not is_text or not name.isprintable():
            raise WheelProblem(f"the file name {name!r} is not plain UTF-8 text")
        if member.flag_bits & _IS_ENCRYPTED:
            raise WheelProblem(f"{name} is encrypted")
        mode = member.external_attr >> 16
        if member.is_dir() or (mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode)):
            raise WheelProblem(f"{member.filename} is not a plain file")


def _as_file(path: str) -> str:
    """Return a key that is equal for paths which some file system takes for one file."""
    return normalize("NFC", path).casefold()


def _check_paths(paths: Iterable[str], module: str, info_folder: str) -> None:
    """Refuse paths that cannot be written below one folder."""
    for path in paths:
        _check_path(path, module, info_folder)
    # Installing writes this one as well.
    files = {_as_file(path): path for path in (f"{info_folder}/INSTALLER", *paths)}
    for file, path in files.items():
        parts = file.split("/")
        for depth in range(1, len(parts)):
            above = files.get("/".join(parts[:depth]))
            if above is not None:
                raise WheelProblem(
                    f"contains {path!r}, but {above!r} is a file and cannot be a folder as well"
                )


def _check_path(path: str, module: str, info_folder: str) -> None:
    parts = PurePosixPath(path).parts
    is_plain = path == "/".join(parts) and not path.startswith("/") and "\\" not in path
    if not is_plain or ".." in parts or parts[0] not in (module, info_folder) or len(parts) < 2:
        raise WheelProblem(
            f"contains {path!r}; an environment may only contain {module}/ and {info_folder}/"
        )
    is_long = len(path.encode()) > _MAX_PATH or len(parts) > _MAX_DEPTH
    if is_long or any(len(part.encode()) > _MAX_COMPONENT for part in parts):
        raise WheelProblem(
            f"contains a path of {len(parts)} parts, {path[:60]!r}...; expected at most "
            f"{_MAX_PATH} bytes and {_MAX_DEPTH} parts, each of at most {_MAX_COMPONENT} bytes"
        )
    last = PurePosixPath(parts[-1])
    if last.suffix.lower() in _BYTE_CODE_SUFFIXES or "__pycache__" in map(str.lower, parts):
        raise WheelProblem(
            f"contains {path!r}: Python may run byte code in place of the source beside it, so a "
            "wheel may not contain any; build it again without it"
        )
    if last.suffix.lower() in _REFUSED_SUFFIXES or last.stem.lower() in _REFUSED_MODULES:
        raise WheelProblem(f"contains {path!r}, which an environment may not contain")


def _check_record(files: Mapping[str, bytes], record_path: str) -> None:
    if record_path not in files:
        raise WheelProblem("has no RECORD")
    table = io.StringIO(_text(files, record_path))
    try:
        rows = [row for row in csv.reader(table, strict=True) if row]
    except csv.Error as error:
        raise WheelProblem(f"RECORD: {error}") from error
    listed = {row[0]: row[1] for row in rows if len(row) == 3}
    if set(listed) != set(files) or len(listed) != len(rows):
        odd = sorted(set(listed) ^ set(files)) or "a malformed or repeated line"
        raise WheelProblem(f"its RECORD does not match its files: {odd}")
    for path, data in files.items():
        if path != record_path and listed[path] != record_hash(data):
            raise WheelProblem(f"{path} is not the file that RECORD lists")


def _text(files: Mapping[str, bytes], path: str) -> str:
    """Return a text file of the wheel; empty when there is no such file."""
    try:
        return files.get(path, b"").decode()
    except UnicodeDecodeError as error:
        raise WheelProblem(f"{path} is not UTF-8: {error}") from error


def record_of(files: Mapping[str, bytes], own: str) -> bytes:
    """Return a RECORD that lists `files` in their order, and itself at the path `own`."""
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    for path, data in files.items():
        rows.writerow([path, record_hash(data), len(data)])
    rows.writerow([own, "", ""])
    return table.getvalue().encode()


def hashes_in(record: str) -> dict[str, str]:
    """Return path -> hash of the lines of an installed package's RECORD, some without a hash."""
    return {row[0]: row[1] for row in csv.reader(io.StringIO(record)) if len(row) == 3}


def record_hash(data: bytes, kind: str = "sha256") -> str:
    """Return the hash as a RECORD line writes it."""
    digest = hashlib.new(kind, data).digest()
    return f"{kind}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _entry_point(files: Mapping[str, bytes], module: str, info_folder: str) -> tuple[str, str]:
    text = _text(files, f"{info_folder}/entry_points.txt")
    # The whole text, not a parser's reading of it: parsers differ in what ends a line.
    found = _ENTRY_POINTS.fullmatch(text)
    if found is None:
        raise WheelProblem(
            f"expected one entry point, in group {ENTRY_POINT_GROUP}, and no scripts; got "
            f"{text[:300]!r}"
        )
    name, factory = found["name"], found["factory"]
    if factory.partition(":")[0].partition(".")[0] != module:
        raise WheelProblem(f"entry point {factory!r} is not in {module}")
    return name, factory


def _contents(files: Mapping[str, bytes], distribution: str, version: str) -> WheelContents:
    """Return the declarations in the files of a wheel, whose file name states the two texts."""
    module = distribution.replace("-", "_")
    info_folder = f"{module}-{version}.dist-info"
    _check_paths(files, module, info_folder)
    for name, limit in _MAX_INFO_BYTES.items():
        if len(files.get(f"{info_folder}/{name}", b"")) > limit:
            raise WheelProblem(f"its {name} is longer than {limit} bytes; shorten it")
    _check_record(files, f"{info_folder}/RECORD")
    for name in ("WHEEL", "METADATA"):
        if f"{info_folder}/{name}" not in files:
            raise WheelProblem(f"has no {name}")
    check_wheel_file(_text(files, f"{info_folder}/WHEEL"))
    entry_name, factory = _entry_point(files, module, info_folder)
    metadata = files[f"{info_folder}/METADATA"]
    raw = read_metadata(metadata)
    name = str(canonicalize_name(raw.get("name", "")))
    requires_dist = tuple(_requirement(text, name) for text in raw.get("requires_dist", []))
    stated = raw.get("version", "")
    if (name, stated) != (distribution, version):
        if name == distribution:
            _require_spelling(stated, version)
        raise WheelProblem(f"its METADATA is for {name} {stated}; build it again")
    return WheelContents(
        distribution=distribution,
        version=version,
        module=module,
        entry_name=entry_name,
        factory=factory,
        summary=raw.get("summary", ""),
        license=raw.get("license_expression", ""),
        tags=tuple(sorted(raw.get("keywords", []))),
        requires_python=raw.get("requires_python", ""),
        requires_dist=requires_dist,
        metadata=metadata,
        metadata_sha256=hashlib.sha256(metadata).hexdigest(),
        files=files,
    )


def _require_spelling(stated: str, version: str) -> None:
    """Raise OddVersionError if `stated` is another spelling of `version`, which building keeps."""
    try:
        is_same = Version(stated) == Version(version)
    except InvalidVersion:
        return
    if is_same:
        try:
            check_version(stated)
        except ConfigError as error:
            raise OddVersionError(f"{error}; change it in pyproject.toml") from None


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
