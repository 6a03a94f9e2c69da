"""The provider `daytona`: sandboxes of Daytona's cloud, through its own SDK.

The key is DAYTONA_API_KEY, or DAYTONA_JWT_TOKEN with DAYTONA_ORGANIZATION_ID. The extra
`telescope-core[daytona]` brings the version of the SDK that this was tested with.
"""

import asyncio
import contextlib
import math
import shlex
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import aiohttp

from telescope_core.sandboxes.protocol import (
    ANY_CPUS,
    ANY_MB,
    ANY_SECONDS,
    Limit,
    Network,
    SandboxError,
    SandboxSpec,
    SandboxUnavailableError,
    refused_by_service,
    whole_units,
)
from telescope_core.sandboxes.remote import CloudProvider, ShellAnswer, sdk_of

_CREATE_S = 300.0
_MB_IN_GB = 1024
_LIMITS = {
    Limit.IMAGE: "image of the sandbox",
    Limit.CPUS: "the service, whole processors",
    Limit.MEMORY: "the service, whole GiB",
    Limit.DISK: "the service, whole GiB",
    Limit.TIME_TO_LIVE: "the service, whole minutes, rounded up",
    Limit.NETWORK_NONE: "the service",
    Limit.NETWORK_FULL: "the service",
}
_AMOUNTS = {
    # More than was asked for would be no limit, so nothing is rounded up.
    Limit.CPUS: replace(ANY_CPUS, multiple_of=1),
    Limit.MEMORY: replace(ANY_MB, multiple_of=_MB_IN_GB),
    Limit.DISK: replace(ANY_MB, multiple_of=_MB_IN_GB),
    Limit.TIME_TO_LIVE: ANY_SECONDS,
}


class DaytonaProvider(CloudProvider):
    """Sandboxes of one account."""

    name = "daytona"
    limits = _LIMITS
    amounts = _AMOUNTS

    def __init__(
        self,
        *,
        image: str = "python:3.11-slim",
        api_key: str | None = None,
        api_url: str | None = None,
        target: str | None = None,
    ) -> None:
        """None leaves a setting to the SDK, which reads its variables; `image` is the default."""
        self._image = image
        given = {"api_key": api_key, "api_url": api_url, "target": target}
        self._settings = {name: value for name, value in given.items() if value is not None}
        super().__init__()

    def _connected(self, sdk: Any) -> Any:
        """Return a client. No request is made: an error means a missing key, not a wrong one."""
        try:
            return sdk.AsyncDaytona(sdk.DaytonaConfig(**self._settings) if self._settings else None)
        except sdk.DaytonaAuthenticationError as error:
            raise SandboxUnavailableError(
                "sandbox provider 'daytona' needs a key; set DAYTONA_API_KEY to one of your account"
            ) from error

    async def start(self, spec: SandboxSpec) -> "_DaytonaBox":
        """Start a sandbox; raises SandboxUnavailableError without a valid key."""
        sdk = await asyncio.to_thread(sdk_of, "daytona")
        with _translate_errors(spec):
            if self._client is None:
                self._client = self._connected(sdk)
            minutes = math.ceil(spec.time_to_live_s / 60)
            resources = {
                "cpu": whole_units(spec.cpus, 1),
                "memory": whole_units(spec.memory_mb, _MB_IN_GB),
                "disk": whole_units(spec.disk_mb, _MB_IN_GB),
            }
            asked = {name: value for name, value in resources.items() if value is not None}
            params = sdk.CreateSandboxFromImageParams(
                image=spec.image or self._image,
                resources=sdk.Resources(**asked) if asked else None,
                network_block_all=spec.network is Network.NONE,
                auto_stop_interval=minutes,
                ttl_minutes=minutes,
                ephemeral=True,
                labels={"made-by": "telescope", **spec.labels},
            )
            return _DaytonaBox(self._client, await self._client.create(params, timeout=_CREATE_S))


class _DaytonaBox:
    """One sandbox, as `RemoteSandbox` uses it."""

    def __init__(self, client: Any, box: Any) -> None:
        self._client = client
        self._box = box
        self.id = str(box.id)

    async def shell(self, command: str, timeout_s: float) -> ShellAnswer:
        """Run a command; its output streams are merged."""
        with _translate_errors():
            words = f"sh -c {shlex.quote(command)}"
            done = await self._box.process.exec(words, timeout=math.ceil(timeout_s))
            return ShellAnswer(exit_code=int(done.exit_code), output=str(done.result or ""))

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file."""
        with _translate_errors():
            await self._box.fs.upload_file(content, path)

    async def download(self, path: str) -> bytes:
        """Return the content of a file."""
        with _translate_errors():
            return bytes(await self._box.fs.download_file(path))

    async def delete(self) -> None:
        """End it."""
        sdk = sdk_of("daytona")
        with _translate_errors(), contextlib.suppress(sdk.DaytonaNotFoundError):
            await self._client.delete(self._box)


@contextlib.contextmanager
def _translate_errors(asked: SandboxSpec | None = None) -> Generator[None]:
    """Raise every error of the SDK, and of its HTTP client, as one of ours.

    `asked`: the settings of the sandbox.
    """
    sdk = sdk_of("daytona")
    try:
        yield
    except (sdk.DaytonaAuthenticationError, sdk.DaytonaForbiddenError) as error:
        raise SandboxUnavailableError(
            f"daytona refuses this account: {error}; set DAYTONA_API_KEY to a key of it"
        ) from error
    except (sdk.DaytonaBadRequestError, sdk.DaytonaUnprocessableEntityError) as error:
        if asked is None:
            raise SandboxError(f"daytona failed: {type(error).__name__}: {error}") from error
        raise refused_by_service("daytona", asked, error) from error
    except (sdk.DaytonaError, aiohttp.ClientError, OSError, TimeoutError) as error:
        raise SandboxError(f"daytona failed: {type(error).__name__}: {error}") from error
