"""The keeper of a worker: a process whose only job is to end the worker's process group.

A host starts the keeper, which forks the worker. Programs that environment code starts share the
worker's process group. They end together with the worker, however the worker or the host ends.
"""

import os
import select
import signal
from contextlib import suppress

_MAX_DESCRIPTORS = 4096


def go_on_in_kept_child(guard_fd: int) -> None:
    """Fork, and return only in the child, which leads its own process group.

    This process stays as the keeper of the child. When the host ends, even by kill -9, the pipe
    behind `guard_fd` closes. When the child ends, another pipe closes. In both cases the keeper
    ends the process group, and then exits with the child's exit code (128 + n for signal n).
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
    # These include the connection to the host, which must close when the child ends.
    for descriptor in range(3, _MAX_DESCRIPTORS):
        if descriptor not in (guard_fd, alive_read):
            with suppress(OSError):
                os.close(descriptor)
    select.select([guard_fd, alive_read], [], [])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
