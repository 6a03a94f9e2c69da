"""Content of the data folder: cached wheels, virtual environments, and records of their use.

Also removes what killed runs left behind, and virtual environments out of use.
"""

import os
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from telescope_core.base.errors import ConfigError
from telescope_envs.records.files import (
    data_folder,
    locked,
    locked_if_free,
    remove_tree,
    sha256_of,
    unwritable,
)
from telescope_envs.records.installed import Installation, installed_environments
from telescope_envs.records.lockfile import LockedEnvironment, read_lock
from telescope_envs.records.model import Record, read, read_known
from telescope_envs.records.reading import attestation_path
from telescope_envs.records.release import Release, check_part

_RECORD = "release.json"
PART = ".part-"
"""Prefix of the name of an unfinished folder; the key of its environment follows."""


class CachedRelease(Record, frozen=True, kw_only=True):
    """A release whose wheel is in the cache, and its origin."""

    registry: str
    release: Release

    def check(self) -> None:
        """Raise RecordProblem if its release has one."""
        check_part("release", self.release)


def wheels_folder() -> Path:
    """Return the folder of cached wheels."""
    return data_folder() / "cache" / "wheels"


def key_of(environment_id: str) -> str:
    """Return owner/name as part of a file name. It is unambiguous, as no name holds `--`."""
    return environment_id.replace("/", "--")


def cached_wheel(release: Release) -> Path | None:
    """Return the cached wheel after checking its hash; None if it is missing or damaged."""
    path = wheels_folder() / release.wheel.sha256 / release.wheel.filename
    if not path.is_file():
        return None
    is_whole = sha256_of(path.read_bytes()) == release.wheel.sha256
    return path if is_whole else None


def cached_releases() -> list[CachedRelease]:
    """Return every release whose wheel is in the cache."""
    return [one for _, one in read_known(CachedRelease, wheels_folder().glob(f"*/{_RECORD}"))]


def find_cached(sha256: str) -> CachedRelease | None:
    """Return the cached release whose wheel has this hash."""
    return next((one for one in cached_releases() if one.release.wheel.sha256 == sha256), None)


def cached_attestation(release: Release) -> bytes | None:
    """Return the Sigstore bundle that is kept with the wheel; None if it is missing or damaged."""
    path = wheels_folder() / release.wheel.sha256 / attestation_path(release.wheel.filename)
    if not path.is_file():
        return None
    data = path.read_bytes()
    return data if sha256_of(data) == release.attestation_sha256 else None


def store_wheel(data: bytes, release: Release, *, registry: str, attestation: bytes = b"") -> Path:
    """Store the checked bytes of a wheel, its record and its attestation, if there is one.

    Returns the path of the wheel.
    """
    record = CachedRelease(registry=registry, release=release)
    folder = wheels_folder() / release.wheel.sha256
    scratch = folder.with_name(f"{PART}{key_of(release.id)}")
    try:
        remove_tree(scratch)
        scratch.mkdir(parents=True)
        (scratch / release.wheel.filename).write_bytes(data)
        (scratch / _RECORD).write_bytes(record.as_json())
        if attestation:
            name = attestation_path(release.wheel.filename)
            (scratch / name).write_bytes(attestation)
        remove_tree(folder)  # damaged, or without its record
        os.rename(scratch, folder)
    except OSError as error:
        remove_tree(scratch)
        advice = "check its disk space and permissions"
        raise unwritable(str(folder), error, advice) from error
    return folder / release.wheel.filename


_REMOVING = ".removing-"


def lock_file(environment_id: str) -> Path:
    """Return the file that an installer keeps locked from the download to the activation."""
    return data_folder() / "locks" / f"{key_of(environment_id)}.lock"


@contextmanager
def installing(
    environment_id: str, progress: Callable[[str], None] = lambda step: None
) -> Generator[int]:
    """Hold the lock of owner/name while it is installed or removed; yields its descriptor."""
    what = f"{environment_id} is being installed"
    with locked(lock_file(environment_id), what=what, progress=progress) as held:
        yield held


def remove_leftovers() -> list[Path]:
    """Remove unfinished folders whose installer has ended; returns those that were removed."""
    removed: list[Path] = []
    for parent, prefix in (
        (venvs_folder(), BUILDING),
        (venvs_folder(), _REMOVING),
        (wheels_folder(), PART),
    ):
        for folder in sorted(parent.glob(f"{prefix}*")):
            key = folder.name.removeprefix(prefix)
            with locked_if_free(data_folder() / "locks" / f"{key}.lock") as is_ours:
                if is_ours and remove_tree(folder):
                    removed.append(folder)
    return removed


def remember_project(lock: Path) -> None:
    """Record that the virtual environments of this telescope.lock are in use."""
    folder = data_folder() / "projects"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / sha256_of(str(lock))[:16]).write_text(f"{lock}\n")


def remove_unused_venvs(environment_id: str) -> list[Path]:
    """Remove the virtual environments of owner/name that nothing uses; returns them.

    The active one, those in a project's telescope.lock, and those of running processes are in use.
    The caller holds the lock of the environment.
    """
    in_use = {Path(found.interpreter).parents[1] for found in installed_environments()}
    in_use |= _locked_by_projects()
    removed: list[Path] = []
    for folder in sorted(venvs_folder().glob(f"{key_of(environment_id)}--*")):
        is_used = folder in in_use or is_running(folder)
        if not is_used and remove_venv(folder, environment_id):
            removed.append(folder)
    return removed


def remove_venv(folder: Path, environment_id: str) -> bool:
    """Remove a virtual environment: rename it out of the way first, then delete its files.

    Returns whether it is out of the way; where it cannot be, all of it stays.
    """
    aside = venvs_folder() / f"{_REMOVING}{key_of(environment_id)}"
    if not remove_tree(aside):
        return False
    if folder.is_dir():
        try:
            os.rename(folder, aside)
        except OSError:
            return False
        remove_tree(aside)
    return True


def _locked_by_projects() -> set[Path]:
    """Return the virtual environments in the telescope.lock files of known projects."""
    folders: set[Path] = set()
    for note in (data_folder() / "projects").glob("*"):
        path = Path(note.read_text().rstrip("\n"))
        if not path.is_file():
            note.unlink(missing_ok=True)
            continue
        try:
            folders |= {venv_folder(one) for one in read_lock(path).environments}
        except ConfigError:  # damaged, which the next command that uses it reports
            continue
    return folders


def is_running(folder: Path) -> bool:
    """Return whether a process of this machine was started from `folder`; False without /proc."""
    start = os.fsencode(f"{folder}{os.sep}")
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if process.read_bytes().startswith(start):
                return True
        except OSError:
            continue
    return False


BUILDING = ".building-"
"""Prefix of the name of an unfinished virtual environment; the environment's key follows."""
VENV_RECORD = "telescope.json"
_DIGITS = 16


def venvs_folder() -> Path:
    """Return the folder of virtual environments."""
    return data_folder() / "venvs"


def venv_folder(locked: LockedEnvironment) -> Path:
    """Return the folder for the virtual environment of `locked`.

    Its name holds the digest of its contents, so different contents never share a folder.
    """
    folder = venvs_folder()
    found = folder / f"{key_of(locked.id)}--{locked.version}--{locked.digest[:_DIGITS]}"
    assert found.parent == folder, f"{found} is not directly in {folder}"
    assert ".." not in found.parts, f"{found} leaves {folder}"
    return found


def python_of(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / "bin" / "python"


def find_built(locked: LockedEnvironment) -> Installation | None:
    """Return the record in the virtual environment of `locked`; None if it is not built."""
    folder = venv_folder(locked)
    try:
        found = read(Installation, (folder / VENV_RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    is_it = found.locked is not None and found.locked.digest == locked.digest
    return found if is_it and python_of(folder).exists() else None


def dataset_folder(sha256: str) -> Path:
    """Return the folder for the files of the dataset with this digest; it may not exist."""
    return data_folder() / "cache" / "datasets" / sha256


def kept_datasets(locked: LockedEnvironment) -> dict[str, str]:
    """Return `repo@commit` -> folder of the datasets of `locked` that came in a bundle."""
    return {
        f"{one.repo}@{one.revision}": str(dataset_folder(one.sha256))
        for one in locked.datasets
        if one.sha256 and dataset_folder(one.sha256).is_dir()
    }


_DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def packages_folder() -> Path:
    """Return the folder of dependencies' wheels from bundles, kept for later use offline."""
    return data_folder() / "cache" / "packages"


def brought_wheels_folder(sha256: str) -> Path:
    """Return the folder for the wheel with this hash, alone: other bytes may have the same name."""
    return packages_folder() / sha256


def brought_wheels(lines: Iterable[str]) -> list[str]:
    """Return the options of uv that offer it the wheels from bundles that `lines` name by hash.

    Offer them only to install what is locked. Which version is locked must come from the package
    index, because anyone may make a bundle.
    """
    digests = sorted({digest for line in lines for digest in _DIGEST.findall(line)})
    folders = [brought_wheels_folder(digest) for digest in digests]
    return [part for one in folders if one.is_dir() for part in ("--find-links", str(one))]
