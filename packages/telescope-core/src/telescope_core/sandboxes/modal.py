"""The provider `modal`: sandboxes of Modal's cloud, through its own SDK.

The key is MODAL_TOKEN_ID with MODAL_TOKEN_SECRET. The extra `telescope-core[modal]` brings the
version of the SDK that this was tested with: names in its protocol move between releases.
"""

import asyncio
import base64
import contextlib
import math
import shlex
from collections.abc import Generator
from dataclasses import replace
from typing import Any

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
)
from telescope_core.sandboxes.remote import CloudProvider, ShellAnswer, read_in_shell, sdk_of

_APP = "telescope-sandboxes"
_FILES_S = 120.0
_PIECE_BYTES = 40_000
"""Size of a part of a file in one command: the service allows 64 KiB, and base64 adds a third."""
_LIMITS = {
    Limit.IMAGE: "image of the sandbox",
    Limit.CPUS: "the service",
    Limit.MEMORY: "the service",
    Limit.TIME_TO_LIVE: "the service",
    Limit.NETWORK_NONE: "the service",
    Limit.NETWORK_FULL: "the service",
}
_AMOUNTS = {
    # It takes less for no limit at all.
    Limit.CPUS: replace(ANY_CPUS, least=0.001, why_least="the least that its service counts"),
    Limit.MEMORY: ANY_MB,
    Limit.TIME_TO_LIVE: ANY_SECONDS,
}


class ModalProvider(CloudProvider):
    """Sandboxes of one account."""

    name = "modal"
    limits = _LIMITS
    amounts = _AMOUNTS

    def __init__(self, *, image: str = "python:3.11-slim", app: str = _APP) -> None:
        """`image`: default for specs without one; `app`: name of the app that owns sandboxes."""
        self._image = image
        self._app_name = app
        self._app: Any = None
        super().__init__()

    async def start(self, spec: SandboxSpec) -> "_ModalBox":
        """Start a sandbox; raises SandboxUnavailableError without a valid key."""
        sdk = await asyncio.to_thread(sdk_of, "modal")
        with _translate_errors(spec):
            if self._app is None:
                self._app = await sdk.App.lookup.aio(self._app_name, create_if_missing=True)
            box = await sdk.Sandbox.create.aio(
                app=self._app,
                image=sdk.Image.from_registry(spec.image or self._image),
                timeout=math.ceil(spec.time_to_live_s),
                cpu=None if spec.cpus is None else (spec.cpus, spec.cpus),
                memory=None if spec.memory_mb is None else (spec.memory_mb, spec.memory_mb),
                block_network=spec.network is Network.NONE,
            )
            return _ModalBox(box)


class _ModalBox:
    """One sandbox, as `RemoteSandbox` uses it."""

    def __init__(self, box: Any) -> None:
        self._box = box
        self.id = str(box.object_id)

    async def shell(self, command: str, timeout_s: float) -> ShellAnswer:
        """Run a command."""
        with _translate_errors():
            process = await self._box.exec.aio("sh", "-c", command, timeout=math.ceil(timeout_s))
            output = await process.stdout.read.aio()
            return ShellAnswer(exit_code=int(await process.wait.aio()), output=str(output))

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file with commands, because file calls need a program of Modal inside."""
        target, into = shlex.quote(path), ">"
        for at in range(0, max(1, len(content)), _PIECE_BYTES):
            piece = base64.b64encode(content[at : at + _PIECE_BYTES]).decode()
            command = f"printf %s '{piece}' | base64 -d {into} {target}"
            if (await self.shell(command, _FILES_S)).exit_code != 0:
                raise SandboxError(f"sandbox {self.id}: {path} cannot be written")
            into = ">>"

    async def download(self, path: str) -> bytes:
        """Return the content of a file."""
        return await read_in_shell(self, path)

    async def delete(self) -> None:
        """End it, and the SDK's connection to it."""
        sdk = sdk_of("modal")
        with _translate_errors():
            with contextlib.suppress(sdk.exception.NotFoundError):
                await self._box.terminate.aio()
            await self._box.detach.aio()


@contextlib.contextmanager
def _translate_errors(asked: SandboxSpec | None = None) -> Generator[None]:
    """Tell every error of the SDK as one of ours; `asked` is what a sandbox is made with."""
    sdk = sdk_of("modal")
    try:
        yield
    except (sdk.exception.AuthError, sdk.exception.PermissionDeniedError) as error:
        if "Token missing" in str(error):
            raise SandboxUnavailableError(
                "sandbox provider 'modal' needs a token; set MODAL_TOKEN_ID and "
                "MODAL_TOKEN_SECRET to one of your account"
            ) from error
        raise SandboxUnavailableError(
            f"modal refuses this account: {error}; set MODAL_TOKEN_ID and "
            "MODAL_TOKEN_SECRET to a token of it"
        ) from error
    except sdk.exception.InvalidError as error:
        # A conflict is of a state, not of what was asked for.
        if asked is None or isinstance(error, sdk.exception.ConflictError):
            raise SandboxError(f"modal failed: {type(error).__name__}: {error}") from error
        raise refused_by_service("modal", asked, error) from error
    except (sdk.exception.Error, OSError, TimeoutError) as error:
        raise SandboxError(f"modal failed: {type(error).__name__}: {error}") from error
