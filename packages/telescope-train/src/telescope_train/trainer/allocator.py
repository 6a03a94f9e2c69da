"""Settings of the C library's allocator for processes that compute on the CPU."""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
# mallopt takes an int, so this is the largest threshold there is.
_KEPT_BYTES = 2**31 - 1
_GROWTH_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """Keep freed memory in this process instead of giving it back to the system.

    glibc returns each large block at once and asks for it again, so a training step on the CPU
    spends a fifth of its time in page faults. Does nothing if the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for option, value in (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
    ):
        mallopt(option, value)
