"""Telescope envs: environment registries, installing from them, and finding installed ones.

`install` is not exported here, because a folder has that name: import it from
`telescope_envs.install.install`.
"""

from typing import TYPE_CHECKING

from telescope_core.base.lazy import lazy_names

if TYPE_CHECKING:
    from telescope_envs.install.install import (
        find_installed,
        uninstall,
    )
    from telescope_envs.install.steps import InstallOptions
    from telescope_envs.records.installed import (
        InstalledEnvironment,
        installed_environments,
    )
    from telescope_envs.registry import Registry, open_registry, resolve

__all__ = [
    "InstallOptions",
    "InstalledEnvironment",
    "Registry",
    "find_installed",
    "installed_environments",
    "open_registry",
    "resolve",
    "uninstall",
]

if not TYPE_CHECKING:  # a typed `__getattr__` would let every misspelling pass
    __getattr__ = lazy_names(
        __name__,
        __all__,
        (
            "install.steps",
            "records.installed",
            "registry.resolving",
            "registry.lookup",
            "install.install",
        ),
    )
