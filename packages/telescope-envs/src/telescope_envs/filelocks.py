"""Locks between processes, which the system releases when their owner ends, even by kill -9.

A lock whose descriptor child processes inherited is held until they have ended as well.
"""

import fcntl
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from telescope_core.errors import TelescopeError

_POLL_S = 0.05
WAIT_LIMIT_S = 1800.0


@contextmanager
def locked(
    path: Path, *, what: str, progress: Callable[[str], None] = lambda step: None
) -> Generator[int]:
    """Hold the lock on `path`, a file to create or an existing folder; yields its descriptor.

    Raises TelescopeError after half an hour. `what` tells waiting users what is being done.
    """
    descriptor = _opened(path)
    try:
        give_up_s = time.monotonic() + WAIT_LIMIT_S
        has_told = False
        while not _try(descriptor):
            if not has_told:
                progress(f"waiting for another process: {what}")
                has_told = True
            if time.monotonic() > give_up_s:
                raise TelescopeError(
                    f"another process still holds {path} after {WAIT_LIMIT_S:g} s ({what}); "
                    "wait for it or end it, then try again"
                )
            time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked_if_free(path: Path) -> Generator[bool]:
    """Hold the lock on `path` if nobody else does; yields whether it is held."""
    descriptor = _opened(path)
    try:
        yield _try(descriptor)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY)
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
