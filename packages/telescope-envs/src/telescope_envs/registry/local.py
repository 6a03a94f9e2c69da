"""A registry that is a directory: reading its index, aliases, status and artefacts."""

import json
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from packaging.version import Version
from pydantic import BaseModel, ValidationError

from telescope_core.errors import RegistryError
from telescope_envs.registry.records import Namespace, RegistryConfig, Release, Status

RecordType = TypeVar("RecordType", bound=BaseModel)
_MAX_WHEEL_BYTES = 100 * 1024 * 1024


class LocalRegistry:
    """Reads the registry at `root`; every defect in it is a RegistryError that names the file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / "config.json").is_file():
            raise RegistryError(
                f"{root} is not a registry: it has no config.json; "
                "give the folder that holds index/ and artifacts/"
            )
        self.config = _parse(RegistryConfig, self._read("config.json"), str(root / "config.json"))
        self._check_client()

    def ids(self) -> list[str]:
        """Return every owner/name in the index, sorted."""
        files = (self.root / "index").glob("*/*.jsonl")
        return sorted(f"{file.parent.name}/{file.stem}" for file in files)

    def aliases(self) -> dict[str, str]:
        """Return bare name -> owner/name."""
        path = self.root / "aliases.toml"
        if not path.is_file():
            return {}
        try:
            aliases = tomllib.loads(path.read_text())["aliases"]
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise RegistryError(f"{path}: expected a table [aliases], got {error}") from error
        return {str(name): str(target) for name, target in aliases.items()}

    def releases(self, environment_id: str) -> list[Release]:
        """Return the releases of owner/name, oldest version first; empty when it has none."""
        path = self.root / "index" / f"{environment_id}.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text().splitlines()
        releases = [_parse(Release, line, f"{path}:{i + 1}") for i, line in enumerate(lines)]
        for release in releases:
            if release.id != environment_id:
                raise RegistryError(f"{path}: holds a release of {release.id}")
        return sorted(releases, key=lambda release: Version(release.version))

    def status(self, environment_id: str) -> Status:
        """Return what has been said of it since it was published."""
        path = self.root / "status" / f"{environment_id}.json"
        return _parse(Status, path.read_text(), str(path)) if path.is_file() else Status()

    def namespace(self, owner: str) -> Namespace | None:
        """Return who may publish as `owner`; None when nobody may."""
        path = self.root / "namespaces" / f"{owner}.toml"
        if not path.is_file():
            return None
        try:
            text = json.dumps(tomllib.loads(path.read_text()))
        except tomllib.TOMLDecodeError as error:
            raise RegistryError(f"{path}: not TOML: {error}") from error
        return _parse(Namespace, text, str(path))

    def wheel_bytes(self, release: Release) -> bytes:
        """Return the wheel's bytes, unchecked; raises RegistryError when no address has them."""
        for url in release.wheel.urls:
            path = self._inside(url)
            if path is not None and path.is_file() and path.stat().st_size <= _MAX_WHEEL_BYTES:
                return path.read_bytes()
        raise RegistryError(
            f"wheel {release.wheel.filename} of {release.id} is at none of its addresses "
            f"({', '.join(release.wheel.urls)}) under {self.root}; update the registry"
        )

    def _inside(self, url: str) -> Path | None:
        """Return the file of a relative address; None for one that leaves the registry."""
        path = (self.root / url).resolve()
        return path if "://" not in url and path.is_relative_to(self.root.resolve()) else None

    def _read(self, name: str) -> str:
        return (self.root / name).read_text()

    def _check_client(self) -> None:
        ours = version("telescope-envs")
        if Version(ours) < Version(self.config.minimum_client):
            raise RegistryError(
                f"registry {self.root} needs telescope-envs >= {self.config.minimum_client}, "
                f"this is {ours}; upgrade telescope-envs"
            )


def _parse(record: type[RecordType], text: str, where: str) -> RecordType:
    try:
        return record.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "record"
        raise RegistryError(f"{where}: {field}: {first['msg']}; update the registry") from None
