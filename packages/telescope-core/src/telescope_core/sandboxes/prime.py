"""The provider `prime`: sandboxes of Prime Intellect's cloud, through its own SDK.

The key is PRIME_API_KEY. The SDK keeps short-lived tokens in the folder `.prime` of the home. The
extra `telescope-core[prime]` brings the version that this was tested with; it and `e2b` cannot be
installed together.
"""

import asyncio
import contextlib
import math
import uuid
from collections.abc import Generator
from typing import Any

from telescope_core.sandboxes.protocol import (
    ANY_CPUS,
    ANY_MB,
    ANY_SECONDS,
    KILLED,
    Limit,
    Network,
    SandboxError,
    SandboxLimitError,
    SandboxSpec,
    SandboxUnavailableError,
    refused_by_service,
)
from telescope_core.sandboxes.remote import CloudProvider, ShellAnswer, read_in_shell, sdk_of

_MB_IN_GB = 1024
_EVERYWHERE = "0.0.0.0/0"
_NOT_FOUND = 404
_REFUSALS = ("HTTP 400", "HTTP 422")
_LIMITS = {
    Limit.IMAGE: "image of the sandbox",
    Limit.CPUS: "the service",
    Limit.MEMORY: "the service",
    Limit.DISK: "the service",
    Limit.TIME_TO_LIVE: "the service, whole minutes, rounded up",
    Limit.NETWORK_NONE: "the service denies every address",
    Limit.NETWORK_FULL: "the service",
}
_AMOUNTS = {
    Limit.CPUS: ANY_CPUS,
    Limit.MEMORY: ANY_MB,
    Limit.DISK: ANY_MB,
    Limit.TIME_TO_LIVE: ANY_SECONDS,
}


class PrimeProvider(CloudProvider):
    """Sandboxes of one account."""

    name = "prime"
    limits = _LIMITS
    amounts = _AMOUNTS

    def __init__(self, *, image: str = "python:3.11-slim", api_key: str | None = None) -> None:
        """None leaves the key to the SDK, which reads PRIME_API_KEY; `image` is the default."""
        self._image = image
        self._api_key = api_key
        super().__init__()

    async def leave(self, client: Any) -> None:
        """Close the connection."""
        await client.aclose()

    async def start(self, spec: SandboxSpec) -> "_PrimeBox":
        """Start a sandbox; raises SandboxUnavailableError without a valid key."""
        sdk = await asyncio.to_thread(sdk_of, "prime", "prime_sandboxes")
        asked: dict[str, Any] = {
            "cpu_cores": spec.cpus,
            "memory_gb": None if spec.memory_mb is None else spec.memory_mb / _MB_IN_GB,
            "disk_size_gb": None if spec.disk_mb is None else spec.disk_mb / _MB_IN_GB,
        }
        with _translate_errors(spec):
            if self._client is None:
                self._client = sdk.AsyncSandboxClient(api_key=self._api_key)
            request = sdk.CreateSandboxRequest(
                name=f"telescope-{uuid.uuid4().hex[:12]}",
                docker_image=spec.image or self._image,
                timeout_minutes=math.ceil(spec.time_to_live_s / 60),
                labels=["telescope", *(f"{name}={value}" for name, value in spec.labels.items())],
                network_denylist=[_EVERYWHERE] if spec.network is Network.NONE else None,
                **{name: value for name, value in asked.items() if value is not None},
            )
            box = _PrimeBox(self._client, str((await self._client.create(request)).id))
        try:
            with _translate_errors(spec):
                await self._client.wait_for_creation(box.id)
        except (SandboxError, SandboxLimitError):
            # It is there, and would cost until its time is over.
            with contextlib.suppress(SandboxError):
                await box.delete()
            raise
        return box


class _PrimeBox:
    """One sandbox, as `RemoteSandbox` uses it."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self.id = name

    async def shell(self, command: str, timeout_s: float) -> ShellAnswer:
        """Run a command; if it runs out of memory, it fails and the sandbox does not."""
        sdk = sdk_of("prime", "prime_sandboxes")
        with _translate_errors():
            try:
                done = await self._client.execute_command(
                    self.id, command, timeout=math.ceil(timeout_s)
                )
            except sdk.SandboxOOMError:
                return ShellAnswer(exit_code=KILLED, output="")
            return ShellAnswer(exit_code=int(done.exit_code), output=str(done.stdout))

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file."""
        name = path.rsplit("/", 1)[-1]
        with _translate_errors():
            await self._client.upload_bytes(self.id, path, content, name)

    async def download(self, path: str) -> bytes:
        """Return the content of a file as bytes; the SDK itself returns only text."""
        return await read_in_shell(self, path)

    async def delete(self) -> None:
        """End it."""
        try:
            with _translate_errors():
                await self._client.delete(self.id)
        except SandboxError as error:
            if f"HTTP {_NOT_FOUND}" not in str(error):
                raise


@contextlib.contextmanager
def _translate_errors(asked: SandboxSpec | None = None) -> Generator[None]:
    """Raise every error of the SDK, and of its HTTP client, as one of ours.

    `asked`: the settings of the sandbox. Besides its APIError, the SDK raises RuntimeErrors.
    """
    import httpx

    sdk = sdk_of("prime", "prime_sandboxes")
    try:
        yield
    except (sdk.UnauthorizedError, sdk.PaymentRequiredError) as error:
        raise SandboxUnavailableError(
            f"prime refuses this account: {error}; set PRIME_API_KEY to a key of it"
        ) from error
    except sdk.APIError as error:
        if "No API key" in str(error):
            raise SandboxUnavailableError(
                "sandbox provider 'prime' needs a key; set PRIME_API_KEY to one of your account"
            ) from error
        if asked is not None and str(error).startswith(_REFUSALS):
            raise refused_by_service("prime", asked, error) from error
        raise SandboxError(f"prime failed: {type(error).__name__}: {error}") from error
    except sdk.SandboxImagePullError as error:
        if asked is None:
            raise SandboxError(f"prime failed: {type(error).__name__}: {error}") from error
        raise refused_by_service("prime", asked, error) from error
    except (RuntimeError, httpx.HTTPError, OSError) as error:
        if isinstance(error, sdk.SandboxOOMError):
            raise
        raise SandboxError(f"prime failed: {type(error).__name__}: {error}") from error
