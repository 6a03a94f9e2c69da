"""Reads a registry in a folder; it needs no lock, because writers replace whole files."""

import os
from collections.abc import Iterator
from pathlib import Path

from telescope_core.errors import RegistryError
from telescope_envs.records.catalog import (
    CatalogRow,
    FullReaders,
    ReadRow,
    catalog_row,
    log_unreadable,
)
from telescope_envs.records.publication import is_registry_path

_CHUNK_BYTES = 64 * 1024


class Folder:
    """Reads the registry at `root`; without `full` readers, odd records raise NotQuickError."""

    def __init__(self, root: Path, *, full: FullReaders | None = None) -> None:
        self.root = root
        self._full = full

    @property
    def address(self) -> str:
        """The folder."""
        return str(self.root)

    @property
    def revision(self) -> str:
        """Empty, because a folder has no commits."""
        return ""

    def read(self, path: str) -> bytes | None:
        """Return the file at `path` below the root; None when there is none."""
        return self._read(path, max_bytes=None)

    def artifact(self, url: str, *, max_bytes: int) -> bytes | None:
        """Return the artifact at the relative `url`; None when it is not below the root."""
        return self._read(url, max_bytes=max_bytes)

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, sorted by id; names the records that are skipped."""
        owners = _names(self.root / "index", is_folder=True)
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
            index = _bytes_of(f"{root}/index/{owner}/{file}")
            status = f"{root}/status/{owner}/{name}.json"
            said = _bytes_of(status) if f"{name}.json" in stated else None
            yield catalog_row(f"{owner}/{name}", index, said, full=self._full)

    def close(self) -> None:
        """Do nothing, because no file is held open."""

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
            raise RegistryError(f"{found}: longer than {max_bytes} bytes, the limit for a wheel")
        return data

    def _inside(self, path: str) -> Path | None:
        """Return the file at a relative path; None if the path leads outside the registry."""
        if not is_registry_path(path):
            return None
        found = (self.root / path).resolve()
        return found if found.is_relative_to(self.root.resolve()) else None


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


def _bytes_of(path: str) -> bytes:
    """Return a whole file; takes half the time of `open`, which matters for thousands of files."""
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
