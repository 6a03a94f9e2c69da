"""`LocalStore`: a registry that is a directory, safe for several writers at once.

A writer holds the lock of the directory and replaces files whole, so readers need no lock. What
is of this machine alone, the lock and half-written files, is in `.telescope/`, which git ignores.
"""

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from telescope_core.errors import RegistryError
from telescope_envs.registry.admission import changed_status, index_line, is_new
from telescope_envs.registry.catalog import CatalogRow, catalog_row
from telescope_envs.registry.records import Status
from telescope_envs.registry.store import Publication, artifact_files, is_registry_path
from telescope_envs.registry.stores.files import locked, remove_file, replace_file

_LOCK_WAIT_S = 30.0
_CHUNK_BYTES = 64 * 1024


class LocalStore:
    """Reads and appends to the registry at `root`; a writer waits `lock_wait_s` for others."""

    def __init__(self, root: Path, *, lock_wait_s: float = _LOCK_WAIT_S) -> None:
        self.root = root
        self._lock_wait_s = lock_wait_s

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
        return self._read(path, max_bytes=None)

    def artifact(self, url: str, *, max_bytes: int) -> bytes | None:
        """Return the artefact at the relative `url`; None when it is not below the root."""
        return self._read(url, max_bytes=max_bytes)

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, by id."""
        owners = _names(self.root / "index", is_folder=True)
        rows = [row for owner in owners for row in self._rows_of(owner)]
        return sorted(rows, key=lambda row: row.id)

    def _rows_of(self, owner: str) -> Iterator[CatalogRow]:
        """Yield the rows of an owner; a file is opened only where the listing has it."""
        root = str(self.root)
        stated = set(_names(self.root / "status" / owner))
        for file in _names(self.root / "index" / owner):
            name = file.removesuffix(".jsonl")
            if name == file:
                continue
            index = _bytes_of(f"{root}/index/{owner}/{file}")
            status = f"{root}/status/{owner}/{name}.json"
            found = catalog_row(
                f"{owner}/{name}", index, _bytes_of(status) if f"{name}.json" in stated else None
            )
            if found is not None:
                yield found

    def close(self) -> None:
        """Nothing is held open."""

    def publish(self, publication: Publication) -> bool:
        """Store the wheel, then the index line: no reader sees a line without its file."""
        release = publication.release
        with self._changing() as scratch:
            if not is_new(self.read, publication):
                return False
            written: list[Path] = []
            line = index_line(release)
            path = f"index/{release.id}.jsonl"
            try:
                for artifact, data in self._artifacts(publication):
                    written.append(artifact)
                    replace_file(artifact, data, scratch=scratch)
                lines = (self.read(path) or b"") + line
                replace_file(self.root / path, lines, scratch=scratch)
            except BaseException:
                if not (self.read(path) or b"").endswith(line):
                    self._withdraw(written)
                raise
        return True

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status record of owner/name."""
        with self._changing() as scratch:
            status, data = changed_status(self.read, environment_id, change)
            path = self.root / "status" / f"{environment_id}.json"
            replace_file(path, data, scratch=scratch)
        return status

    def _withdraw(self, written: list[Path]) -> None:
        with suppress(OSError):
            for artifact in written:
                remove_file(artifact)

    def _artifacts(self, publication: Publication) -> Iterator[tuple[Path, bytes]]:
        """Yield the files to store, by path.

        A file of that name that is there already belongs to no release, as `is_new` has found: a
        writer that was killed left it, so it is replaced.
        """
        for path, data in artifact_files(publication, self.address).items():
            yield self.root / path, data

    @contextmanager
    def _changing(self) -> Generator[Path]:
        """Keep other writers out; yields an empty folder for half-written files."""
        own = self.root / ".telescope"
        try:
            own.mkdir(exist_ok=True)
            if not (own / ".gitignore").exists():
                (own / ".gitignore").write_text("*\n")
            with locked(own / "lock", wait_s=self._lock_wait_s, what=f"registry {self.address}"):
                scratch = own / "scratch"
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                yield scratch
        except OSError as error:
            raise RegistryError(
                f"registry {self.address} cannot be changed: {os.strerror(error.errno or 0)}"
                f"{f' ({error.filename})' if error.filename else ''}; nothing was changed"
            ) from error

    def _read(self, path: str, *, max_bytes: int | None) -> bytes | None:
        found = self._inside(path)
        if found is None:
            return None
        try:
            with found.open("rb") as file:
                data = file.read(-1 if max_bytes is None else max_bytes + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise RegistryError(f"{found} cannot be read: {reason}") from error
        if max_bytes is not None and len(data) > max_bytes:
            raise RegistryError(f"{found}: longer than {max_bytes} bytes, the most a wheel may be")
        return data

    def _inside(self, path: str) -> Path | None:
        """Return the file of a relative address; None for one that leaves the registry."""
        if not is_registry_path(path):
            return None
        found = (self.root / path).resolve()
        return found if found.is_relative_to(self.root.resolve()) else None


def _names(folder: Path, *, is_folder: bool = False) -> list[str]:
    """Return the names of the files, or the folders, in `folder`, sorted; no links, no hidden."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".")
                and (entry.is_dir if is_folder else entry.is_file)(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def _bytes_of(path: str) -> bytes:
    """Return a whole file; half the time of `open`, which counts for thousands of small ones."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _CHUNK_BYTES)
        if len(data) < _CHUNK_BYTES:
            return data
        chunks = [data]
        while chunks[-1]:
            chunks.append(os.read(descriptor, _CHUNK_BYTES))
        return b"".join(chunks)
    finally:
        os.close(descriptor)
