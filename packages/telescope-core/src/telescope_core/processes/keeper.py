"""The keeper of a worker: a process that does nothing but end the worker's process group.

A host starts the keeper, which forks the worker. Environment code may start programs of its own;
they share the worker's group and are ended with it, however it or the host came to its end.
"""

import os
import select
import signal
from contextlib import suppress

_MAX_DESCRIPTORS = 4096


def go_on_in_kept_child(guard_fd: int) -> None:
    """Return in a child that leads a group of its own; this process stays behind as its keeper.

    When the host goes away, kill -9 included, the pipe behind `guard_fd` closes; when the child
    ends, so does a pipe of its own. Either way the keeper ends the group, and then itself with
    the child's exit code (128 + n for signal n).
    """
    # Nobody writes: the child holds the other end for as long as it lives.
    alive_read, _alive_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(guard_fd)
        os.close(alive_read)
        return
    with suppress(OSError):  # the child was first
        os.setpgid(child, child)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Among them is the connection: the host must see it close when the child ends.
    for descriptor in range(3, _MAX_DESCRIPTORS):
        if descriptor not in (guard_fd, alive_read):
            with suppress(OSError):
                os.close(descriptor)
    select.select([guard_fd, alive_read], [], [])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
