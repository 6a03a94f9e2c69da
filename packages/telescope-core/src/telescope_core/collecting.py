"""Keeps Python's collector of cycles from looking where there are none."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Generator[None]:
    """Make many objects that live on, such as modules or records, without searches for cycles.

    Python would look at all of them again and again while their number grows.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
