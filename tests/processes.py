"""What tests start as programs of their own, and ask of processes that may end at any moment."""

import subprocess
from contextlib import suppress

import psutil


class Program(subprocess.Popen[str]):
    """A process that is killed where its `with` block fails: the failure waits for its end."""

    def __exit__(self, kind, error, traceback) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, traceback)


def command_of(process: psutil.Process) -> list[str]:
    """Return the words of its command line; a process that has just ended has none."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def listening_hosts(process: psutil.Process) -> set[str]:
    """Return the addresses that it listens on; a process that has just ended has none."""
    with suppress(psutil.NoSuchProcess):
        return {
            one.laddr.ip.removeprefix("::ffff:")
            for one in process.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        }
    return set()
