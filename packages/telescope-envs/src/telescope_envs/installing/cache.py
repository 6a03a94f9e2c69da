"""The cache of environments' checked wheels, stored by sha256 with the records of releases."""

import hashlib
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from telescope_core.errors import RegistryError
from telescope_envs.home import data_folder
from telescope_envs.registry.records import Release
from telescope_envs.trees import remove_tree

_RECORD = "release.json"
PART = ".part-"
"""Prefix of the name of an unfinished folder; the key of its environment follows."""


class CachedRelease(BaseModel):
    """A release whose wheel is in the cache, and where it came from."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    registry: str
    release: Release


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
    is_whole = hashlib.sha256(path.read_bytes()).hexdigest() == release.wheel.sha256
    return path if is_whole else None


def cached_releases() -> list[CachedRelease]:
    """Return every release whose wheel is in the cache."""
    found: list[CachedRelease] = []
    for path in sorted(wheels_folder().glob(f"*/{_RECORD}")):
        try:
            found.append(CachedRelease.model_validate_json(path.read_bytes()))
        except ValidationError:
            continue  # written by another version of Telescope, so ignored
    return found


def find_cached(sha256: str) -> CachedRelease | None:
    """Return the cached release whose wheel has this hash."""
    return next((one for one in cached_releases() if one.release.wheel.sha256 == sha256), None)


def store_wheel(data: bytes, release: Release, *, registry: str) -> Path:
    """Store the checked bytes of a wheel and its record; returns the path of the wheel."""
    record = CachedRelease(registry=registry, release=release)
    folder = wheels_folder() / release.wheel.sha256
    scratch = folder.with_name(f"{PART}{key_of(release.id)}")
    try:
        remove_tree(scratch)
        scratch.mkdir(parents=True)
        (scratch / release.wheel.filename).write_bytes(data)
        (scratch / _RECORD).write_text(record.model_dump_json(by_alias=True))
        remove_tree(folder)  # damaged, or without its record
        os.rename(scratch, folder)
    except OSError as error:
        remove_tree(scratch)
        raise RegistryError(
            f"{folder} cannot be written: {error.strerror}; check its disk space and permissions"
        ) from error
    return folder / release.wheel.filename
