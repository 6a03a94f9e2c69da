"""What goes wrong with sandboxes, as three errors: whose doing it is decides which.

What a program does, reaching its limits included, is no error but its `CommandResult`.
"""

from collections.abc import Collection

from telescope_core.errors import ConfigError, TelescopeError
from telescope_core.sandboxes.protocol import Limit, Network, SandboxSpec


class SandboxError(TelescopeError):
    """A provider failed, which says nothing of the program: a rollout is tried again."""

    exit_code = 6


class SandboxUnavailableError(ConfigError):
    """This machine, or this account, cannot make sandboxes with a provider; it says what to do."""


class SandboxLimitError(ConfigError):
    """A provider cannot give a limit that was asked for."""


class SandboxFileError(OSError):
    """A file in a sandbox is missing, is none, or has no room: often the program's doing."""


def require_limits(provider: str, spec: SandboxSpec, given: Collection[Limit]) -> None:
    """Raise SandboxLimitError that names each limit of `spec` that is not among those `given`."""
    missing = {limit: value for limit, value in spec.asked_limits().items() if limit not in given}
    if not missing:
        return
    asked = ", ".join(_said(limit, value) for limit, value in missing.items())
    known = ", ".join(sorted(limit.value for limit in given))
    raise SandboxLimitError(
        f"sandboxes of {provider!r} cannot give {asked}; they give: {known}. Leave it out of the "
        "sandbox's settings, or take another provider"
    )


def require_endpoint(sandbox: str, spec: SandboxSpec) -> None:
    """Raise SandboxLimitError unless addresses can be opened to a sandbox made by `spec`."""
    if spec.network is not Network.ENDPOINT:
        raise SandboxLimitError(
            f"sandbox {sandbox} was made with network={spec.network}, so no address can be opened "
            "to it; make it with SandboxSpec(network=Network.ENDPOINT)"
        )


def _said(limit: Limit, value: object) -> str:
    return limit.value if "=" in limit.value else f"{limit.value}={value!r}"
