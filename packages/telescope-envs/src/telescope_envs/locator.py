"""`InstalledLocator`: turns the name of an installed environment into where its code is."""

from telescope_core.errors import TelescopeError
from telescope_core.protocols import EnvironmentLocation
from telescope_envs.install import find_installed
from telescope_envs.installed import installed_environments
from telescope_envs.registry.lookup import open_registry
from telescope_envs.registry.resolve import parse_request, resolve


class InstalledLocator:
    """Knows what `telescope env install` installed, and packages with the entry point."""

    def locate(self, name: str) -> EnvironmentLocation | None:
        """Return where `name`, `owner/name` or `owner/name@version` is installed."""
        found = find_installed(name)
        if found is None:
            return None
        return EnvironmentLocation(
            id=found.id,
            version=found.version,
            factory=found.factory,
            interpreter=found.interpreter,
        )

    def known_names(self) -> list[str]:
        """Return the installed environments, and those that could be installed."""
        installed = installed_environments()
        names = {environment.id for environment in installed}
        names |= {environment.name for environment in installed}
        return sorted(names | set(_registry_names()))

    def hint(self, name: str) -> str:
        """Return the command that installs `name`, when the default registry has it."""
        try:
            resolve(open_registry(), name)
        except TelescopeError:
            return ""
        return f"run: telescope env install {parse_request(name).typed_id}"


def _registry_names() -> list[str]:
    try:
        registry = open_registry()
        return [*registry.ids(), *registry.aliases()]
    except TelescopeError:
        return []
