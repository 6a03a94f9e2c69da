"""`LocalStore`: a registry that is a directory."""

from collections.abc import Callable
from pathlib import Path

from telescope_core.errors import RegistryError
from telescope_envs.registry.catalog import CatalogRow
from telescope_envs.registry.records import Release, Status
from telescope_envs.registry.store import Publication


class LocalStore:
    """Reads and appends to the registry at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def address(self) -> str:
        """The folder."""
        return str(self.root)

    @property
    def revision(self) -> str:
        """Empty: a folder is what it is now."""
        return ""

    def read(self, path: str) -> bytes | None:
        """Return the file at `path` below the root; None when there is none."""
        found = self._inside(path)
        return found.read_bytes() if found is not None and found.is_file() else None

    def artifact(self, url: str, *, max_bytes: int) -> bytes | None:
        """Return the artefact at the relative `url`; None when it is not below the root."""
        found = self._inside(url)
        if found is None or not found.is_file():
            return None
        if found.stat().st_size > max_bytes:
            raise RegistryError(f"{found}: longer than {max_bytes} bytes, the most a wheel may be")
        return found.read_bytes()

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, by id."""
        rows: list[CatalogRow] = []
        for file in (self.root / "index").glob("*/*.jsonl"):
            environment_id = f"{file.parent.name}/{file.stem}"
            lines = [line for line in file.read_text().splitlines() if line]
            if not lines:
                continue
            release = Release.model_validate_json(lines[-1])
            status = self._status(environment_id)
            rows.append(
                CatalogRow(
                    id=environment_id,
                    version=release.version,
                    summary=release.summary,
                    tags=release.tags,
                    license=release.license,
                    published_at=release.published_at.isoformat(),
                    verdict=release.validation.verdict,
                    deprecated=status.deprecated.reason if status.deprecated else "",
                    num_releases=len(lines),
                )
            )
        return sorted(rows, key=lambda row: row.id)

    def close(self) -> None:
        """Nothing is held open."""

    def publish(self, publication: Publication) -> bool:
        """Store the wheel first, then the index line: no reader sees a line without its file."""
        release = publication.release
        artifact = self.root / release.wheel.urls[0]
        artifact.parent.mkdir(parents=True, exist_ok=True)
        artifact.write_bytes(publication.wheel)
        index = self.root / "index" / f"{release.id}.jsonl"
        index.parent.mkdir(parents=True, exist_ok=True)
        with index.open("a") as lines:
            lines.write(f"{release.model_dump_json(by_alias=True)}\n")
        if self.read(f"status/{release.id}.json") is None:
            self.change_status(release.id, lambda status: status)
        return True

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status record of owner/name."""
        status = change(self._status(environment_id))
        path = self.root / "status" / f"{environment_id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{status.model_dump_json(by_alias=True, indent=2)}\n")
        return status

    def _status(self, environment_id: str) -> Status:
        found = self.read(f"status/{environment_id}.json")
        return Status.model_validate_json(found) if found is not None else Status()

    def _inside(self, url: str) -> Path | None:
        """Return the file of a relative address; None for one that leaves the registry."""
        path = (self.root / url).resolve()
        return path if "://" not in url and path.is_relative_to(self.root.resolve()) else None
