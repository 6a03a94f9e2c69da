"""The entry points of installed packages, read once for each state of the import path.

The standard library reads the metadata of every installed package for each question, which takes 20
ms where there are some hundred, and the settings of one run ask several times.
"""

import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib import metadata


def entry_points(*, group: str, name: str | None = None) -> metadata.EntryPoints:
    """Return the entry points of `group`, or those named `name`, as the standard library does.

    They are read again once the import path, or what is in a folder of it, has changed: so a
    package that is installed or removed meanwhile counts.
    """
    folders: list[tuple[str, int]] = []
    for place in sys.path:
        with suppress(OSError):
            path = os.path.abspath(place)  # fails where the working directory is gone
            folders.append((path, os.stat(path).st_mtime_ns))
    found = _read(group, tuple(folders))
    return found if name is None else found.select(name=name)


@lru_cache(maxsize=64)
def _read(group: str, folders: tuple[tuple[str, int], ...]) -> metadata.EntryPoints:
    # `folders` is the state of the import path for which the answer holds.
    return metadata.entry_points(group=group)
