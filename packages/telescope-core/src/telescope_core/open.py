"""From an environment's name to an `EnvironmentClient`: ask the locators, load, wrap.

Names: an installed id (`math-reasoning`, `owner/name`, with optional `@version`), or
`module:Class` for code that is importable as it is.
"""

import importlib
from importlib.metadata import entry_points
from typing import Any

from telescope_core.environments.base import Environment
from telescope_core.errors import EnvironmentLoadError, UnknownNameError, unknown_name
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import EnvironmentClient, EnvironmentLocation, EnvironmentLocator


def locators() -> list[EnvironmentLocator]:
    """Return every installed locator."""
    points = sorted(entry_points(group="telescope.environment_locators"), key=lambda p: p.name)
    return [point.load()() for point in points]


def locate_environment(name: str) -> EnvironmentLocation:
    """Return where `name` is; raises UnknownNameError with the command that would install it."""
    if ":" in name and "/" not in name:
        return EnvironmentLocation(id=name, version="0", factory=name, interpreter="")
    known: list[str] = []
    hints: list[str] = []
    for locator in locators():
        location = locator.locate(name)
        if location is not None:
            return location
        known += locator.known_names()
        hints.append(locator.hint(name))
    advice = " or ".join(hint for hint in hints if hint)
    if advice:
        raise UnknownNameError(f"environment {name!r} is not installed; {advice}")
    raise unknown_name("environment", name, known)


def open_environment(name: str, settings: dict[str, Any] | None = None) -> EnvironmentClient:
    """Open `name` with its own `settings` (the `--env.x` flags)."""
    location = locate_environment(name)
    environment_class = load_environment_class(location.factory)
    environment = environment_class.from_settings({**location.config, **(settings or {})})
    return InProcessEnvironment(environment, name=name, version=location.version)


def load_environment_class(factory: str) -> type[Environment]:
    """Import `module:Class`; raises EnvironmentLoadError saying what is wrong with it."""
    module_name, _, class_name = factory.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise EnvironmentLoadError(
            f"cannot import environment {factory!r}: {error}; "
            "reinstall it, or install what it misses"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise EnvironmentLoadError(
            f"{factory!r} is not an Environment class; expected `module:Class`, got {found!r}"
        )
    return found
