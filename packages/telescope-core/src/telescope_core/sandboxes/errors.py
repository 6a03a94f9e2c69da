"""Errors of sandboxes, distinguished by who has to act.

Failures of a program, including reaching its limits, are no errors but a `CommandResult`.
"""

from collections.abc import Collection, Mapping
from typing import cast

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.sandboxes.amounts import ResourceAmount
from telescope_core.sandboxes.protocol import Limit, Network, SandboxSpec


class SandboxError(TelescopeError):
    """A provider failed, which is not the program's fault: the rollout is played again."""

    exit_code = 6


class SandboxUnavailableError(ConfigError):
    """This machine or account cannot create sandboxes with a provider; says what to do."""


class SandboxLimitError(ConfigError):
    """A provider cannot set a limit that was requested."""


class SandboxFileError(OSError):
    """A file in a sandbox is missing, no file, or has no room: often the program's fault."""


def require_limits(
    provider: str,
    spec: SandboxSpec,
    given: Collection[Limit],
    amounts: Mapping[Limit, ResourceAmount] | None = None,
) -> None:
    """Raise SandboxLimitError that names each limit in `spec` that a provider cannot set.

    These are limits that are not among those `given`, and amounts that `amounts` cannot hold.
    """
    refused: list[str] = []
    for limit, value in spec.asked_limits().items():
        if limit not in given:
            refused.append(_said(limit, value))
        elif amounts and limit in amounts and (why := amounts[limit].refusal(cast(float, value))):
            refused.append(f"{_said(limit, value)} ({why})")
    if not refused:
        return
    known = ", ".join(sorted(limit.value for limit in given))
    raise SandboxLimitError(
        f"sandboxes of {provider!r} cannot give {', '.join(refused)}; they give: {known}. Change "
        "it or leave it out in the sandbox's settings, or take another provider"
    )


def refused_by_service(provider: str, spec: SandboxSpec, said: object) -> SandboxLimitError:
    """Return the error for a service that refuses the settings of a sandbox.

    Another request would be refused as well, so it is no failure of the provider.
    """
    asked = ", ".join(_said(limit, value) for limit, value in spec.asked_limits().items())
    return SandboxLimitError(
        f"{provider} refuses to make a sandbox with {asked}: {said}. Change what it refuses in the "
        "sandbox's settings, or take another provider"
    )


def require_endpoint(sandbox: str, spec: SandboxSpec) -> None:
    """Raise SandboxLimitError unless addresses can be opened to a sandbox with `spec`."""
    if spec.network is Network.NONE:
        raise SandboxLimitError(
            f"sandbox {sandbox} was made with network={spec.network}, so no address can be opened "
            "to it; make it with SandboxSpec(network=Network.ENDPOINT)"
        )


def _said(limit: Limit, value: object) -> str:
    return limit.value if "=" in limit.value else f"{limit.value}={value!r}"
