"""Do the duties of process 1 in a container, so that no `tini` has to be started before it.

The kernel makes process 1 the parent of orphaned processes, which stay as zombies until it waits
for them, and sends it no signal that it has no handler for. When it ends, all others are killed.
"""

import os
import signal
from typing import NoReturn

_SENT_ON = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH),
)
_SI_KERNEL = 0x80
"""`si_code` of a signal from the terminal, which every process of its group receives."""


def go_on_below_first() -> None:
    """If this is process 1 of a container or machine, fork and return in the child.

    This process then waits for all of its children, forwards signals, and ends with the exit code
    of that child. Call it before threads are started.
    """
    if os.getpid() == 1:
        go_on_in_child()


def go_on_in_child() -> None:
    """Fork and return in the child, while this process does the duties of process 1."""
    # Blocked, they wait here, also those that would be ignored.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_SENT_ON, signal.SIGCHLD))
    child = os.fork()
    if child:
        _stand_before(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stand_before(child: int) -> NoReturn:
    while True:
        told = signal.sigwaitinfo((*_SENT_ON, signal.SIGCHLD))
        if told.si_signo != signal.SIGCHLD:
            # At the end of a terminal only the leader of its session is told.
            if told.si_code != _SI_KERNEL or told.si_signo == signal.SIGHUP:
                os.kill(child, told.si_signo)
            continue
        # One signal may tell of several.
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                os._exit(code if code >= 0 else 128 - code)
