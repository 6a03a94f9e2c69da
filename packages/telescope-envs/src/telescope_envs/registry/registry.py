"""A registry, wherever its files are: its index, aliases, status, namespaces and artefacts."""

import json
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from packaging.version import Version
from pydantic import BaseModel, ValidationError

from telescope_core.errors import RegistryError
from telescope_envs.registry.catalog import CatalogRow
from telescope_envs.registry.records import Aliases, Namespace, RegistryConfig, Release, Status
from telescope_envs.registry.store import Store
from telescope_envs.registry.stores.local import LocalStore

RecordType = TypeVar("RecordType", bound=BaseModel)
_MAX_WHEEL_BYTES = 100 * 1024 * 1024


class Registry:
    """Reads the records in `store`; every defect in them is a RegistryError that names the file."""

    def __init__(self, store: Store) -> None:
        self.store = store
        found = store.read("config.json")
        if found is None:
            raise RegistryError(
                f"{self.address} is not a registry: it has no config.json; "
                "give the place that holds index/ and artifacts/"
            )
        self.config = _parse(RegistryConfig, found, self._where("config.json"))
        self._check_client()

    @classmethod
    def at(cls, root: Path) -> "Registry":
        """Open the registry in the folder `root`."""
        return cls(LocalStore(root))

    @property
    def address(self) -> str:
        """Where it is, as a person gives it."""
        return self.store.address

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, by id."""
        return self.store.catalog()

    def ids(self) -> list[str]:
        """Return every owner/name in the index, sorted."""
        return [row.id for row in self.catalog()]

    def aliases(self) -> dict[str, str]:
        """Return bare name -> owner/name."""
        table = self._toml("aliases.toml")
        if table is None:
            return {}
        where = self._where("aliases.toml")
        return _parse(Aliases, json.dumps(table).encode(), where).aliases

    def releases(self, environment_id: str) -> list[Release]:
        """Return the releases of owner/name, oldest version first; empty when it has none."""
        path = f"index/{environment_id}.jsonl"
        lines = (self.store.read(path) or b"").splitlines()
        where = self._where(path)
        releases = [_parse(Release, line, f"{where}:{i + 1}") for i, line in enumerate(lines)]
        for release in releases:
            if release.id != environment_id:
                raise RegistryError(f"{where}: holds a release of {release.id}")
        return sorted(releases, key=lambda release: Version(release.version))

    def status(self, environment_id: str) -> Status:
        """Return what has been said of it since it was published."""
        path = f"status/{environment_id}.json"
        found = self.store.read(path)
        return _parse(Status, found, self._where(path)) if found is not None else Status()

    def namespace(self, owner: str) -> Namespace | None:
        """Return who may publish as `owner`; None when nobody may."""
        path = f"namespaces/{owner}.toml"
        table = self._toml(path)
        if table is None:
            return None
        return _parse(Namespace, json.dumps(table).encode(), self._where(path))

    def wheel_bytes(self, release: Release) -> bytes:
        """Return the wheel's bytes, unchecked; raises RegistryError when no address has them."""
        for url in release.wheel.urls:
            found = self.store.artifact(url, max_bytes=_MAX_WHEEL_BYTES)
            if found is not None:
                return found
        raise RegistryError(
            f"wheel {release.wheel.filename} of {release.id} is at none of its addresses "
            f"({', '.join(release.wheel.urls)}) of {self.address}; update the registry"
        )

    def _toml(self, path: str) -> dict[str, object] | None:
        found = self.store.read(path)
        try:
            return tomllib.loads(found.decode()) if found is not None else None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RegistryError(f"{self._where(path)}: not TOML: {error}") from error

    def _where(self, path: str) -> str:
        return f"{self.address}/{path}"

    def _check_client(self) -> None:
        ours = version("telescope-envs")
        if Version(ours) < Version(self.config.minimum_client):
            raise RegistryError(
                f"registry {self.address} needs telescope-envs >= {self.config.minimum_client}, "
                f"this is {ours}; upgrade telescope-envs"
            )


def _parse(record: type[RecordType], text: bytes, where: str) -> RecordType:
    try:
        return record.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "record"
        raise RegistryError(f"{where}: {field}: {first['msg']}; update the registry") from None
