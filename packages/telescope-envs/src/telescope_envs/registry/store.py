"""The protocols of stores, which read a registry's files and, in some stores, publish to it.

Reading returns unchecked bytes: `Registry` parses records, and installing checks wheels. Every
store passes the same contract test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from telescope_core.errors import RegistryError
from telescope_envs.registry.catalog import CatalogRow

if TYPE_CHECKING:  # listing a registry should not wait for the import of the record models
    from telescope_envs.registry.records import Release, Status


class Store(Protocol):
    """The files of one registry. Reading raises RegistryError when the place cannot be reached."""

    @property
    def address(self) -> str:
        """The address, as a user gives it to `--registry`, without credentials."""
        ...

    @property
    def revision(self) -> str:
        """The commit that everything is read from; empty for stores without commits."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return the file at `path`, such as `index/acme/toy.jsonl`; None when there is none."""
        ...

    def artifact(self, url: str, *, max_bytes: int) -> bytes | None:
        """Return the artifact at `url`, absolute or relative to the registry; None if not found.

        Raises RegistryError when it is longer than `max_bytes`. The registry's credentials are
        never sent to any other host.
        """
        ...

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, sorted by id."""
        ...

    def close(self) -> None:
        """Close connections; calling it twice is fine."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One release with its bytes, ready to be published."""

    release: Release
    wheel: bytes
    attestation: bytes = b""
    """A Sigstore bundle; empty if there is none."""


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


@runtime_checkable
class WritableStore(Store, Protocol):
    """A store that supports publishing.

    Both methods are atomic, and later reads see their changes.
    """

    def publish(self, publication: Publication) -> bool:
        """Store the artifacts, then append the index line; False if already published.

        Raises RegistryError when different bytes are published under that version, when nobody or
        somebody else owns the namespace, or when other writers keep changing the registry and the
        retries run out.
        """
        ...

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status record by `change` applied to it; returns the new record."""
        ...


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
