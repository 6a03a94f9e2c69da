"""Names of a package that are imported when they are first asked for.

A command that only reads a registry, or only reports an error, does not wait for environments.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module


def lazy_names(
    package: str, exported: Sequence[str], homes: Sequence[str]
) -> Callable[[str], object]:
    """Return the `__getattr__` of `package`: each name in `exported` is in one of its `homes`.

    Homes are modules of the package, looked into in that order: the quickest to import first.
    """

    def find(name: str) -> object:
        for home in homes if name in exported else ():
            found = vars(import_module(f"{package}.{home}"))
            if name in found:
                setattr(sys.modules[package], name, found[name])
                return found[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
