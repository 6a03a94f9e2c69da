"""The seam to wherever a registry's files are: reading for everyone, publishing for some.

A store moves bytes and checks nothing in them: `Registry` parses records, installing checks wheels.
Every store passes the same contract test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from telescope_core.errors import RegistryError
from telescope_envs.registry.catalog import CatalogRow

if TYPE_CHECKING:  # whoever only lists a registry does not wait for its records' validators
    from telescope_envs.registry.records import Release, Status


class Store(Protocol):
    """The files of one registry. Reading raises RegistryError when the place cannot be reached."""

    @property
    def address(self) -> str:
        """As a person gives it to `--registry`, without credentials."""
        ...

    @property
    def revision(self) -> str:
        """The commit that everything read comes from; empty where there are no commits."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return the file at `path`, such as `index/acme/toy.jsonl`; None when there is none."""
        ...

    def artifact(self, url: str, *, max_bytes: int) -> bytes | None:
        """Return the artefact at `url`, absolute or relative to the registry; None: not there.

        Raises RegistryError when it is longer than `max_bytes`. Other hosts than the registry's
        own never see its credentials.
        """
        ...

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, by id."""
        ...

    def close(self) -> None:
        """Let go of connections; fine to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One release with its bytes, ready to be published."""

    release: Release
    wheel: bytes
    attestation: bytes = b""
    """A Sigstore bundle; empty = none."""


def attestation_path(wheel_path: str) -> str:
    """Return where the Sigstore bundle of the wheel at `wheel_path` is: beside it."""
    return f"{wheel_path}.sigstore.json"


def metadata_path(wheel_path: str) -> str:
    """Return where a rendered registry has the METADATA of the wheel at `wheel_path` (PEP 658)."""
    return f"{wheel_path}.metadata"


def is_registry_path(path: str) -> bool:
    """Whether `path` can name a file of a registry: relative, never upwards, nothing hidden.

    Every store asks this before it touches anything, since addresses come from index lines.
    """
    parts = path.split("/")
    return (
        path.isprintable()
        and not any(mark in path for mark in (":", "\\", "?", "#", "%"))
        and all(part and not part.startswith(".") for part in parts)
    )


@runtime_checkable
class WritableStore(Store, Protocol):
    """A store that one may publish to.

    Both changes happen whole or not at all, and are seen by whoever reads afterwards.
    """

    def publish(self, publication: Publication) -> bool:
        """Store the artefacts, then append the index line; False: these bytes are published.

        Raises RegistryError when other bytes have that version, when nobody or somebody else owns
        the namespace, and when the registry changed meanwhile and still does after some tries.
        """
        ...

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status record by `change` of what it is now; returns the new one."""
        ...


def artifact_files(publication: Publication, address: str) -> dict[str, bytes]:
    """Return the files to store beside the index of the registry at `address`, by path."""
    wheel = publication.release.wheel
    inside = [url for url in wheel.urls if is_registry_path(url)]
    if not inside or PurePosixPath(inside[0]).name != wheel.filename:
        raise RegistryError(
            f"{wheel.filename}: a wheel in {address} needs an address relative to it, "
            f"such as artifacts/{wheel.filename}, got {', '.join(wheel.urls)}"
        )
    files = {inside[0]: publication.wheel}
    if publication.attestation:
        files[attestation_path(inside[0])] = publication.attestation
    return files
