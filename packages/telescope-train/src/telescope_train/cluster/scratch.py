"""`ScratchFolder`: a temporary folder that is deleted even if its process is killed."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

OWNER_FILE = "owner"
"""File in the folder that its process keeps locked while it lives."""


class ScratchFolder:
    """A new temporary folder that only this user can enter.

    Sockets are made in it, whose paths may have 107 bytes.
    """

    def __init__(self, prefix: str, *, max_parent_bytes: int) -> None:
        """Create it, and delete folders with `prefix` whose processes were killed.

        `max_parent_bytes`: it is in `/tmp` where the path of the temporary files is longer.
        """
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > max_parent_bytes:
            parent = "/tmp"
        _delete_abandoned(Path(parent), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unnamed = self.path / "new"
        self._lock = unnamed.open("xb")
        # Where there are no locks, nobody gets this one either, and nothing is deleted.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now: others take a folder with this file and without a lock for abandoned.
        unnamed.rename(self.path / OWNER_FILE)

    def remove(self) -> None:
        """Delete it as far as possible. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def leave(self) -> None:
        """Keep it, for a person who will read its content."""
        (self.path / OWNER_FILE).unlink(missing_ok=True)
        self._lock.close()


def _delete_abandoned(parent: Path, prefix: str) -> None:
    for path in parent.glob(f"{prefix}*/{OWNER_FILE}"):
        # It may be that of another user, or of a process that lives.
        with suppress(OSError), path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
