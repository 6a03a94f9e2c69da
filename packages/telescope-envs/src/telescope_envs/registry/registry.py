"""Reads a registry from any store: its index, aliases, status, namespaces and artifacts."""

from functools import cached_property
from pathlib import Path

from packaging.version import Version

from telescope_core.base.errors import RegistryError
from telescope_envs.records.catalog import CatalogRow
from telescope_envs.records.installed import version_of
from telescope_envs.records.reading import (
    MAX_WHEEL_BYTES,
    REMOVED_PATH,
    ReadReleases,
    log_unreadable,
    parse_aliases,
    parse_namespace_of,
    parse_record,
    parse_removals,
    parse_status,
    read_releases,
)
from telescope_envs.records.release import (
    Namespace,
    RegistryConfig,
    Release,
    RemovedRelease,
    Status,
)
from telescope_envs.registry.stores import Store
from telescope_envs.registry.stores.folder import LocalStore


class Registry:
    """Reads the records in `store`; RegistryErrors name invalid ones, except skipped lines."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._named: set[str] = set()
        found = store.read("config.json")
        if found is None:
            raise RegistryError(
                f"{self.address} is not a registry: it has no config.json; "
                "give the folder or address that contains index/ and artifacts/"
            )
        self.config = parse_record(RegistryConfig, found, self._where("config.json"))
        ours = version_of("telescope-envs") or "0"
        if Version(ours) < Version(self.config.minimum_client):
            raise RegistryError(
                f"registry {self.address} needs telescope-envs >= {self.config.minimum_client}, "
                f"but {ours} is installed; upgrade telescope-envs"
            )

    @classmethod
    def at(cls, root: Path) -> "Registry":
        """Open the registry in the folder `root`."""
        return cls(LocalStore(root))

    @property
    def address(self) -> str:
        """The address, as a user gives it."""
        return self.store.address

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, sorted by id."""
        return self.store.catalog()

    def ids(self) -> list[str]:
        """Return every owner/name in the index, sorted."""
        return [row.id for row in self.catalog()]

    def has(self, environment_id: str) -> bool:
        """Return whether owner/name has an index file; does not read the catalog."""
        return bool(self.store.read(f"index/{environment_id}.jsonl"))

    def aliases(self) -> dict[str, str]:
        """Return bare name -> owner/name."""
        found = self.store.read("aliases.toml")
        return parse_aliases(found, self._where("aliases.toml")).aliases if found else {}

    def releases(self, environment_id: str) -> list[Release]:
        """Return the releases of owner/name, oldest version first; empty when it has none.

        Lines that cannot be read are named in the log, once.
        """
        found = self.read_releases(environment_id)
        new = [line for line in found.unreadable if line.where not in self._named]
        log_unreadable(new)
        self._named.update(line.where for line in new)
        return found.releases

    def read_releases(self, environment_id: str) -> ReadReleases:
        """Return the releases of owner/name, oldest version first, and its unreadable lines."""
        path = f"index/{environment_id}.jsonl"
        found = read_releases(self.store.read(path) or b"", environment_id, self._where(path))
        releases = sorted(found.releases, key=lambda release: Version(release.version))
        return ReadReleases(releases, found.unreadable)

    def status(self, environment_id: str) -> Status:
        """Return the status record of owner/name; an empty one if it has none."""
        path = f"status/{environment_id}.json"
        return parse_status(self.store.read(path), self._where(path))

    def namespace(self, owner: str) -> Namespace | None:
        """Return the record of who may publish as `owner`; None if nobody may."""
        path = f"namespaces/{owner}.toml"
        found = self.store.read(path)
        return parse_namespace_of(owner, found, self._where(path)) if found is not None else None

    @cached_property
    def removed(self) -> tuple[RemovedRelease, ...]:
        """The releases that were taken down; none if their list cannot be read.

        It only explains what is missing, which must be told offline and by an odd list as well.
        """
        try:
            return parse_removals(self.store.read(REMOVED_PATH)).removed
        except RegistryError:
            return ()

    def wheel_bytes(self, release: Release) -> bytes:
        """Return the wheel's bytes, unchecked; raises RegistryError when no URL has them."""
        for url in release.wheel.urls:
            found = self.store.artifact(url, max_bytes=MAX_WHEEL_BYTES, sha256=release.wheel.sha256)
            if found is not None:
                return found
        raise RegistryError(
            f"wheel {release.wheel.filename} of {release.id} in {self.address} is at none of its "
            f"URLs ({', '.join(release.wheel.urls)}); update the registry"
        )

    def _where(self, path: str) -> str:
        return f"{self.address}/{path}"
