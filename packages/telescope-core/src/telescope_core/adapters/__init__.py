"""Two old import paths of telescope-adapters, kept for code that still imports them.

They are there for code that was written then. Nothing else of the adapters is in core.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from telescope_core.base.errors import EnvironmentLoadError


def moved_to(module: str) -> Any:
    """Return `module` of telescope-adapters; raises EnvironmentLoadError where that is missing."""
    if find_spec("telescope_adapters") is None:
        raise EnvironmentLoadError(
            f"{module} is in the package telescope-adapters, which is not installed in this "
            "Python; run: pip install telescope-adapters"
        )
    return import_module(module)
