"""The protocol of sandboxes, which every provider implements, and its data types.

A program that fails, reaches a limit or is killed has a result. Only a provider that fails raises
`SandboxError`. `telescope_core.sandboxes.lookup` finds providers by name.
"""

import posixpath
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, cast

from telescope_core.base.errors import ConfigError
from telescope_core.sandboxes.amounts import require_amount

WORK_FOLDER = "/tmp/work"
"""Folder inside every sandbox in which commands start; relative paths start there too."""
KILLED = 137
"""Exit code of a program ended by SIGKILL: 128 + 9."""
MOST_OUTPUT_BYTES = 1 << 30
"""Most bytes of an output that can be kept, because they are held in memory."""


def absolute(path: str) -> str:
    """Return a path inside a sandbox, relative ones below the work folder."""
    return posixpath.join(WORK_FOLDER, path)


class Network(StrEnum):
    """The network that a sandbox can reach."""

    NONE = "none"
    """Nothing but itself."""
    ENDPOINT = "endpoint"
    """Nothing but itself and the addresses opened to it with `Sandbox.opened`."""
    FULL = "full"
    """Everything that the provider's network reaches."""


class Limit(StrEnum):
    """A field of `SandboxSpec` that a provider may be unable to set."""

    IMAGE = "image"
    CPUS = "cpus"
    MEMORY = "memory_mb"
    DISK = "disk_mb"
    PROCESSES = "max_processes"
    TIME_TO_LIVE = "time_to_live_s"
    NETWORK_NONE = "network=none"
    NETWORK_ENDPOINT = "network=endpoint"
    NETWORK_FULL = "network=full"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Requirements on a sandbox; None leaves a field to the provider.

    A provider refuses, by its name, each field that it cannot give.
    """

    image: str | None = None
    """Container image or template."""
    cpus: float | None = None
    """Most processors that all its programs use together."""
    memory_mb: int | None = None
    """Most memory of all its programs together, MiB."""
    disk_mb: int | None = None
    """Most disk space of its files, MiB."""
    max_processes: int | None = None
    """Most processes and threads at once."""
    time_to_live_s: float = 900.0
    """Seconds after which the sandbox is ended, whatever it is doing."""
    network: Network = Network.NONE
    max_output_bytes: int = 1 << 20
    """Most bytes that are kept of each of standard output and error of one command."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names that a provider with a console shows with the sandbox."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no provider could accept, such as half a process."""
        if self.network not in tuple(Network):
            known = ", ".join(Network)
            raise ConfigError(f"network of a sandbox must be one of {known}, got {self.network!r}")
        # A text that equals a member is not it: where providers look with `is`, "none" would be on.
        object.__setattr__(self, "network", Network(self.network))
        image = cast(object, self.image)
        if image is not None and not (isinstance(image, str) and image.strip()):
            raise ConfigError(
                "image of a sandbox must be the name of an image or template, or None, got "
                f"{image!r}"
            )
        for name in ("cpus", "memory_mb", "disk_mb", "max_processes", "time_to_live_s"):
            value: object = getattr(self, name)
            if value is not None or name == "time_to_live_s":
                is_whole = name in ("memory_mb", "disk_mb", "max_processes")
                require_amount(f"{name} of a sandbox", value, is_whole=is_whole)
        kept: object = self.max_output_bytes
        if type(kept) is not int or not 0 <= kept <= MOST_OUTPUT_BYTES:
            raise ConfigError(
                "max_output_bytes of a sandbox must be a whole number from 0 to "
                f"{MOST_OUTPUT_BYTES}, got {kept!r}"
            )

    def asked_limits(self) -> dict[Limit, object]:
        """Return the limits that are set here, with their values."""
        asked: dict[Limit, object] = {
            limit: getattr(self, limit.value)
            for limit in (Limit.IMAGE, Limit.CPUS, Limit.MEMORY, Limit.DISK, Limit.PROCESSES)
            if getattr(self, limit.value) is not None
        }
        asked[Limit.TIME_TO_LIVE] = self.time_to_live_s
        asked[Limit(f"network={self.network}")] = str(self.network)
        return asked


class StopCause(StrEnum):
    """The reason why a command ended."""

    EXITED = "exited"
    """It ended by itself, or by a signal of its own."""
    TIMEOUT = "timeout"
    """It was killed because it took longer than its `timeout_s`."""
    MEMORY = "memory"
    """It, or one of its processes, was killed because the sandbox reached its memory limit."""
    SANDBOX_ENDED = "sandbox_ended"
    """The sandbox ended meanwhile: its time to live was over, or the program crashed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of one command in a sandbox."""

    exit_code: int
    """Exit code of the command; 128 + N if signal N ended it."""
    stdout: bytes = b""
    """Standard output, at most `max_output_bytes` of its beginning."""
    stderr: bytes = b""
    """Standard error, at most `max_output_bytes` of its beginning."""
    num_dropped_bytes: int = 0
    """Bytes of output beyond what was kept."""
    wall_s: float = 0.0
    """Seconds from the start of the command to its end."""
    stop: StopCause = StopCause.EXITED

    @property
    def succeeded(self) -> bool:
        """Whether the command ended by itself with exit code 0."""
        return self.exit_code == 0 and self.stop is StopCause.EXITED

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are shown as replacement characters."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """Standard error as text; bytes that are no UTF-8 are replaced."""
        return self.stderr.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One entry of a folder in a sandbox."""

    name: str
    is_folder: bool
    size_bytes: int
    """Size of a file; 0 for anything else."""


class Sandbox(Protocol):
    """A place in which commands run, apart from this machine and from other sandboxes.

    Commands of one sandbox run one after another. Processes that a command leaves running may be
    ended with it. Files stay until `close`.
    """

    @property
    def id(self) -> str:
        """Name of the sandbox at its provider."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it is known that no further command can run."""
        ...

    @property
    def measures(self) -> Mapping[str, str]:
        """The means by which each limit is set, such as {"memory_mb": "cgroup v2: 512 MiB"}."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> CommandResult:
        """Run a command and return its result; `folder` None is `WORK_FOLDER`.

        Raises SandboxError if the provider failed, which says nothing about the command.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Return the content of a file; raises SandboxFileError if it cannot be read."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Write a file and the folders above it; raises SandboxFileError if there is no room."""
        ...

    async def list(self, path: str = ".") -> list[FileEntry]:
        """Return the entries of a folder by name; raises SandboxFileError if it is none."""
        ...

    def opened(self, host: str, port: int) -> AbstractAsyncContextManager[str]:
        """Open one address of this machine's network to the programs inside, during a block.

        Yields the `host:port` by which they reach it. Raises SandboxLimitError for a sandbox that
        was made with `Network.NONE`, and SandboxError where the provider cannot open it.
        """
        ...

    async def close(self) -> None:
        """End all programs in it and release it. Idempotent, also if it has already ended."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes."""

    @property
    def name(self) -> str:
        """Name under which it is looked up."""
        ...

    @property
    def limits(self) -> Mapping[Limit, str]:
        """Limits that it can set, each with the means."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that is ready to run commands.

        Raises SandboxLimitError for a limit that it cannot give, and SandboxError when it failed.
        """
        ...

    async def close(self) -> None:
        """Close every sandbox that is still open. Idempotent."""
        ...
