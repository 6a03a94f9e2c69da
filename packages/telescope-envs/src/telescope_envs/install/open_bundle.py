"""Opening a bundle: everything in it is checked before any of it is kept.

A bundle is not signed, and its lock is its own. So it may hold only what that lock names, each file
with the hash that the lock has for it, and nothing reaches the cache until all of that is known.
"""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.install.bundle import (
    ENVIRONMENTS,
    FORMAT_VERSION,
    MANIFEST,
    PACKAGES,
    BundledEnvironment,
    BundledFile,
    Manifest,
    this_platform,
    unexpected_contents,
)
from telescope_envs.install.data import (
    PART,
    brought_wheels_folder,
    lock_file,
    packages_folder,
    store_wheel,
)
from telescope_envs.install.requirements import python_version
from telescope_envs.install.steps import Progress
from telescope_envs.records.files import data_folder, locked
from telescope_envs.records.lockfile import (
    LOCK_NAME,
    Lock,
    parse_lock,
)
from telescope_envs.records.model import read
from telescope_envs.records.reading import check_bytes
from telescope_envs.rules.wheel import check_release, read_wheel

MAX_BUNDLE_BYTES = 10 * 2**30
"""Default of the largest bundle that is opened, and of what it may unpack to."""
_MAX_FILES = 10_000
_MAX_TEXT_BYTES = 64 * 2**20
"""Largest manifest and lock, which are read into memory."""
_MAX_WHEEL_BYTES = 100 * 2**20
"""Largest wheel of an environment, which is read into memory."""
_CHUNK_BYTES = 2**20
_IS_ENCRYPTED = 0x1
_ADVICE = "fetch or make the bundle again"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBundle:
    """A bundle that was unpacked, and that holds exactly what its lock names."""

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
    """Unpack the bundle at `path`, check all that it holds, and put its wheels into the cache.

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
        wheels = [_inspected(one, root) for one in manifest.environments]
        for one, data in zip(manifest.environments, wheels, strict=True):
            with locked(lock_file(one.release.id), what=f"{one.release.id} is being installed"):
                store_wheel(data, one.release, registry=one.registry)
        _keep_packages(manifest.files, root)
        yield OpenBundle(lock=lock, packages=root / PACKAGES)


def _unpacked(path: Path, root: Path, max_bytes: int) -> _Contents:
    """Unpack the bundle into `root`, its lock first, after checking that it holds what it may."""
    (root / PACKAGES).mkdir()
    (root / ENVIRONMENTS).mkdir()
    try:
        with zipfile.ZipFile(path) as archive:
            _require_plain(archive, path)
            manifest = _manifest(archive, path)
            _require_this_platform(manifest, path)
            _require_size(sum(file.size for file in manifest.files), max_bytes, path)
            lock = _lock(archive, path)
            odd = unexpected_contents(manifest, lock, archive.namelist())
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
    """Refuse what only another program would have written, and what may unpack to any size."""
    members = archive.infolist()
    if len(members) > _MAX_FILES:
        raise RegistryError(f"{path}: has {len(members)} files, more than {_MAX_FILES}; {_ADVICE}")
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


def _require_this_platform(manifest: Manifest, path: Path) -> None:
    made_for = f"{manifest.platform}, Python {manifest.python}"
    here = f"{this_platform()}, Python {python_version()}"
    if made_for != here:
        raise ConfigError(
            f"{path} was made for {made_for}, but this is {here}; make one on a machine like this"
        )


def _unpack(archive: zipfile.ZipFile, file: BundledFile, root: Path, path: Path) -> None:
    digest, left = hashlib.sha256(), file.size
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


def _inspected(one: BundledEnvironment, root: Path) -> bytes:
    """Return the wheel of a bundled environment, inspected like any other."""
    release = one.release
    with (root / ENVIRONMENTS / release.wheel.filename).open("rb") as file:
        data = file.read(_MAX_WHEEL_BYTES + 1)
    check_bytes(data, release)
    check_release(read_wheel(data, release.wheel.filename), release)
    return data


def _keep_packages(files: Sequence[BundledFile], root: Path) -> None:
    """Put the wheels of dependencies where later runs with --offline find them by their hash."""
    kept = packages_folder()
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with locked(data_folder() / "locks" / "packages.lock", what="a bundle is being installed"):
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
        raise RegistryError(
            f"{kept} cannot be written: {error.strerror}; check its disk space and permissions"
        ) from error
