"""What tests ask of processes that may end at any moment."""

from contextlib import suppress

import psutil


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
