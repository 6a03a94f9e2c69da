"""Artefacts as files named by their SHA-256: written aside, flushed, renamed into place.

A name stands for its bytes, so a file is never written twice and never changed.
"""

import hashlib
import shutil
from pathlib import Path

from telescope_envs.registry.stores.files import replace_file


class ArtifactFiles:
    """The files below `data/artifacts`; `data/incoming` holds what is being written."""

    def __init__(self, data: Path) -> None:
        self.root = data / "artifacts"
        self.incoming = data / "incoming"
        self.root.mkdir(parents=True, exist_ok=True)
        self.incoming.mkdir(exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Return where the bytes with that hash are, or would be."""
        return self.root / sha256[:2] / sha256

    def put(self, data: bytes) -> Path | None:
        """Store `data` durably unless it is there; returns the new file, None for an old one."""
        target = self.path(hashlib.sha256(data).hexdigest())
        if target.exists():
            return None
        replace_file(target, data, scratch=self.incoming)
        return target

    def clear_incoming(self) -> None:
        """Remove what a server that was killed was writing; only for whoever holds the lock."""
        shutil.rmtree(self.incoming)
        self.incoming.mkdir()
