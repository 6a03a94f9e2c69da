"""Find providers of sandboxes by name, among those that installed packages declare.

A provider is an entry point of the group `telescope.sandboxes` that names its class.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import cast

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.sandboxes.protocol import SandboxProvider, SandboxUnavailableError

GROUP = "telescope.sandboxes"


def provider_names() -> list[str]:
    """Return the names of all providers, those whose SDK is not installed included."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def require_provider(name: str) -> None:
    """Raise UnknownNameError unless there is a provider called `name`; opens none."""
    known = provider_names()
    if name not in known:
        raise unknown_name("sandbox provider", name, known)


def open_provider(name: str, **settings: object) -> SandboxProvider:
    """Return the provider called `name`, made with `settings`.

    Raises UnknownNameError for an unknown one, SandboxUnavailableError with what to install when
    its SDK is missing, and ConfigError for settings that it does not have.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise unknown_name("sandbox provider", name, points)
    factory = _load(points[name])
    try:
        return factory(**settings)
    except TypeError as error:
        raise ConfigError(f"sandbox provider {name!r}: {error}") from None


def _load(point: EntryPoint) -> Callable[..., SandboxProvider]:
    try:
        return cast(Callable[..., SandboxProvider], point.load())
    except ImportError as error:
        raise SandboxUnavailableError(
            f"sandbox provider {point.name!r} cannot be loaded: {error}; run: pip install "
            f"'telescope-core[{point.name}]'"
        ) from error
