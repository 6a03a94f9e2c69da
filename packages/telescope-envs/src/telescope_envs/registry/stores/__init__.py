"""The protocols of stores, which read a registry's files and, in some stores, publish to it.

Reading returns unchecked bytes: `Registry` parses records, and installing checks wheels. Every
store passes the same contract test.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, runtime_checkable

from telescope_envs.records.catalog import CatalogRow
from telescope_envs.records.reading import Listing, Publication
from telescope_envs.records.release import Status
from telescope_envs.registry.config import Address
from telescope_envs.registry.credentials import Token


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

    def artifact(self, url: str, *, max_bytes: int, sha256: str = "") -> bytes | None:
        """Return the artifact at `url`, absolute or relative to the registry; None if not found.

        Its bytes are unchecked. If `sha256` is given, bytes with another hash are neither kept nor
        taken from what is kept, so one bad answer does not become the answer for good. Raises
        RegistryError when the artifact is longer than `max_bytes`. The registry's credentials are
        never sent to any other host.
        """
        ...

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, sorted by id."""
        ...

    def close(self) -> None:
        """Close connections; calling it twice is fine."""
        ...


class ListedStore(Store, Protocol):
    """A store on this machine, all of whose files can be read."""

    def listing(self) -> Listing:
        """Return its files, as a registry that is only files has them."""
        ...


@runtime_checkable
class WritableStore(Store, Protocol):
    """A store that supports publishing.

    Both methods are atomic, and later reads see their changes.
    """

    def publish(self, publication: Publication) -> bool:
        """Store the artifacts, then append the index line; False if already published.

        Raises RegistryError when other bytes are already published under that version, when the
        namespace has no owner or another one, or when other writers keep changing the registry
        until the retries run out.
        """
        ...

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status record by `change` applied to it; returns the new record."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A remote registry that is not opened yet."""

    address: Address
    token: Token | None
    """Sent only to the host and port of the address."""
    login_hint: str
    """Advice to the user when the registry requires a token."""
    cache: Path
    """Folder for cached files; may not exist."""
    offline: bool
    tell: Callable[[str], None]

    def remark_age(self, confirmed_at: float) -> None:
        """Tell the user the age of files read offline; `confirmed_at` is in epoch seconds."""
        age = age_text(time.time() - confirmed_at)
        moment = datetime.fromtimestamp(confirmed_at, UTC)
        date = f"{moment:%Y-%m-%d %H:%M} UTC"
        self.tell(f"{self.address.text}: offline, as of {age} ago ({date})")


def age_text(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least two.

    One below 0, where the clock of the machine was set back since, is told as 0 seconds.
    """
    for size_s, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} seconds"


Opener = Callable[[Place], Store]
"""Type of the entry points in `telescope.registries`: opens a registry of one address scheme."""
