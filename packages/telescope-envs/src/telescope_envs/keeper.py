"""The keeper of a probe: a process whose only job is to end everything that the probe started.

Daemons leave the process group of the probe, and its session. On Linux they become children of the
keeper when their own parents end, so it finds them. Elsewhere only the group is ended. Imports
nothing but the standard library, so that the keeper is small and ready at once.
"""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl


def go_on_in_kept_child(guard_fd: int) -> int:
    """Fork, and return only in the child, which leads its own session; returns the keeper's id.

    This process stays as the keeper. It ends the child and all that the child started when the
    child ends, or when the pipe behind `guard_fd` closes, which it also does if the validating
    process dies. Then it exits with the child's exit code (128 + n for signal n).
    """
    keeper = os.getpid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    woken_fd, wake_fd = os.pipe()
    handlers = _wake_when_children_end(wake_fd)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for descriptor in (guard_fd, woken_fd, wake_fd):
            os.close(descriptor)
        return keeper
    ended: dict[int, int] = {}
    while child not in ended:
        ready, _, _ = select.select([guard_fd, woken_fd], [], [])
        ended |= _reaped()
        if guard_fd in ready:
            break
        os.read(woken_fd, 4096)
    if child not in ended:
        os.kill(child, signal.SIGKILL)
    ended |= _end_all(child)
    code = os.waitstatus_to_exitcode(ended[child])
    os._exit(code if code >= 0 else 128 - code)


def _wake_when_children_end(wake_fd: int) -> dict[int, Any]:
    """Write to `wake_fd` when a child has ended, and ignore what would end this process.

    Returns the handlers of signals as they were before.
    """
    os.set_blocking(wake_fd, False)
    signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    handlers: dict[int, Any] = {
        signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda number, frame: None)
    }
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        handlers[number] = signal.signal(number, signal.SIG_IGN)
    return handlers


def _end_all(child: int) -> dict[int, int]:
    """Kill the group of `child` and every child, until there is none; returns how they ended.

    What a killed process had started becomes a child in its turn.
    """
    ended: dict[int, int] = {}
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for pid in _children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pid, status = os.waitpid(-1, 0)
            ended[pid] = status
    return ended


def _children() -> Iterator[int]:
    """Yield the ids of this process's children; of none where there is no /proc."""
    own = os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name of the program may contain anything, and ends at the last parenthesis.
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == own:
                yield int(folder.name)


def _reaped() -> dict[int, int]:
    """Return how the children ended that have ended, by id."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended
