"""What a bundle may hold: the files that its own lock names, each with the lock's hash.

Pure functions over the manifest, the lock and the names in the archive.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from telescope_envs.installing.bundle import ENVIRONMENTS, MANIFEST, PACKAGES, Manifest
from telescope_envs.inventory import LOCK_NAME
from telescope_envs.lockfile import REQUIREMENT_LINE, Lock
from telescope_envs.registry.store import is_registry_path

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
