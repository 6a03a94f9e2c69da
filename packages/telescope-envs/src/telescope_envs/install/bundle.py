"""Bundles: single files from which environments install without any network.

A bundle is an uncompressed zip file with the wheels of environments, every wheel they run with on
one platform, a telescope.lock, and a manifest with the hash of each file. Equal inputs give equal
bytes. `open_bundle` reads them.
"""

import hashlib
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.install.requirements import python_version
from telescope_envs.install.steps import Progress
from telescope_envs.processes.running import last_line, run_program
from telescope_envs.processes.uv import Uv, wheels_only
from telescope_envs.records.lockfile import (
    LOCK_NAME,
    REQUIREMENT_LINE,
    Lock,
    LockedEnvironment,
    write_lock,
)
from telescope_envs.records.model import Count, Record
from telescope_envs.records.reading import is_registry_path
from telescope_envs.records.release import Release, check_digest, check_parts

FORMAT_VERSION = 1
MANIFEST = "bundle.json"
ENVIRONMENTS = "environments"
PACKAGES = "packages"
_CHUNK_BYTES = 1024 * 1024
_MOMENT = (2020, 1, 1, 0, 0, 0)


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
        """Raise RecordProblem for hashes that are none, and for odd releases."""
        for number, file in enumerate(self.files):
            check_digest(f"files.{number}.sha256", file.sha256)
        for one in self.environments:
            check_parts(one, "release")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One environment to put into a bundle."""

    entry: LockedEnvironment
    release: Release
    wheel: Path


def this_platform() -> str:
    """Return the platform as bundles name it."""
    return f"{sys.platform}-{platform.machine().lower()}"


def write_bundle(parts: Sequence[Part], target: Path, *, progress: Progress) -> Manifest:
    """Fetch the packages of `parts` and write their bundle to `target` atomically."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".bundle-") as scratch:
        root = Path(scratch) / "contents"
        (root / ENVIRONMENTS).mkdir(parents=True)
        (root / PACKAGES).mkdir()
        for part in parts:
            progress(f"{part.entry.id} {part.entry.version}: fetching its packages")
            shutil.copyfile(part.wheel, root / ENVIRONMENTS / part.entry.wheel)
            lines = part.entry.requirements
            download_wheels(lines, root / PACKAGES, needed_by=part.entry.id)
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
        (root / MANIFEST).write_bytes(manifest.as_json(indent=2) + b"\n")
        progress(f"writing {target}")
        _pack(root, Path(scratch) / "bundle.zip")
        os.replace(Path(scratch) / "bundle.zip", target)
    return manifest


_TIME_LIMIT_S = 1800.0
_UV_TO_PIP = {
    "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
    "UV_INDEX": "PIP_EXTRA_INDEX_URL",
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
    "SSL_CERT_FILE": "PIP_CERT",
}


def download_wheels(lines: Sequence[str], folder: Path, *, needed_by: str) -> None:
    """Download the wheels that requirement `lines` name into `folder` with pip, as uv cannot.

    Raises EnvironmentLoadError if a package is missing, has another hash, or has no wheel.
    """
    if not lines:
        return
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch) / "requirements.txt"
        listed.write_text("".join(f"{line}\n" for line in lines))
        environ = _pip_environment(Path(scratch))
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--require-hashes", *wheels_only(())),
            *("--requirement", str(listed), "--dest", str(folder.absolute())),
        ]
        late = f"the packages of {needed_by} were not fetched within {_TIME_LIMIT_S:g} s"
        done = run_program(command, environ=environ, limit_s=_TIME_LIMIT_S, late=late)
    if done.returncode:
        raise EnvironmentLoadError(
            f"the packages of {needed_by} cannot be fetched as wheels for this platform: "
            f"{last_line(done)}; a bundle cannot hold packages that must be built from source"
        )


def _pip_environment(scratch: Path) -> dict[str, str]:
    """Return this process's variables plus uv's settings by pip's names; installs pip if needed."""
    environ = dict(os.environ)
    for uv_name, pip_name in _UV_TO_PIP.items():
        if environ.get(uv_name) and not environ.get(pip_name):
            environ[pip_name] = environ[uv_name].replace(",", " ")
    # On the search path alone: the finder that setuptools adds changes modules when asked for pip.
    if PathFinder.find_spec("pip") is None:
        Uv().run(
            ["pip", "install", "--quiet", "--target", str(scratch / "pip"), "pip"],
            failure="pip, which fetches the packages of a bundle, cannot be installed",
        )
        environ["PYTHONPATH"] = str(scratch / "pip")
    return environ


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


_Pin = tuple[str, Version, str]
"""Name, version and sha256 of one wheel of a dependency."""


def unexpected_contents(manifest: Manifest, lock: Lock, names: Collection[str]) -> str | None:
    """Return how the archive's `names` or the manifest are unlike the lock; None if they fit."""
    return next(_problems(manifest, lock, names), None)


def _problems(manifest: Manifest, lock: Lock, names: Collection[str]) -> Iterator[str]:
    yield from _odd_names(manifest, names)
    yield from _odd_environments(manifest, lock)
    wheels = {f"{ENVIRONMENTS}/{one.wheel}": one.sha256 for one in lock.environments}
    pins = _pins(lock)
    for file in manifest.files:
        folder, _, name = file.path.rpartition("/")
        is_named = (
            wheels.get(file.path) == file.sha256
            if folder == ENVIRONMENTS
            else not folder or _pin(name, file.sha256) in pins
        )
        if not is_named:
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
        folder, _, last = name.rpartition("/")
        is_known = folder in (ENVIRONMENTS, PACKAGES) and last.endswith(".whl")
        if not is_registry_path(name) or not (is_known or name == LOCK_NAME):
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
