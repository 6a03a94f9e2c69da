"""A release with its bytes, and the paths that its files have in a registry."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from telescope_core.errors import RegistryError
from telescope_envs.records.release import Release


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One release with its bytes, ready to be published."""

    release: Release
    wheel: bytes
    attestation: bytes = b""
    """A Sigstore bundle; empty if there is none."""


def check_bytes(data: bytes, release: Release) -> None:
    """Raise RegistryError unless `data` has the size and sha256 recorded in `release`."""
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != release.wheel.size or digest != release.wheel.sha256:
        raise RegistryError(
            f"wheel {release.wheel.filename} is not the one that was published: expected "
            f"{release.wheel.size} bytes, sha256 {release.wheel.sha256}, got {len(data)} bytes, "
            f"sha256 {digest}; nothing was installed. Restore the file in the registry"
        )


def attestation_path(wheel_path: str) -> str:
    """Return the path of the Sigstore bundle, which is beside the wheel at `wheel_path`."""
    return f"{wheel_path}.sigstore.json"


def metadata_path(wheel_path: str) -> str:
    """Return the path of the wheel's METADATA file in a rendered registry (PEP 658)."""
    return f"{wheel_path}.metadata"


def is_registry_path(path: str) -> bool:
    """Whether `path` can name a file of a registry: relative, without `..` or hidden parts.

    Every store checks this before it touches a file, because index lines are untrusted.
    """
    parts = path.split("/")
    return (
        path.isprintable()
        and not any(mark in path for mark in (":", "\\", "?", "#", "%"))
        and all(part and not part.startswith(".") for part in parts)
    )


def artifact_files(publication: Publication, address: str) -> dict[str, bytes]:
    """Return path -> bytes of the artifacts to store in the registry at `address`."""
    wheel = publication.release.wheel
    inside = [url for url in wheel.urls if is_registry_path(url)]
    if not inside or PurePosixPath(inside[0]).name != wheel.filename:
        raise RegistryError(
            f"{wheel.filename}: a wheel in {address} needs a URL relative to the registry, "
            f"such as artifacts/{wheel.filename}, got {', '.join(wheel.urls)}"
        )
    files = {inside[0]: publication.wheel}
    if publication.attestation:
        files[attestation_path(inside[0])] = publication.attestation
    return files


def tree_files(root: Path) -> list[str]:
    """Return the sorted paths of a registry's files, without hidden files and symlinks."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        base = Path(folder).relative_to(root)
        paths = [(base / name).as_posix() for name in files]
        found += [p for p in paths if is_registry_path(p) and not (root / p).is_symlink()]
    return sorted(found)
