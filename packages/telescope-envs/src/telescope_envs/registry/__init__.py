"""Registries of environments: where they are, reading them, and choosing a release."""

from typing import TYPE_CHECKING

from telescope_core.base.lazy import lazy_names

if TYPE_CHECKING:
    from telescope_envs.records.release import Release, Status
    from telescope_envs.registry.config import Opening
    from telescope_envs.registry.lookup import (
        LocatedRelease,
        locate_release,
        open_registry,
        open_writable,
    )
    from telescope_envs.registry.registry import Registry
    from telescope_envs.registry.resolving import parse_request, resolve

__all__ = [
    "LocatedRelease",
    "Opening",
    "Registry",
    "Release",
    "Status",
    "locate_release",
    "open_registry",
    "open_writable",
    "parse_request",
    "resolve",
]

if not TYPE_CHECKING:  # a typed `__getattr__` would let every misspelling pass
    __getattr__ = lazy_names(__name__, __all__, ("config", "resolving", "lookup"))
