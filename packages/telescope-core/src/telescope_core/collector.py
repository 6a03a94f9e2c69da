"""Python's cycle collector, told to come less often while thousands of rollouts are in flight.

It runs after every 700 new objects and looks at all young ones, which here are nearly all in use:
at 1,024 concurrent rollouts that is a third of the time. What is not part of a cycle is freed at
once with or without it.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

_RARE = (50_000, 20, 10)
"""Objects before a collection of the youngest, and such collections before those of older ones."""


@contextmanager
def rare_collections() -> Generator[None, None, None]:
    """Collect rarely inside; a process that set thresholds above these of its own keeps them."""
    before = gc.get_threshold()
    if not 0 < before[0] < _RARE[0]:
        yield
        return
    gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
