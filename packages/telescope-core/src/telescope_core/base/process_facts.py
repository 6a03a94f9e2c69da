"""Facts about a running process that its system tells, and its limit of addresses."""

import resource
import sys
from pathlib import Path


def resident_bytes(of: str = "self") -> int:
    """Return the resident memory of a process; without /proc, the peak of this one."""
    statm = Path(f"/proc/{of}/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def limit_addresses(most_bytes: int, hard: int) -> None:
    """Let this process have `most_bytes` of addresses; `hard` is the limit that it could raise.

    macOS refuses such a limit, since a process has more from its start. There it has none.
    """
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, hard))


def process_started(pid: int) -> str:
    """Return the start time of a process, in clock ticks since boot; empty = not known.

    It tells processes that had the same pid apart.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    # The command name, in parentheses, may contain spaces; the start time is field 22 of the line.
    return text.rpartition(")")[2].split()[19]
