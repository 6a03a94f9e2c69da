"""Stores artifacts as files named by their SHA-256, with atomic and durable writes.

The name is the hash of the bytes, so a file is never written twice and never changed.
"""

import hashlib
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from telescope_envs.registry.stores.files import replace_file


class ArtifactFiles:
    """The files below `data/artifacts`; `data/incoming` holds files that are being written."""

    def __init__(self, data: Path) -> None:
        self.root = data / "artifacts"
        self.incoming = data / "incoming"
        self.root.mkdir(parents=True, exist_ok=True)
        self.incoming.mkdir(exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Return the path where the bytes with that hash are stored or would be stored."""
        return self.root / sha256[:2] / sha256

    def put(self, data: bytes) -> Path | None:
        """Store `data` durably; returns the new file, or None if it was stored before."""
        target = self.path(hashlib.sha256(data).hexdigest())
        if target.exists():
            return None
        replace_file(target, data, scratch=self.incoming)
        return target

    @contextmanager
    def stored(self, contents: Iterable[bytes]) -> Generator[None]:
        """Store `contents`; on any error here or in the block, remove those that are new."""
        written: list[Path] = []
        try:
            for data in contents:
                path = self.put(data)
                written += [path] if path is not None else []
            yield
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise

    def clear_incoming(self) -> None:
        """Remove partial files of a killed server; the caller must hold the lock."""
        shutil.rmtree(self.incoming)
        self.incoming.mkdir()
