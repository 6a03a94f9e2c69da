"""The format of bundles: single files from which environments install without any network.

A bundle is an uncompressed zip file with the wheels of environments and their attestations, every
wheel they run with on one platform, datasets, a telescope.lock, and a manifest with the hash of
each file. `bundling` makes them, `open_bundle` reads them.
"""

import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from telescope_envs.records.files import sha256_of
from telescope_envs.records.lockfile import LOCK_NAME, REQUIREMENT_LINE, Lock
from telescope_envs.records.model import Count, Record
from telescope_envs.records.reading import attestation_path, is_registry_path
from telescope_envs.records.release import Release, check_digest, check_part

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


def unexpected_contents(manifest: Manifest, lock: Lock, names: Collection[str]) -> str | None:
    """Return how the archive's `names` or the manifest differ from the lock; None if they fit."""
    return next(_problems(manifest, lock, names), None)


def _problems(manifest: Manifest, lock: Lock, names: Collection[str]) -> Iterator[str]:
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
