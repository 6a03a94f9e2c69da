"""The protocol of sandboxes, which every provider implements, its data types and its errors.

A program that fails, reaches a limit or is killed has a result. Only a provider that fails raises
`SandboxError`. An invalid amount, such as half a process, is an error for any provider; one that a
provider cannot supply may be possible at another, and is refused when a sandbox is created.
`telescope_core.sandboxes.lookup` finds providers by name.
"""

import math
import posixpath
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, cast

from telescope_core.base.errors import ConfigError, TelescopeError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAmount:
    """The amounts of one resource that a provider can supply."""

    most: int
    why_most: str
    """The reason for `most`, as in "this machine has 8"."""
    least: float = 0
    why_least: str = ""
    multiple_of: int = 0
    """Step of possible amounts; 0 = any amount."""

    def refusal(self, value: float) -> str:
        """Return why `value` cannot be supplied, as in "at most 8, ..."; empty if it can."""
        if value > self.most:
            return f"at most {self.most}, {self.why_most}"
        if value < self.least:
            return f"at least {self.least:g}, {self.why_least}"
        if self.multiple_of and value % self.multiple_of:
            return f"only multiples of {self.multiple_of}"
        return ""


ANY_CPUS = ResourceAmount(most=1 << 20, why_most="beyond which there is no machine")
ANY_MB = ResourceAmount(most=1 << 31, why_most="beyond which there is no machine")
"""2 PiB; services count MiB in 32 bits."""
ANY_SECONDS = ResourceAmount(most=2**31 - 61, why_most="the most that its timer counts")
"""68 years, with a minute to spare."""


def require_amount(name: str, value: object, *, is_whole: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number above 0, and a whole one if it must be.

    `name`: name for errors, such as "memory_mb of a sandbox".
    """
    kind = "a whole number" if is_whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be {kind}, got {value!r}")
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, got {value!r}")
    if isinstance(value, float) and (is_whole or math.isinf(value)):
        raise ConfigError(f"{name} must be {kind if is_whole else 'finite'}, got {value!r}")


def require_command(argv: Sequence[str], timeout_s: object, cpu_timeout_s: object) -> None:
    """Raise ValueError without a word, ConfigError for limits that are none; None sets no limit."""
    if not argv:
        raise ValueError("a command must have at least one word, got none")
    require_amount("timeout_s of a command", timeout_s)
    if cpu_timeout_s is not None:
        require_amount("cpu_timeout_s of a command", cpu_timeout_s)


def cpu_limits(cpu_timeout_s: float) -> tuple[int, int]:
    """Return the seconds after which the kernel sends SIGXCPU, and SIGKILL to who ignores that."""
    soft = math.ceil(min(cpu_timeout_s, ANY_SECONDS.most))
    return soft, soft + 1


def whole_units(value: float | None, unit: int) -> int | None:
    """Return an amount in the whole units that a service counts in; None stays None."""
    return None if value is None else int(value // unit)


WORK_FOLDER = "/tmp/work"
"""Folder inside every sandbox in which commands start; relative paths start there too."""
KILLED = 137
"""Exit code of a program ended by SIGKILL: 128 + 9."""
OUT_OF_CPU_TIME = 152
"""Exit code of a program ended by SIGXCPU, at the limit of its processor time: 128 + 24."""
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
    """It was killed because it took longer than its `timeout_s` or its `cpu_timeout_s`."""
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


def with_cpu_stop(result: CommandResult, cpu_timeout_s: float | None) -> CommandResult:
    """Return `result` with the cause TIMEOUT if its command reached its `cpu_timeout_s`."""
    if cpu_timeout_s and result.exit_code == OUT_OF_CPU_TIME and result.stop is StopCause.EXITED:
        return replace(result, stop=StopCause.TIMEOUT)
    return result


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
        cpu_timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> CommandResult:
        """Run a command and return its result; `folder` None is `WORK_FOLDER`.

        `timeout_s` counts on the clock. `cpu_timeout_s` limits the processor time of each process
        of the command, rounded up to whole seconds; None sets no such limit.

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


class SandboxError(TelescopeError):
    """A provider failed, which is not the program's fault: the rollout is played again."""

    exit_code = 6
    is_transient = True


class SandboxUnavailableError(ConfigError):
    """This machine or account cannot create sandboxes with a provider; says what to do."""


class SandboxLimitError(ConfigError):
    """A provider cannot set a limit that was requested."""


class SandboxFileError(OSError):
    """A file in a sandbox is missing, no file, or has no room: often the program's fault."""

    is_transient = False


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
