"""Bundles: single files from which environments install without any network.

A bundle is an uncompressed zip file with the wheels of environments, every wheel they run with on
one platform, a telescope.lock, and a manifest with the hash of each file. Equal inputs give equal
bytes.
"""

import hashlib
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.filelocks import locked
from telescope_envs.home import data_folder
from telescope_envs.installing.cache import PART, store_wheel
from telescope_envs.installing.downloads import download_wheels
from telescope_envs.installing.leftovers import lock_file
from telescope_envs.installing.requirements import python_version
from telescope_envs.installing.steps import Progress
from telescope_envs.inventory import LOCK_NAME
from telescope_envs.lockfile import Lock, LockedEnvironment, read_lock, write_lock
from telescope_envs.packages import packages_folder
from telescope_envs.registry.records import Release, Sha256
from telescope_envs.registry.store import is_registry_path
from telescope_envs.registry.wheel import check_bytes, check_release, read_wheel

FORMAT_VERSION = 1
MANIFEST = "bundle.json"
_ENVIRONMENTS = "environments"
_PACKAGES = "packages"
_CHUNK_BYTES = 1024 * 1024
_MOMENT = (2020, 1, 1, 0, 0, 0)
_ADVICE = "fetch or make the bundle again"


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class BundledFile(_Record):
    """One file of a bundle."""

    path: str
    sha256: Sha256
    size: int


class BundledEnvironment(_Record):
    """One environment of a bundle, with the record of its release."""

    registry: str
    release: Release


class Manifest(_Record):
    """`bundle.json`."""

    version: int = FORMAT_VERSION
    python: str
    """Version of Python, such as 3.11."""
    platform: str
    """Operating system and processor, such as linux-x86_64."""
    environments: tuple[BundledEnvironment, ...]
    files: tuple[BundledFile, ...]
    """Every file except the manifest, sorted by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One environment to put into a bundle."""

    entry: LockedEnvironment
    release: Release
    wheel: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBundle:
    """A bundle that was unpacked, and whose files all matched their hashes."""

    lock: Lock
    packages: Path
    """Folder with the wheels of dependencies."""


def this_platform() -> str:
    """Return the platform as bundles name it."""
    return f"{sys.platform}-{platform.machine().lower()}"


def write_bundle(parts: Sequence[Part], target: Path, *, progress: Progress) -> Manifest:
    """Fetch the packages of `parts` and write their bundle to `target` atomically."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".bundle-") as scratch:
        root = Path(scratch) / "contents"
        (root / _ENVIRONMENTS).mkdir(parents=True)
        (root / _PACKAGES).mkdir()
        for part in parts:
            progress(f"{part.entry.id} {part.entry.version}: fetching its packages")
            shutil.copyfile(part.wheel, root / _ENVIRONMENTS / part.entry.wheel)
            lines = part.entry.requirements
            download_wheels(lines, root / _PACKAGES, needed_by=part.entry.id)
        write_lock(root / LOCK_NAME, Lock().merged(part.entry for part in parts))
        manifest = Manifest(
            python=python_version(),
            platform=this_platform(),
            environments=tuple(
                BundledEnvironment(registry=part.entry.registry, release=part.release)
                for part in sorted(parts, key=lambda part: part.entry.id)
            ),
            files=tuple(_described(path, root) for path in sorted(root.rglob("*.*"))),
        )
        (root / MANIFEST).write_text(f"{manifest.model_dump_json(by_alias=True, indent=2)}\n")
        progress(f"writing {target}")
        _pack(root, Path(scratch) / "bundle.zip")
        os.replace(Path(scratch) / "bundle.zip", target)
    return manifest


@contextmanager
def opened_bundle(path: Path, *, progress: Progress) -> Generator[OpenBundle]:
    """Unpack the bundle at `path`, check every hash, and put its wheels into the cache.

    Raises RegistryError for a damaged bundle and ConfigError for one made for another platform.
    """
    if not path.is_file():
        raise ConfigError(f"there is no bundle {path}; telescope env bundle -o FILE writes one")
    progress(f"checking {path}")
    with tempfile.TemporaryDirectory(prefix="telescope-bundle-") as scratch:
        root = Path(scratch)
        try:
            with zipfile.ZipFile(path) as archive:
                manifest = _manifest(archive, path)
                _require_this_platform(manifest, path)
                for file in _files(archive, manifest, path):
                    _unpack(archive, file, root, path)
        except (OSError, zipfile.BadZipFile, EOFError, ValueError) as error:
            raise RegistryError(f"{path} is not a readable bundle: {error}; {_ADVICE}") from error
        lock = read_lock(root / LOCK_NAME)
        for one in manifest.environments:
            with locked(lock_file(one.release.id), what=f"{one.release.id} is being installed"):
                _keep_wheel(one, root, lock, path)
        _keep_packages(root / _PACKAGES)
        yield OpenBundle(lock=lock, packages=root / _PACKAGES)


def _described(path: Path, root: Path) -> BundledFile:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return BundledFile(path=path.relative_to(root).as_posix(), sha256=digest, size=len(data))


def _pack(root: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(root.rglob("*.*")):
            info = zipfile.ZipInfo(path.relative_to(root).as_posix(), _MOMENT)
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            info.file_size = path.stat().st_size
            with path.open("rb") as source, archive.open(info, "w") as packed:
                shutil.copyfileobj(source, packed, _CHUNK_BYTES)


def _manifest(archive: zipfile.ZipFile, path: Path) -> Manifest:
    if MANIFEST not in archive.namelist():
        raise RegistryError(f"{path} is not a bundle: it has no {MANIFEST}; {_ADVICE}")
    text = archive.read(MANIFEST)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = f"{path}: {MANIFEST}: {field}: {first['msg']}; {_ADVICE}"
        raise RegistryError(message) from None
    if manifest.version != FORMAT_VERSION:
        raise RegistryError(
            f"{path} has format version {manifest.version}, but this Telescope reads "
            f"{FORMAT_VERSION}; upgrade telescope-envs"
        )
    return manifest


def _require_this_platform(manifest: Manifest, path: Path) -> None:
    made_for = f"{manifest.platform}, Python {manifest.python}"
    here = f"{this_platform()}, Python {python_version()}"
    if made_for != here:
        raise ConfigError(
            f"{path} was made for {made_for}, but this is {here}; make one on a machine like this"
        )


def _files(archive: zipfile.ZipFile, manifest: Manifest, path: Path) -> Sequence[BundledFile]:
    """Return the files to unpack, after checking that the archive holds exactly these."""
    names = archive.namelist()
    listed = [file.path for file in manifest.files]
    if sorted(names) != sorted([*listed, MANIFEST]):
        odd = sorted(set(names) ^ {*listed, MANIFEST}) or "a file appears twice"
        raise RegistryError(f"{path}: manifest and files differ: {odd}; {_ADVICE}")
    for name in listed:
        folder, _, last = name.rpartition("/")
        is_known = folder in (_ENVIRONMENTS, _PACKAGES) and last.endswith(".whl")
        if not is_registry_path(name) or not (is_known or name == LOCK_NAME):
            raise RegistryError(f"{path}: holds {name!r}, which a bundle must not hold; {_ADVICE}")
    return manifest.files


def _unpack(archive: zipfile.ZipFile, file: BundledFile, root: Path, path: Path) -> None:
    target = root / file.path
    target.parent.mkdir(exist_ok=True)
    digest, left = hashlib.sha256(), file.size
    with archive.open(file.path) as packed, target.open("wb") as plain:
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


def _keep_wheel(one: BundledEnvironment, root: Path, lock: Lock, path: Path) -> None:
    """Inspect the wheel of a bundled environment like any other, and put it into the cache."""
    release = one.release
    entry = lock.find(release.id)
    found = root / _ENVIRONMENTS / release.wheel.filename
    if entry is None or entry.sha256 != release.wheel.sha256 or not found.is_file():
        raise RegistryError(
            f"{path}: its lock and its record of {release.id} differ, or the wheel is missing; "
            f"{_ADVICE}"
        )
    data = found.read_bytes()
    check_bytes(data, release)
    check_release(read_wheel(data, release.wheel.filename), release)
    store_wheel(data, release, registry=one.registry)


def _keep_packages(folder: Path) -> None:
    """Put the wheels of dependencies where later runs with --offline find them."""
    kept = packages_folder()
    kept.mkdir(parents=True, exist_ok=True)
    with locked(data_folder() / "locks" / "packages.lock", what="a bundle is being installed"):
        for stale in kept.glob(f"{PART}*"):
            stale.unlink()
        for wheel in sorted(folder.iterdir()):
            part = kept / f"{PART}{wheel.name}"
            shutil.copyfile(wheel, part)
            os.replace(part, kept / wheel.name)
