"""Telescope envs: registries of environments, installing from them, finding what is installed."""

from telescope_envs.install import find_installed, install, uninstall
from telescope_envs.installed import InstalledEnvironment, installed_environments
from telescope_envs.installing.steps import InstallOptions
from telescope_envs.registry import Registry, open_registry, resolve

__all__ = [
    "InstallOptions",
    "InstalledEnvironment",
    "Registry",
    "find_installed",
    "install",
    "installed_environments",
    "open_registry",
    "resolve",
    "uninstall",
]
