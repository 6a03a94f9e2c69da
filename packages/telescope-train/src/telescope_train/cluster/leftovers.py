"""Nothing is left of a process that is killed: neither its temporary files nor what it started."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

OWNER_FILE = "owner"
"""File in the folder that its process keeps locked while it lives."""


class ScratchFolder:
    """A new temporary folder that only this user can enter, deleted even if its process is killed.

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


class Watchdog:
    """A process that kills process groups once this process has died.

    It waits for a line on a pipe. Only this process holds the other end, which the operating system
    closes even after SIGKILL; the watchdog then reads no line, and kills.
    """

    def __init__(self, groups: Iterable[int]) -> None:
        """Start it for `groups`, each the id of its first process."""
        # Python's pipes are not inherited by children. A child with a copy of the write end would
        # keep the pipe open after this process has died.
        read_end, self._write_end = os.pipe()
        # It is started in the background by a shell that ends at once, so it is not a child of this
        # process: Ray kills the children of a worker that dies. In a background job the shell
        # replaces descriptor 0 with /dev/null, so the pipe is kept as descriptor 3. The groups are
        # killed one by one, as a group that is gone would keep the others alive. A signal for all
        # processes of a job, as systemd sends, is for this process to answer.
        kills = "".join(f"kill -KILL -{group}; " for group in groups)
        script = f"trap '' TERM HUP INT; exec 3<&0; (read -r line <&3 || {{ :; {kills}}}) &"
        subprocess.run(
            ["sh", "-c", script],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        os.close(read_end)

    def end(self) -> None:
        """End it without killing a group, whose number may be reused by now."""
        # Somebody may have killed it.
        with suppress(BrokenPipeError):
            os.write(self._write_end, b"closed\n")
        os.close(self._write_end)
