"""Registries of environments: records, reading, resolving, building and publishing."""

from telescope_envs.registry.lookup import (
    LocatedRelease,
    Opening,
    locate_release,
    open_registry,
    open_writable,
)
from telescope_envs.registry.records import Release, Status
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolve import parse_request, resolve

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
