"""Registries of environments: records, reading, resolving, building and publishing."""

from telescope_envs.registry.lookup import open_registry
from telescope_envs.registry.records import Release, Status
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolve import parse_request, resolve

__all__ = ["Registry", "Release", "Status", "open_registry", "parse_request", "resolve"]
