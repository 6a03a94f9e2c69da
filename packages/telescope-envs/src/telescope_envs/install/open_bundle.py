"""The format of bundles, and installing from one: all is checked before any of it is kept.

A bundle is a single file from which environments install without any network: an uncompressed zip
file with the wheels of environments and their attestations, every wheel they run with on one
platform, datasets, a telescope.lock, and a manifest with the hash of each file. `bundling` makes
them. A bundle is not signed, and it brings its own lock. It may therefore hold only files that the
lock names, each with the hash in the lock, and nothing reaches the cache until all files are
checked.
"""

import hashlib
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple, NoReturn

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from telescope_core.base.errors import ConfigError, RegistryError, unknown_name
from telescope_envs.install.attestations import (
    MAX_ATTESTATION_BYTES,
    asks_for_attestation,
    require_kept_attestation,
)
from telescope_envs.install.data import (
    PART,
    brought_wheels_folder,
    dataset_folder,
    installing,
    packages_folder,
    store_wheel,
)
from telescope_envs.install.pipeline import Installed, record_in_lock
from telescope_envs.install.requirements import python_version
from telescope_envs.install.steps import InstallOptions, Progress
from telescope_envs.install.sync import sync_environment
from telescope_envs.records.files import data_folder, locked, remove_tree, sha256_of, unwritable
from telescope_envs.records.lockfile import (
    LOCK_NAME,
    REQUIREMENT_LINE,
    Lock,
    LockedEnvironment,
    parse_lock,
    read_lock,
)
from telescope_envs.records.model import Count, Record, read
from telescope_envs.records.reading import MAX_WHEEL_BYTES, attestation_path, is_registry_path
from telescope_envs.records.release import Release, check_digest, check_part
from telescope_envs.registry.resolving import parse_request
from telescope_envs.rules.archive import has_plain_ends
from telescope_envs.rules.wheel import read_release

FORMAT_VERSION = 1
MANIFEST = "bundle.json"
ENVIRONMENTS = "environments"
PACKAGES = "packages"
DATASETS = "datasets"
"""Folders in a bundle. That of a dataset is named by the digest of its files."""
MAX_FILES = 10_000
_MAX_DEPTH = 32
_MAX_COMPONENT = 200
"""Most parts of a path, and most bytes of each."""


class BundledFile(Record, frozen=True, kw_only=True):
    """One file of a bundle."""

    path: str
    sha256: str
    size: Count
    """Bytes."""


class BundledEnvironment(Record, frozen=True, kw_only=True):
    """One environment of a bundle, with the record of its release."""

    registry: str
    release: Release


class Manifest(Record, frozen=True, kw_only=True):
    """`bundle.json`."""

    version: int = FORMAT_VERSION
    python: str
    """Version of Python, such as 3.11."""
    platform: str
    """Operating system and processor, such as linux-x86_64."""
    environments: tuple[BundledEnvironment, ...]
    files: tuple[BundledFile, ...]
    """Every file except the manifest, sorted by path."""

    def check(self) -> None:
        """Raise RecordProblem for invalid hashes, and for invalid releases."""
        for number, file in enumerate(self.files):
            check_digest(f"files.{number}.sha256", file.sha256)
        for one in self.environments:
            check_part("release", one.release)


def this_platform() -> str:
    """Return the name of the platform in bundles."""
    return f"{sys.platform}-{platform.machine().lower()}"


def dataset_digest(files: Iterable[tuple[str, str]]) -> str:
    """Return the digest of a dataset from the path in it and the sha256 of each of its files."""
    lines = sorted(f"{path}\0{sha256}\n" for path, sha256 in files)
    return sha256_of("".join(lines))


def may_hold(path: str) -> bool:
    """Return whether a bundle may contain a file at `path`."""
    parts = path.split("/")
    if path == LOCK_NAME:
        return True
    if not is_registry_path(path) or len(parts) > _MAX_DEPTH:
        return False
    if any(len(part.encode()) > _MAX_COMPONENT for part in parts):
        return False
    match parts:
        case [folder, name] if folder == ENVIRONMENTS:
            return name.endswith((".whl", attestation_path(".whl")))
        case [folder, name] if folder == PACKAGES:
            return name.endswith(".whl")
        case [folder, _, _, *_]:
            return folder == DATASETS
        case _:
            return False


_Pin = tuple[str, Version, str]
"""Name, version and sha256 of one wheel of a dependency."""


def _unexpected(manifest: Manifest, lock: Lock, names: Collection[str]) -> Iterator[str]:
    """Yield how the archive's `names` or the manifest differ from the lock."""
    yield from _odd_names(manifest, names)
    yield from _odd_environments(manifest, lock)
    yield from _odd_datasets(manifest, lock)
    named = {f"{ENVIRONMENTS}/{one.wheel}": one.sha256 for one in lock.environments}
    for one in manifest.environments:
        wheel = f"{ENVIRONMENTS}/{one.release.wheel.filename}"
        named[attestation_path(wheel)] = one.release.attestation_sha256
    pins = _pins(lock)
    for file in manifest.files:
        folder, _, name = file.path.rpartition("/")
        is_package = folder == PACKAGES and _pin(name, file.sha256) in pins
        is_elsewhere = not folder or folder.partition("/")[0] == DATASETS
        if not is_package and not is_elsewhere and named.get(file.path) != file.sha256:
            yield (
                f"holds {file.path!r} with sha256 {file.sha256}, which its lock does not name; "
                "nothing was installed"
            )


def _odd_names(manifest: Manifest, names: Collection[str]) -> Iterator[str]:
    listed = [file.path for file in manifest.files]
    if Counter(names) != Counter([*listed, MANIFEST]):
        odd = sorted(set(names) ^ {*listed, MANIFEST}) or "a file appears twice"
        yield f"manifest and files differ: {odd}"
    for name in listed:
        if not may_hold(name):
            yield f"holds {name!r}, which a bundle must not hold"


def _odd_environments(manifest: Manifest, lock: Lock) -> Iterator[str]:
    locked = sorted(
        (one.id, one.version, one.wheel, one.sha256, one.registry) for one in lock.environments
    )
    described = sorted(
        (
            one.release.id,
            one.release.version,
            one.release.wheel.filename,
            one.release.wheel.sha256,
            one.registry,
        )
        for one in manifest.environments
    )
    paths = {file.path for file in manifest.files}
    if locked != described:
        odd = sorted({row[0] for row in {*locked} ^ {*described}}) or "one appears twice"
        yield f"its lock and its manifest differ in its environments: {odd}"
    for one in lock.environments:
        if f"{ENVIRONMENTS}/{one.wheel}" not in paths:
            yield f"its lock and its manifest differ: the wheel of {one.id} is missing"


def _odd_datasets(manifest: Manifest, lock: Lock) -> Iterator[str]:
    """Yield datasets that the lock does not name, or whose files differ from those it names."""
    named = {data.sha256 for one in lock.environments for data in one.datasets}
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in manifest.files:
        folder, _, path = file.path.partition("/")
        if folder == DATASETS:
            digest, _, inner = path.partition("/")
            found[digest].append((inner, file.sha256))
    for digest, files in found.items():
        if digest not in named or dataset_digest(files) != digest:
            yield (
                f"holds a dataset, {digest}, "
                "that its lock does not name, or with other files; nothing was installed"
            )


def _pins(lock: Lock) -> set[_Pin]:
    found: set[_Pin] = set()
    for entry in lock.environments:
        for line in entry.requirements:
            parts = REQUIREMENT_LINE.fullmatch(line)
            assert parts is not None, "a lock holds only such lines"
            name, _, version = parts["pin"].partition("==")
            for word in parts["hashes"].split():
                digest = word.rpartition(":")[2]
                found.add((str(canonicalize_name(name)), Version(version), digest))
    return found


def _pin(filename: str, sha256: str) -> _Pin | None:
    try:
        name, version, _, _ = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return None
    return str(name), version, sha256


MAX_BUNDLE_BYTES = 10 * 2**30
"""Default limit for the size of a bundle, and for its unpacked size."""
_MAX_TEXT_BYTES = 64 * 2**20
"""Largest manifest or lock, which are read into memory."""
_CHUNK_BYTES = 2**20
_IS_ENCRYPTED = 0x1
_ADVICE = "fetch or make the bundle again"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBundle:
    """An unpacked bundle whose content is exactly that of its lock."""

    lock: Lock
    packages: Path
    """Folder with the wheels of dependencies."""


class _Contents(NamedTuple):
    manifest: Manifest
    lock: Lock


@contextmanager
def opened_bundle(
    path: Path, *, progress: Progress, max_bytes: int = MAX_BUNDLE_BYTES
) -> Generator[OpenBundle]:
    """Unpack the bundle at `path`, check its whole content, and put its wheels into the cache.

    Raises RegistryError for a damaged bundle, and ConfigError for one that was made for another
    platform or is larger than `max_bytes`. In both cases nothing was kept.
    """
    if not path.is_file():
        raise ConfigError(f"there is no bundle {path}; telescope env bundle -o FILE writes one")
    _require_size(path.stat().st_size, max_bytes, path)
    progress(f"checking {path}")
    with tempfile.TemporaryDirectory(prefix="telescope-bundle-") as scratch:
        root = Path(scratch)
        manifest, lock = _unpacked(path, root, max_bytes)
        found = [_inspected(one, root) for one in manifest.environments]
        for one, (wheel, attestation) in zip(manifest.environments, found, strict=True):
            with installing(one.release.id):
                store_wheel(wheel, one.release, registry=one.registry, attestation=attestation)
        _keep(manifest.files, root)
        yield OpenBundle(lock=lock, packages=root / PACKAGES)


def _unpacked(path: Path, root: Path, max_bytes: int) -> _Contents:
    """Unpack the bundle into `root`, its lock first, after checking the names of its files."""
    (root / PACKAGES).mkdir()
    (root / ENVIRONMENTS).mkdir()
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                is_whole = has_plain_ends(data)
            begins = min((member.header_offset for member in archive.infolist()), default=0)
            if not is_whole or begins:
                raise RegistryError(f"{path}: has bytes before or after its zip archive; {_ADVICE}")
            _require_plain(archive, path)
            manifest = _manifest(archive, path)
            made_for = f"{manifest.platform}, Python {manifest.python}"
            here = f"{this_platform()}, Python {python_version()}"
            if made_for != here:
                raise ConfigError(
                    f"{path} was made for {made_for}, but this is {here}; make one on a machine "
                    "like this"
                )
            _require_size(sum(file.size for file in manifest.files), max_bytes, path)
            lock = _lock(archive, path)
            odd = next(_unexpected(manifest, lock, archive.namelist()), None)
            if odd is not None:
                raise RegistryError(f"{path}: {odd}; {_ADVICE}")
            for file in manifest.files:
                _unpack(archive, file, root, path)
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, OverflowError) as error:
        raise RegistryError(f"{path} is not a readable bundle: {error}; {_ADVICE}") from error
    except OSError as error:
        reason = error.strerror or error
        raise RegistryError(
            f"{path} cannot be unpacked to {root.parent}: {reason}; check the disk space there "
            "(TMPDIR names another folder), and the bundle"
        ) from error
    return _Contents(manifest, lock)


def _require_size(num_bytes: int, max_bytes: int, path: Path) -> None:
    if num_bytes > max_bytes:
        needed_gb = -(-num_bytes // 2**30)
        raise ConfigError(
            f"{path} has {num_bytes} bytes, more than the limit of {max_bytes}; if you expect that "
            f"many, add --max-bundle-gb {needed_gb}"
        )


def _require_plain(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse archives that only another program would write, or that may unpack to any size."""
    members = archive.infolist()
    if len(members) > MAX_FILES:
        raise RegistryError(f"{path}: has {len(members)} files, more than {MAX_FILES}; {_ADVICE}")
    for member in members:
        is_plain = member.compress_type == zipfile.ZIP_STORED
        if not is_plain or member.flag_bits & _IS_ENCRYPTED:
            raise RegistryError(
                f"{path}: {member.filename!r} is compressed or encrypted, but the files of a "
                f"bundle are stored as they are; {_ADVICE}"
            )


def _manifest(archive: zipfile.ZipFile, path: Path) -> Manifest:
    if MANIFEST not in archive.namelist():
        raise RegistryError(f"{path} is not a bundle: it has no {MANIFEST}; {_ADVICE}")
    try:
        manifest = read(Manifest, _text(archive, MANIFEST, path))
    except ValueError as problem:
        raise RegistryError(f"{path}: {MANIFEST}: {problem}; {_ADVICE}") from None
    if manifest.version != FORMAT_VERSION:
        raise RegistryError(
            f"{path} has format version {manifest.version}, but this Telescope reads "
            f"{FORMAT_VERSION}; upgrade telescope-envs"
        )
    return manifest


def _lock(archive: zipfile.ZipFile, path: Path) -> Lock:
    """Return the bundle's lock, whose hash is checked when it is unpacked like any other file."""
    if LOCK_NAME not in archive.namelist():
        raise RegistryError(f"{path} is not a bundle: it has no {LOCK_NAME}; {_ADVICE}")
    text = _text(archive, LOCK_NAME, path).decode()
    try:
        return parse_lock(text, f"{path}: {LOCK_NAME}", remedy=_ADVICE)
    except ConfigError as error:
        raise RegistryError(str(error)) from None


def _text(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    with archive.open(name) as file:
        text = file.read(_MAX_TEXT_BYTES + 1)
    if len(text) > _MAX_TEXT_BYTES:
        raise RegistryError(f"{path}: {name} has more than {_MAX_TEXT_BYTES} bytes; {_ADVICE}")
    return text


def _unpack(archive: zipfile.ZipFile, file: BundledFile, root: Path, path: Path) -> None:
    digest, left = hashlib.sha256(), file.size
    (root / file.path).parent.mkdir(parents=True, exist_ok=True)
    with archive.open(file.path) as packed, (root / file.path).open("wb") as plain:
        while chunk := packed.read(min(_CHUNK_BYTES, left + 1)):
            left -= len(chunk)
            if left < 0:
                break
            digest.update(chunk)
            plain.write(chunk)
    if left or digest.hexdigest() != file.sha256:
        raise RegistryError(
            f"{path}: {file.path} is not the file that its manifest lists; nothing was installed; "
            f"{_ADVICE}"
        )


class _Inspected(NamedTuple):
    wheel: bytes
    attestation: bytes
    """Empty if there is none."""


def _inspected(one: BundledEnvironment, root: Path) -> _Inspected:
    """Return the wheel of a bundled environment and its attestation, checked like any other."""
    release = one.release
    path = root / ENVIRONMENTS / release.wheel.filename
    with path.open("rb") as file:
        wheel = file.read(MAX_WHEEL_BYTES + 1)
    read_release(wheel, release)
    attested = path.with_name(attestation_path(path.name))
    attestation = b""
    if attested.is_file():
        with attested.open("rb") as file:
            attestation = file.read(MAX_ATTESTATION_BYTES)
    if asks_for_attestation(None, release):
        require_kept_attestation(release, wheel, attestation or None)
    return _Inspected(wheel, attestation)


def _keep(files: Sequence[BundledFile], root: Path) -> None:
    """Store packages and datasets where later runs find them by their hashes."""
    kept = packages_folder()
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with locked(data_folder() / "locks" / "packages.lock", what="a bundle is being installed"):
            paths = [file.path.split("/") for file in files]
            for digest in {inner[0] for folder, *inner in paths if folder == DATASETS}:
                target = dataset_folder(digest)
                part = target.with_name(f"{PART}{digest}")
                remove_tree(part)
                if not target.is_dir():
                    shutil.copytree(root / DATASETS / digest, part)
                    os.replace(part, target)
            for stale in kept.glob(f"{PART}*"):
                stale.unlink()
            for file in files:
                folder, _, name = file.path.rpartition("/")
                if folder == PACKAGES:
                    part = kept / f"{PART}{file.sha256}"
                    shutil.copyfile(root / file.path, part)
                    brought_wheels_folder(file.sha256).mkdir(exist_ok=True)
                    os.replace(part, brought_wheels_folder(file.sha256) / name)
    except OSError as error:
        advice = "check its disk space and permissions"
        raise unwritable(str(kept), error, advice) from error


def chosen_entries(lock: Lock, names: Sequence[str]) -> list[LockedEnvironment]:
    """Return the entries for `names` (owner/name or bare names); all if there are no names."""
    if not names:
        return list(lock.environments)
    found = {name: entry_named(lock, name) for name in names}
    known = [name for one in lock.environments for name in (one.id, one.id.partition("/")[2])]
    for name, entry in found.items():
        if entry is None:
            raise unknown_name("environment of the bundle", name, known)
    return [entry for entry in found.values() if entry is not None]


def entry_named(lock: Lock, name: str) -> LockedEnvironment | None:
    """Return the entry for `name`; None if there is none, or if `name` has a version."""
    request = parse_request(name)
    if request.wanted:
        return None
    fitting = [one for one in lock.environments if request.fits(one.id, one.registry)]
    if len(fitting) > 1:
        raise ConfigError(
            f"{name!r} is the name of {len(fitting)} environments of the lock: "
            f"{', '.join(one.id for one in fitting)}; use one of these names"
        )
    return fitting[0] if fitting else None


def install_bundled(
    bundle: OpenBundle, entry: LockedEnvironment, *, options: InstallOptions, progress: Progress
) -> Installed:
    """Install one entry of an open bundle, without a network, and add it to telescope.lock."""
    if options.lock is not None:
        known = read_lock(options.lock).find(entry.id)
        if known is not None and known.version == entry.version and known.sha256 != entry.sha256:
            raise RegistryError(
                f"{entry.id} {entry.version} is locked with wheel sha256 {known.sha256}, but the "
                f"bundle has {entry.sha256}; releases are never replaced: do not install it, and "
                "ask whoever made the bundle"
            )
    alone = replace(options, offline=True, wheels=bundle.packages, lock=None)
    done = sync_environment(
        entry, options=alone, may_change=False, open_registry=_refuse, progress=progress
    )
    if options.lock is not None:
        record_in_lock(options.lock, entry, progress=progress)
    return done


def _refuse(named: str) -> NoReturn:
    raise RegistryError(
        f"the bundle alone is not enough to install from {named}: it lacks a wheel; fetch or make "
        "it again"
    )
