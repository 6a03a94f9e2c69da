"""The provider `e2b`: sandboxes of E2B's cloud, through its own SDK.

The key is E2B_API_KEY. Processors and memory are those of the template and cannot be set. The extra
`telescope-core[e2b]` installs the version of the SDK that this was tested with.
"""

import asyncio
import contextlib
import math
import os
from collections.abc import Generator
from typing import Any

from telescope_core.sandboxes.protocol import (
    Limit,
    Network,
    ResourceAmount,
    SandboxError,
    SandboxSpec,
    SandboxUnavailableError,
    refused_by_service,
)
from telescope_core.sandboxes.remote import CloudProvider, ShellAnswer, sdk_of

_REFUSALS = (400, 404, 422)
"""Status codes of its service for impossible requests, such as an unknown template."""
_LIMITS = {
    Limit.IMAGE: "template of the sandbox",
    Limit.TIME_TO_LIVE: "the service",
    Limit.NETWORK_NONE: "the service",
    Limit.NETWORK_FULL: "the service",
}
_AMOUNTS = {
    Limit.TIME_TO_LIVE: ResourceAmount(
        most=24 * 3600, why_most="the longest that its service gives"
    ),
}


class E2BProvider(CloudProvider):
    """Sandboxes of one account."""

    name = "e2b"
    limits = _LIMITS
    amounts = _AMOUNTS

    def __init__(self, *, template: str | None = None, api_key: str | None = None) -> None:
        """None leaves the template, and the key from E2B_API_KEY, to the SDK."""
        self._template = template
        self._api_key = api_key
        super().__init__()

    async def start(self, spec: SandboxSpec) -> "_E2bBox":
        """Start a sandbox; raises SandboxUnavailableError without a valid key."""
        sdk = await asyncio.to_thread(sdk_of, "e2b")
        # The SDK sends requests with an empty key, and says little of the answer.
        key = self._api_key or os.environ.get("E2B_API_KEY")
        if not key:
            raise SandboxUnavailableError(
                "sandbox provider 'e2b' needs a key; set E2B_API_KEY to one of your account"
            )
        with _translate_errors(spec):
            box = await sdk.AsyncSandbox.create(
                template=spec.image or self._template,
                timeout=math.ceil(spec.time_to_live_s),
                metadata={"made-by": "telescope", **spec.labels},
                allow_internet_access=spec.network is Network.FULL,
                api_key=key,
            )
            return _E2bBox(box)


class _E2bBox:
    """One sandbox, as `RemoteSandbox` uses it."""

    def __init__(self, box: Any) -> None:
        self._box = box
        self.id = str(box.sandbox_id)

    async def shell(self, command: str, timeout_s: float) -> ShellAnswer:
        """Run a command; the SDK raises for every exit code but 0."""
        sdk = sdk_of("e2b")
        with _translate_errors():
            try:
                done = await self._box.commands.run(command, timeout=timeout_s)
            except sdk.CommandExitException as error:
                done = error
            return ShellAnswer(exit_code=int(done.exit_code), output=str(done.stdout))

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file."""
        with _translate_errors():
            await self._box.files.write(path, content)

    async def download(self, path: str) -> bytes:
        """Return the content of a file."""
        with _translate_errors():
            return bytes(await self._box.files.read(path, format="bytes"))

    async def delete(self) -> None:
        """End it."""
        with _translate_errors():
            await self._box.kill()


@contextlib.contextmanager
def _translate_errors(asked: SandboxSpec | None = None) -> Generator[None]:
    """Raise every error of the SDK, and of its HTTP client, as one of ours.

    `asked`: the settings of the sandbox.
    """
    import httpx

    sdk = sdk_of("e2b")
    try:
        yield
    except sdk.AuthenticationException as error:
        raise SandboxUnavailableError(
            f"e2b refuses this account: {error}; set E2B_API_KEY to a key of it"
        ) from error
    except (sdk.SandboxException, sdk.ServiceBusyException, httpx.HTTPError, OSError) as error:
        if asked is not None and getattr(error, "status_code", None) in _REFUSALS:
            raise refused_by_service("e2b", asked, error) from error
        raise SandboxError(f"e2b failed: {type(error).__name__}: {error}") from error
