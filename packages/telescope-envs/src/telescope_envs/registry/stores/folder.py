"""Reads and publishes to a registry in a folder; several writers at once are safe.

A writer holds the folder's lock and replaces whole files, so readers need no lock. Files that
belong only to this machine, the lock and partial files, are in `.telescope/`, which git ignores.
"""

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from telescope_core.base.collector import rare_collections
from telescope_core.base.errors import RegistryError
from telescope_envs.records.catalog import CatalogRow, ReadRow, catalog_row
from telescope_envs.records.files import (
    MAX_FILE_BYTES,
    locked,
    read_file,
    remove_file,
    replace_file,
)
from telescope_envs.records.reading import (
    Listing,
    Publication,
    artifact_files,
    folder_listing,
    is_registry_path,
    is_web_address,
    log_unreadable,
)
from telescope_envs.records.release import Status
from telescope_envs.rules.admission import changed_status, index_line, is_new

_LOCK_WAIT_S = 30.0


Download = Callable[[str, int, str], bytes | None]
"""Returns the bytes at an absolute address, up to a limit; None if there is nothing. They are kept
only if they have the sha256, unless that is empty."""


class LocalStore:
    """Reads and appends to the registry at `root`; waits up to `lock_wait_s` for other writers.

    Wheels that are elsewhere are read only with `download`.
    """

    def __init__(
        self, root: Path, *, lock_wait_s: float = _LOCK_WAIT_S, download: Download | None = None
    ) -> None:
        self.root = root
        self.address = str(root)
        self.revision = ""  # a folder has no commits
        self._lock_wait_s = lock_wait_s
        self._download = download

    def read(self, path: str) -> bytes | None:
        """Return the file at `path` below the root; None when there is none."""
        return self._read(path, max_bytes=MAX_FILE_BYTES)

    def artifact(self, url: str, *, max_bytes: int, sha256: str = "") -> bytes | None:
        """Return the artifact at `url`, below the root or elsewhere; None when there is none."""
        if self._download is not None and is_web_address(url):
            return self._download(url, max_bytes, sha256)
        return self._read(url, max_bytes=max_bytes)

    def listing(self) -> Listing:
        """Return the files below the root."""
        return folder_listing(self.root)

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, sorted by id; names the records that are skipped."""
        owners = _names(self.root / "index", is_folder=True)
        with rare_collections():  # they would take a tenth of the time
            found = [one for owner in owners for one in self._rows_of(owner)]
        log_unreadable([skipped for one in found for skipped in one.unreadable])
        return sorted((one.row for one in found if one.row), key=lambda row: row.id)

    def _rows_of(self, owner: str) -> Iterator[ReadRow]:
        """Yield the rows of an owner; opens only files that the folder listings contain."""
        root = str(self.root)
        stated = set(_names(self.root / "status" / owner))
        for file in _names(self.root / "index" / owner):
            name = file.removesuffix(".jsonl")
            if name == file:
                continue
            index = read_file(f"{root}/index/{owner}/{file}")
            status = f"{root}/status/{owner}/{name}.json"
            said = read_file(status) if f"{name}.json" in stated else None
            yield catalog_row(f"{owner}/{name}", index, said)

    def close(self) -> None:
        """Do nothing, because no file is held open."""

    def _read(self, path: str, *, max_bytes: int) -> bytes | None:
        found = self._inside(path)
        if found is None:
            return None
        try:
            return read_file(found, max_bytes=max_bytes)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise RegistryError(f"{found} cannot be read: {error.strerror}") from error

    def _inside(self, path: str) -> Path | None:
        """Return the file at a relative path; None if the path leads outside the registry."""
        if not is_registry_path(path):
            return None
        found = (self.root / path).resolve()
        return found if found.is_relative_to(self.root.resolve()) else None

    def publish(self, publication: Publication) -> bool:
        """Store the wheel, then the index line, so that no reader sees a line without its file."""
        release = publication.release
        with self._changing() as scratch:
            if not is_new(self.read, publication):
                return False
            written: list[Path] = []
            line = index_line(release)
            path = f"index/{release.id}.jsonl"
            try:
                # A file of that name belongs to no release, as `is_new` has checked: a killed
                # writer left it there, so it is replaced.
                for artifact, data in artifact_files(publication, self.address).items():
                    written.append(self.root / artifact)
                    replace_file(self.root / artifact, data, scratch=scratch)
                lines = (self.read(path) or b"") + line
                replace_file(self.root / path, lines, scratch=scratch)
            except BaseException:
                if not (self.read(path) or b"").endswith(line):
                    with suppress(OSError):
                        for file in written:
                            remove_file(file)
                raise
        return True

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status record of owner/name."""
        with self._changing() as scratch:
            status, data = changed_status(self.read, environment_id, change)
            path = self.root / "status" / f"{environment_id}.json"
            replace_file(path, data, scratch=scratch)
        return status

    @contextmanager
    def _changing(self) -> Generator[Path]:
        """Exclude other writers; yields an empty folder for partial files."""
        own = self.root / ".telescope"
        try:
            own.mkdir(exist_ok=True)
            if not (own / ".gitignore").exists():
                (own / ".gitignore").write_text("*\n")
            with locked(
                own / "lock",
                wait_s=self._lock_wait_s,
                what=f"registry {self.address} is being changed",
            ):
                scratch = own / "scratch"
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                yield scratch
        except OSError as error:
            raise RegistryError(
                f"registry {self.address} cannot be changed: {os.strerror(error.errno or 0)}"
                f"{f' ({error.filename})' if error.filename else ''}; nothing was changed"
            ) from error


def _names(folder: Path, *, is_folder: bool = False) -> list[str]:
    """Return the sorted names of the files or folders in `folder`, except links and hidden ones."""
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
