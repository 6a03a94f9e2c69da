"""Import the names of a package when they are first used.

A command that only reads a registry, or only reports an error, need not import environments.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module


def lazy_names(
    package: str, exported: Sequence[str], homes: Sequence[str]
) -> Callable[[str], object]:
    """Return a `__getattr__` for `package` that imports each `exported` name when it is used.

    `homes` are modules of the package. They are searched in order, so list the modules that are
    quickest to import first.
    """

    def find(name: str) -> object:
        for home in homes if name in exported else ():
            found = vars(import_module(f"{package}.{home}"))
            if name in found:
                setattr(sys.modules[package], name, found[name])
                return found[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
