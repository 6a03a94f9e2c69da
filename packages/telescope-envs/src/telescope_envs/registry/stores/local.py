"""Reads and publishes to a registry in a folder; several writers at once are safe.

A writer holds the folder's lock and replaces whole files, so readers need no lock. Files that
belong only to this machine, the lock and partial files, are in `.telescope/`, which git ignores.
"""

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from telescope_core.errors import RegistryError
from telescope_envs.records.files import (
    locked,
    remove_file,
    replace_file,
)
from telescope_envs.records.publication import (
    Publication,
    artifact_files,
)
from telescope_envs.records.reading import FULL_READERS
from telescope_envs.records.release import Status
from telescope_envs.registry.stores.folder import Folder
from telescope_envs.rules.admission import (
    changed_status,
    index_line,
    is_new,
)

_LOCK_WAIT_S = 30.0


class LocalStore(Folder):
    """Reads and appends to the registry at `root`; waits up to `lock_wait_s` for other writers."""

    def __init__(self, root: Path, *, lock_wait_s: float = _LOCK_WAIT_S) -> None:
        super().__init__(root, full=FULL_READERS)
        self._lock_wait_s = lock_wait_s

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
        """Yield the path and bytes of each artifact to store.

        If a file with that name exists, it belongs to no release, as `is_new` has checked. A killed
        writer left it there, so it is replaced.
        """
        for path, data in artifact_files(publication, self.address).items():
            yield self.root / path, data

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
