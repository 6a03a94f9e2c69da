"""Find harnesses by name, among those that installed packages declare."""

import inspect
from importlib.metadata import entry_points
from typing import Any

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.harnesses.protocol import Harness

GROUP = "telescope.harnesses"


def harness_names() -> list[str]:
    """Return the names of all harnesses."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def open_harness(name: str, **options: object) -> Harness:
    """Return the harness called `name`, made with `options`.

    Raises UnknownNameError for an unknown one, and ConfigError for options that it does not take.
    """
    factory = _factory(name)
    known = inspect.signature(factory).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for option in options:
        if option not in known and not takes_any:
            raise unknown_name(f"option of harness {name!r}", option, known)
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(f"harness {name!r}: {error}") from None


def harness_requirements(name: str) -> tuple[str, ...]:
    """Return the packages of the harness called `name`, which its class declares."""
    return _factory(name).requirements


def harness_excluded(name: str) -> tuple[str, ...]:
    """Return packages that the harness called `name` does not need, although others require them.

    Most harnesses declare none.
    """
    return getattr(_factory(name), "excluded", ())


def _factory(name: str) -> Any:
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise unknown_name("harness", name, points)
    return points[name].load()
