"""`Watchdog`: ends process groups when this process has died, even by kill -9."""

import os
import subprocess
from collections.abc import Iterable
from contextlib import suppress


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
