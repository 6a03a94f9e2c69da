"""Times of what a process records: Unix time that does not jump when the machine's clock is set.

All records of a process agree, since the machine's clock is read once, when this is imported. Event
loops have the same clock as `time.monotonic`, except in simulations.
"""

import time

_OFFSET_S = time.time() - time.monotonic()


def now_s() -> float:
    """Return the time, seconds since 1970, UTC."""
    return at(time.monotonic())


def at(monotonic_s: float) -> float:
    """Return the time at which `time.monotonic` was `monotonic_s`."""
    return _OFFSET_S + monotonic_s
