"""The supervisor of a program: a process that only ends everything that the program started.

It is run as a file: `python -I -S supervisor.py GUARD COMMAND...`. Daemons leave the process group
of the program, and its session. On Linux they become children of the supervisor when their own
parents end, so it finds them. Elsewhere only the group is ended. Imports nothing but the standard
library, so that the supervisor is small and ready at once.
"""

import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


def main(guard_fd: int, command: Sequence[str]) -> None:
    """Run `command` in a kept child."""
    go_on_in_kept_child(guard_fd)
    # Python ignores these, and a program would go on to ignore them.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], [*command])
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def go_on_in_kept_child(guard_fd: int) -> None:
    """Fork, and return only in the child, which leads its own session and ends with the supervisor.

    This process stays as the supervisor. It ends the child and all processes that the child started
    when the child ends, or when the pipe behind `guard_fd` closes, which also happens if the
    process at its other end dies. Then it ends as the child did, with its exit code or by its
    signal.
    """
    supervisor = os.getpid()
    keeps_children = sys.platform == "linux"
    if keeps_children:
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    woken_fd, wake_fd = os.pipe()
    handlers = _wake_when_children_end(wake_fd)
    child = os.fork()
    if child == 0:
        os.setsid()
        if keeps_children:
            ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != supervisor:  # it has ended already
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for descriptor in (guard_fd, woken_fd, wake_fd):
            os.close(descriptor)
        return
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
    _end_as(os.waitstatus_to_exitcode(ended[child]))


def _end_as(code: int) -> None:
    """End this process with exit code `code`, or by the signal that it means."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has written its own
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _wake_when_children_end(wake_fd: int) -> dict[int, Any]:
    """Write to `wake_fd` when a child has ended, and ignore signals that would end this process.

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

    The processes that a killed process had started become children of the supervisor.
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
    """Yield the ids of this process's children; none if there is no /proc."""
    own = os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name of the program may contain anything, and ends at the last parenthesis.
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == own:
                yield int(folder.name)


def _reaped() -> dict[int, int]:
    """Return the wait statuses of the children that have ended, by id."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
