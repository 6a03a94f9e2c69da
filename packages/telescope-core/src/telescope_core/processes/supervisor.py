"""The supervisor of a worker: ends the worker's process group, and reports when it cannot.

A host starts the supervisor, which forks the worker. Programs that environment code starts share
the worker's process group, and end with it. When a worker hangs, the host decides (`pool`).

Code that holds the interpreter stops every thread of the worker, the one that sends beats included.
The supervisor sees it in the memory that both share, sends the beats, and names the code. When
code has ended the worker, the supervisor's last beat says which.
"""

import os
import select
import signal
from contextlib import suppress

from telescope_core.base.process_facts import resident_bytes
from telescope_core.environments.held import Noted, Watched
from telescope_core.environments.running import Notes
from telescope_core.processes.frames import Beat, to_bytes
from telescope_core.processes.watch import BEAT_EVERY_S

_MAX_DESCRIPTORS = 4096
_HELD_AFTER_S = 2.0
"""Seconds without a sign of the interpreter after which it counts as blocked."""


def go_on_in_kept_child(guard_fd: int, socket_fd: int, notes: Notes) -> None:
    """Fork, and return only in the child, which leads its own process group.

    This process stays as the supervisor of the child. When the host ends, even by kill -9, the pipe
    behind `guard_fd` closes. When the child ends, another pipe closes. In both cases the supervisor
    ends the process group, and then exits with the child's exit code (128 + n for signal n).
    `socket_fd` leads to the host, and the child writes to `notes`.
    """
    # Nothing is written to this pipe: it closes when the child, which holds the other end, ends.
    alive_read, _alive_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(guard_fd)
        os.close(alive_read)
        return
    with suppress(OSError):  # the child has already done it
        os.setpgid(child, child)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The other end of the pipe to the child is among them.
    for descriptor in range(3, _MAX_DESCRIPTORS):
        if descriptor not in (guard_fd, alive_read, socket_fd):
            with suppress(OSError):
                os.close(descriptor)
    watched = Watched(notes.memory, child)
    while not select.select([guard_fd, alive_read], [], [], BEAT_EVERY_S)[0]:
        held_s = watched.still_s()
        if held_s > _HELD_AFTER_S:
            _say(socket_fd, child, watched.holder(), held_s=held_s)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    culprit = watched.ended_by(code)
    if culprit is not None:
        _say(socket_fd, child, culprit, ended_by=culprit.call)
    os._exit(code if code >= 0 else 128 - code)


def _say(
    socket_fd: int, child: int, code: Noted | None, *, held_s: float = 0.0, ended_by: int = -1
) -> None:
    """Send the host a beat in place of the worker, which sends none while it is blocked."""
    beat = Beat(
        lag_s=held_s,
        blocked_s=held_s,
        blocked_call=-1 if code is None else code.call,
        blocked_where="" if code is None else code.text,
        memory_bytes=resident_bytes(str(child)) if held_s else 0,
        is_held=held_s > 0,
        ended_by=ended_by,
    )
    with suppress(OSError):  # the host is gone, or does not read: it will find out by itself
        os.write(socket_fd, to_bytes(beat))
