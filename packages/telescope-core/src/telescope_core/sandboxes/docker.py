"""The provider `docker`: containers of Docker, or of podman through its Docker-compatible service.

The root of a container is read-only, its user is nobody, and it has no capabilities, unless
`as_image` selects the settings of its image. The extra `telescope-core[docker]` installs the SDK.
"""

import asyncio
import contextlib
import io
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

from telescope_core.sandboxes import docker_endpoint
from telescope_core.sandboxes.protocol import (
    ANY_CPUS,
    ANY_MB,
    ANY_SECONDS,
    Limit,
    Network,
    ResourceAmount,
    Sandbox,
    SandboxError,
    SandboxLimitError,
    SandboxSpec,
    SandboxUnavailableError,
    refused_by_service,
    require_limits,
)
from telescope_core.sandboxes.remote import CloudProvider, ShellAnswer, sdk_of

Result = TypeVar("Result")

_DEFAULT_IMAGE = "python:3.11-slim"
_DEFAULT_MEMORY_MB = 1024
_DEFAULT_DISK_MB = 256
_DEFAULT_PROCESSES = 256
_NOBODY = "65534:65534"
_THREADS = 64
_SOCKET_S = 24 * 3600
_CALL_S = 120.0
_FILES = 1024
_PROCESSES = 1024
_MB = 1 << 20
_REFUSED = 400


class DockerProvider(CloudProvider):
    """Containers of one Docker or podman."""

    name = "docker"

    def __init__(
        self,
        *,
        base_url: str | None = None,
        image: str = _DEFAULT_IMAGE,
        as_image: bool = False,
    ) -> None:
        """`base_url`: of the service, such as unix:///run/podman/podman.sock; None asks Docker's.

        `image` is for specs that name none; it must be there, and is not pulled. With `as_image`
        programs run as the user of the image, mostly root, may write its whole file system and
        have the capabilities that Docker usually gives; a limit of the disk is then refused.
        """
        self._base_url = base_url
        self._image = image
        self._as_image = as_image
        self._threads = _new_threads()
        self.amounts = _AMOUNTS
        self.limits = _LIMITS
        if as_image:
            # The size of what is written over an image can be limited on few file systems.
            self.limits = {limit: means for limit, means in _LIMITS.items() if limit != Limit.DISK}
        self._opening = asyncio.Lock()
        super().__init__()

    def require(self, specs: Iterable[SandboxSpec]) -> None:
        """Raise SandboxLimitError that names the limits the service cannot set; starts nothing.

        It blocks. Raises SandboxUnavailableError where there is no service.
        """
        client, amounts = self._connect()
        client.close()
        for spec in specs:
            require_limits(self.name, spec, self.limits, amounts)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a container; raises SandboxUnavailableError where there is no service or image."""
        require_limits(self.name, spec, self.limits, _AMOUNTS)
        await self._connected()
        return await super().create(spec)

    async def build(self, context: bytes, tag: str, timeout_s: float) -> str:
        """Return the id of the image `tag`, built of a tar with a Dockerfile unless it is there.

        Base images are pulled. Raises SandboxError with the end of the build's output if it fails
        or takes longer than `timeout_s`.
        """
        await self._connected()
        return await self._call(lambda: self._built(context, tag), timeout_s)

    async def leave(self, client: Any) -> None:
        """Close the connection, and end the threads of its calls."""
        await self._call(client.close)
        self._threads.shutdown(wait=False)
        self._threads = _new_threads()  # they begin with a call

    async def _connected(self) -> None:
        async with self._opening:
            if self._client is None:
                self._client, self.amounts = await self._call(self._connect)

    def _built(self, context: bytes, tag: str) -> str:
        from docker import errors

        with _translate_errors():
            with contextlib.suppress(errors.ImageNotFound):
                return str(self._client.images.get(tag).id)
            try:
                image, _ = self._client.images.build(
                    fileobj=io.BytesIO(context), custom_context=True, tag=tag, rm=True, forcerm=True
                )
            except errors.BuildError as error:
                said = "".join(str(line.get("stream", "")) for line in error.build_log)
                raise SandboxError(
                    f"image {tag} cannot be built: {error}; the build said last: {said[-500:]}"
                ) from error
            return str(image.id)

    async def start(self, spec: SandboxSpec) -> "_Container":
        """Start a container; raises SandboxUnavailableError where its image is not here."""
        image = spec.image or self._image
        container = _Container(await self._call(lambda: self._start(image, spec)), self._call)
        if spec.network is Network.ENDPOINT:
            await _require_python(container, image)
        return container

    async def _call(self, function: Callable[[], Result], limit_s: float = _CALL_S) -> Result:
        """Call the SDK, which blocks, in a thread."""
        calling = asyncio.get_running_loop().run_in_executor(self._threads, function)
        try:
            async with asyncio.timeout(limit_s):
                return await calling
        except TimeoutError:
            raise SandboxError(f"docker did not answer within {limit_s:g} s") from None

    def _connect(self) -> tuple[Any, Mapping[Limit, ResourceAmount]]:
        docker = sdk_of("docker")
        try:
            if self._base_url is None:
                client = docker.from_env(timeout=_SOCKET_S)
            else:
                client = docker.DockerClient(base_url=self._base_url, timeout=_SOCKET_S)
            return client, _amounts_of(client.info())
        except docker.errors.DockerException as error:
            raise SandboxUnavailableError(
                f"no Docker answers at {self._base_url or 'its usual place'}: {error}; start it, "
                "or give base_url or the variable DOCKER_HOST, such as "
                "unix:///run/podman/podman.sock"
            ) from error

    def _start(self, image: str, spec: SandboxSpec) -> Any:
        from docker import errors

        with _translate_errors():
            # `run` would pull an image that is missing, and try so three times.
            try:
                self._client.images.get(image)
            except errors.ImageNotFound:
                raise SandboxUnavailableError(
                    f"there is no image {image!r} here; run: docker pull {image}"
                ) from None
            try:
                return self._client.containers.run(
                    image,
                    ["sleep", str(math.ceil(spec.time_to_live_s))],
                    labels={**spec.labels, "telescope-sandbox": str(os.getpid())},
                    **_settings(spec, as_image=self._as_image),
                )
            except errors.APIError as error:
                if error.status_code == _REFUSED:
                    raise refused_by_service(self.name, spec, error.explanation) from error
                raise


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="docker-sandbox")


def _settings(spec: SandboxSpec, *, as_image: bool) -> dict[str, Any]:
    """Return the SDK's settings for a container."""
    from docker.types import Ulimit

    opens = spec.network is not Network.NONE
    network = {"network_mode": "none", "network_disabled": not opens}
    closed = {
        "read_only": True,
        "tmpfs": {"/tmp": f"size={spec.disk_mb or _DEFAULT_DISK_MB}m,mode=1777"},
        "user": _NOBODY,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
    }
    return {
        "detach": True,
        "auto_remove": True,
        **({} if as_image else closed),
        "mem_limit": f"{spec.memory_mb or _DEFAULT_MEMORY_MB}m",
        # The first process is one, and what listens inside another.
        "pids_limit": (spec.max_processes or _DEFAULT_PROCESSES) + 1 + opens,
        # The service's own defaults may be more than it is allowed to give.
        "ulimits": [
            Ulimit(name=name, soft=most, hard=most)
            for name, most in (("nofile", _FILES), ("nproc", _PROCESSES))
        ],
        "nano_cpus": round((spec.cpus or 1.0) * 1e9),
        **({} if spec.network is Network.FULL else network),
    }


_WHEN_HEARD = 'read -r _; exec "$@" < /dev/null'
"""Script that runs a command after a listener is there: a busy podman loses earlier output."""


class _Container:
    """One container, as `RemoteSandbox` uses it."""

    def __init__(self, container: Any, call: Callable[..., Any]) -> None:
        self._container = container
        self.id = str(container.short_id)
        self._call = call

    async def shell(self, command: str, timeout_s: float) -> ShellAnswer:
        """Run a command in it."""
        exit_code, (out, _) = await self._call(
            lambda: self._executed(["sh", "-c", command]), timeout_s
        )
        return ShellAnswer(exit_code=exit_code, output=(out or b"").decode(errors="replace"))

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file through the standard input of a command.

        Archives do not reach file systems in memory with every version of Docker.
        """
        await self._call(lambda: self._fed(path, content))

    async def download(self, path: str) -> bytes:
        """Return the content of a file."""
        exit_code, (out, error) = await self._call(lambda: self._executed(["cat", path]))
        if exit_code != 0:
            raise SandboxError(f"sandbox {self.id}: {path} cannot be read: {error!r:.200}")
        return out or b""

    def opened(self, host: str, port: int) -> AbstractAsyncContextManager[str]:
        """Open an address to programs inside, through the streams of a program there."""
        return docker_endpoint.opened(lambda: self._call(self._listening), host, port)

    async def delete(self) -> None:
        """Kill and remove it."""
        await self._call(self._removed)

    def _executed(self, argv: list[str]) -> tuple[int, tuple[bytes | None, bytes | None]]:
        streams: Any = import_module("docker.utils.socket")
        with _translate_errors():
            api = self._container.client.api
            words = ["sh", "-c", _WHEN_HEARD, "sh", *argv]
            made = api.exec_create(self._container.id, words, stdin=True)
            stream = api.exec_start(made["Id"], socket=True)
            try:
                getattr(stream, "_sock", stream).sendall(b"\n")
                frames = (streams.demux_adaptor(*one) for one in streams.frames_iter(stream, False))
                output = streams.consume_socket_output(frames, demux=True)
            finally:
                stream.close()
            return int(api.exec_inspect(made["Id"])["ExitCode"]), output

    def _fed(self, path: str, content: bytes) -> None:
        with _translate_errors():
            api = self._container.client.api
            words = ["sh", "-c", 'head -c "$1" > "$2"', "sh", str(len(content)), path]
            made = api.exec_create(self._container.id, words, stdin=True)
            stream = api.exec_start(made["Id"], socket=True)
            connection = getattr(stream, "_sock", stream)
            try:
                connection.sendall(content)
                while connection.recv(4096):
                    pass
            finally:
                stream.close()
            exit_code = api.exec_inspect(made["Id"])["ExitCode"]
            if exit_code != 0:
                raise SandboxError(f"sandbox {self.id}: {path} cannot be written")

    def _listening(self) -> Any:
        with _translate_errors():
            api = self._container.client.api
            made = api.exec_create(self._container.id, [*docker_endpoint.PROGRAM], stdin=True)
            return api.exec_start(made["Id"], socket=True)

    def _removed(self) -> None:
        from docker import errors

        try:
            with _translate_errors():
                try:
                    self._container.remove(force=True)
                except errors.NotFound:
                    return
        except SandboxError as error:
            # It is removed by itself when its first process ends, perhaps at this moment.
            if "already in progress" not in str(error):
                raise


_LIMITS = {
    Limit.IMAGE: "image of the container",
    Limit.CPUS: "control group of the container",
    Limit.MEMORY: "control group of the container",
    Limit.DISK: "size of the file system in memory; the rest is read-only",
    Limit.PROCESSES: "control group of the container",
    Limit.TIME_TO_LIVE: "the first process ends, and the container is removed with it",
    Limit.NETWORK_NONE: "a network namespace of its own",
    Limit.NETWORK_ENDPOINT: "the same, with a program inside that listens for this process",
    Limit.NETWORK_FULL: "the default network of the service",
}
_AMOUNTS = {
    Limit.CPUS: replace(ANY_CPUS, least=0.01, why_least="the least that a container can be given"),
    Limit.MEMORY: replace(ANY_MB, least=16, why_least="without which no program starts"),
    Limit.DISK: ANY_MB,
    Limit.PROCESSES: ResourceAmount(
        most=_PROCESSES - 2,
        why_most="as the containers of a service may share a limit of their user",
        least=8,
        why_least="which the script around each command needs",
    ),
    Limit.TIME_TO_LIVE: ANY_SECONDS,
}
"""Limits for containers on any machine."""


def _amounts_of(machine: Mapping[str, Any]) -> Mapping[Limit, ResourceAmount]:
    """Return the limits for containers on one machine, whose resources its service reports."""
    cpus, memory_bytes = int(machine.get("NCPU") or 0), int(machine.get("MemTotal") or 0)
    found = dict(_AMOUNTS)
    if cpus:
        found[Limit.CPUS] = replace(
            found[Limit.CPUS], most=cpus, why_most="the processors of its machine"
        )
    if memory_bytes:
        memory = {"most": memory_bytes // _MB, "why_most": "the memory of its machine in MiB"}
        found[Limit.MEMORY] = replace(found[Limit.MEMORY], **memory)
        found[Limit.DISK] = replace(found[Limit.DISK], **memory)
    return found


async def _require_python(container: _Container, image: str) -> None:
    """Remove a container and raise SandboxLimitError unless it has Python, to listen inside."""
    is_there = False
    try:
        answer = await container.shell("python3 -c 'import asyncio'", _CALL_S)
        is_there = answer.exit_code == 0
    finally:
        if not is_there:
            await asyncio.shield(asyncio.ensure_future(container.delete()))
    if not is_there:
        raise SandboxLimitError(
            f"sandboxes of 'docker' cannot give {Limit.NETWORK_ENDPOINT.value} with the image "
            f"{image!r}: it has no python3, which listens inside. Take an image with one"
        )


@contextlib.contextmanager
def _translate_errors() -> Generator[None]:
    """Raise every error of the SDK, and of its HTTP client, as a SandboxError."""
    import requests
    from docker import errors

    try:
        yield
    except (errors.DockerException, requests.RequestException, OSError) as error:
        raise SandboxError(f"docker failed: {type(error).__name__}: {error}") from error
