"""Shared by providers that are reached over a network: one shell command in, one text out.

Services differ in their support for commands: standard input, separate output streams, a time limit
that keeps the sandbox alive. A small script around each command provides all of them, and needs
only a POSIX shell, coreutils and base64 in the image.
"""

import asyncio
import base64
import contextlib
import itertools
import posixpath
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import import_module
from shlex import quote
from typing import Any, Protocol

from telescope_core.base.errors import TelescopeError
from telescope_core.sandboxes.protocol import (
    KILLED,
    WORK_FOLDER,
    CommandResult,
    FileEntry,
    Limit,
    ResourceAmount,
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxSpec,
    SandboxUnavailableError,
    StopCause,
    absolute,
    cpu_limits,
    require_command,
    require_endpoint,
    require_limits,
    with_cpu_stop,
)

_OVERHEAD_S = 60.0
_FILES_S = 60.0
_DOWNLOAD_S = 120.0
_CANCEL_S = 5.0
_ENDING_S = 5.0
"""Margin in seconds: a service counts the time to live from before the sandbox is known here."""
_SCRIPT = """d=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d) || exit 90
: >"$d/o"; : >"$d/e"; exec 5<"$d/o" 6<"$d/e" 7>"$d/o" 8>"$d/e" 9<{stdin}; rm -rf "$d" {stdin_file}
mkdir -p {work}; cd {folder} || exit 91
({cpu_limit}exec timeout -s KILL {timeout_s} env {environment} {command}) \\
  <&9 >&7 2>&8 5<&- 6<&- 7>&- 8>&- 9<&-
c=$?; f=/proc/self/fd
printf 'ended %s %s %s\\n' "$c" "$(wc -c <$f/5)" "$(wc -c <$f/6)"
head -c {cap} <$f/5 | base64; echo -
head -c {cap} <$f/6 | base64; echo -"""
"""Its files are unlinked once the command runs, so that nothing can find or remove them."""
_CPU_LIMIT = "ulimit -S -c 0; ulimit -S -t {0}; ulimit -H -t {1}; "
_ANSWER = re.compile(r"ended (\d+) +(\d+) +(\d+)\n([^-]*)-\n([^-]*)-")
_LIST = (
    'cd {path} || exit 1; for f in * .[!.]* ..?*; do [ -e "$f" ] || [ -h "$f" ] || continue; '
    'if [ -d "$f" ]; then k=1 s=0; elif [ -f "$f" ]; then k=0 s=$(wc -c <"$f"); else k=0 s=0; fi; '
    'printf "%s %s %s\\n" $k $s "$(printf %s "$f" | base64 | tr -d "\\n")"; done'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellAnswer:
    """A service's answer to one shell command."""

    exit_code: int
    output: str
    """Its standard output, which may be followed by standard error."""


Opening = Callable[[str, int], AbstractAsyncContextManager[str]]
"""Opens host and port during a block, as `Sandbox.opened`."""


class Service(Protocol):
    """One sandbox at a service, with four calls that raise only SandboxErrors.

    It may have `opened`, which opens an address of this machine to the programs of the sandbox.
    """

    @property
    def id(self) -> str:
        """Its name there."""
        ...

    async def shell(self, command: str, timeout_s: float) -> ShellAnswer:
        """Run a command in `sh`; after `timeout_s`, the service is given up."""
        ...

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file whose folder exists."""
        ...

    async def download(self, path: str) -> bytes:
        """Return the content of an existing file."""
        ...

    async def delete(self) -> None:
        """End the sandbox, even if it has already ended."""
        ...


class RemoteSandbox:
    """A sandbox at a service."""

    def __init__(
        self,
        service: Service,
        spec: SandboxSpec,
        measures: Mapping[str, str],
        on_closed: Callable[["RemoteSandbox"], None],
    ) -> None:
        """`on_closed` is called when the service has ended it."""
        self.id = service.id
        self.measures = measures
        self._service = service
        self._spec = spec
        self._on_closed = on_closed
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._ends_s = time.monotonic() + spec.time_to_live_s
        self._closing: asyncio.Task[None] | None = None
        self._is_broken = False

    @property
    def is_alive(self) -> bool:
        """Whether it is open and within its time to live."""
        is_in_time = time.monotonic() < self._ends_s
        return self._closing is None and not self._is_broken and is_in_time

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
        """Run a command; SandboxError if the service failed, not if the command did."""
        require_command(argv, timeout_s, cpu_timeout_s)
        # No command outlives its sandbox; services cannot count some times that are longer.
        timeout_s = min(timeout_s, self._spec.time_to_live_s + _OVERHEAD_S)
        async with self._lock:
            self._require_open()
            if time.monotonic() >= self._ends_s:
                return CommandResult(exit_code=KILLED, stop=StopCause.SANDBOX_ENDED)
            given = "/dev/null"
            if stdin:
                given = f"/tmp/.stdin-{next(self._numbers)}"
                await self._service.upload(given, stdin)
            script = self._script(argv, given, timeout_s, cpu_timeout_s, environment or {}, folder)
            began_s = time.monotonic()
            calling = asyncio.ensure_future(self._service.shell(script, timeout_s + _OVERHEAD_S))
            try:
                answer = await asyncio.shield(calling)
            except asyncio.CancelledError:
                # The command may go on there, and no service says for certain when it has ended.
                # A cancellation is not for the SDK: one was seen to make an error of its own of it.
                self._is_broken = True
                calling.cancel()
                await asyncio.wait([calling], timeout=_CANCEL_S)
                raise
            except SandboxError:
                if not self._is_ending():
                    raise
                # A service that ended the sandbox may know nothing of the command any more.
                wall_s, stop = time.monotonic() - began_s, StopCause.SANDBOX_ENDED
                return CommandResult(exit_code=KILLED, wall_s=wall_s, stop=stop)
            result = self._result(answer, time.monotonic() - began_s, timeout_s)
            return with_cpu_stop(result, cpu_timeout_s)

    async def read(self, path: str) -> bytes:
        """Return the content of a file."""
        whole = absolute(path)
        async with self._lock:
            await self._require(f"[ -f {quote(whole)} ]", path, "not a file")
            return await self._service.download(whole)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file and the folders above it."""
        whole = absolute(path)
        folder = posixpath.dirname(whole)
        target = quote(whole)
        check = f"mkdir -p {quote(folder)} && {{ [ ! -e {target} ] || [ -f {target} ]; }}"
        async with self._lock:
            await self._require(check, path, "cannot be written")
            await self._service.upload(whole, content)

    async def list(self, path: str = ".") -> list[FileEntry]:
        """Return the entries of a folder by name."""
        command = _LIST.format(path=quote(absolute(path)))
        async with self._lock:
            answer = await self._require(command, path, "not a folder")
        entries: list[FileEntry] = []
        for line in answer.output.splitlines():
            kind, size, name = line.split(" ")
            decoded = base64.b64decode(name).decode(errors="surrogateescape")
            entries.append(FileEntry(name=decoded, is_folder=kind == "1", size_bytes=int(size)))
        return sorted(entries, key=lambda entry: entry.name)

    def opened(self, host: str, port: int) -> AbstractAsyncContextManager[str]:
        """Open an address if the service can; sandboxes elsewhere cannot reach this machine."""
        require_endpoint(self.id, self._spec)
        self._require_open()
        opening: Opening | None = getattr(self._service, "opened", None)
        if opening is None:
            raise SandboxError(f"sandbox {self.id} cannot have {host}:{port} opened to it")
        return opening(host, port)

    async def close(self) -> None:
        """End the sandbox at its service; after an error, another call tries again."""
        closing = self._closing
        if closing is None or (closing.done() and (closing.cancelled() or closing.exception())):
            self._closing = closing = asyncio.create_task(self._delete())
        await asyncio.shield(closing)

    async def _delete(self) -> None:
        await self._service.delete()
        self._on_closed(self)

    def _script(
        self,
        argv: Sequence[str],
        stdin: str,
        timeout_s: float,
        cpu_timeout_s: float | None,
        environment: Mapping[str, str],
        folder: str | None,
    ) -> str:
        given = {"HOME": WORK_FOLDER, **environment}
        return _SCRIPT.format(
            work=quote(WORK_FOLDER),
            folder=quote(absolute(folder or ".")),
            # For `timeout`, 0 would be no limit.
            timeout_s=f"{max(timeout_s, 0.001):.3f}",
            cpu_limit=_CPU_LIMIT.format(*cpu_limits(cpu_timeout_s)) if cpu_timeout_s else "",
            environment=" ".join(quote(f"{name}={value}") for name, value in given.items()),
            command=" ".join(map(quote, argv)),
            stdin=quote(stdin),
            stdin_file="" if stdin == "/dev/null" else quote(stdin),
            cap=self._spec.max_output_bytes,
        )

    def _result(self, answer: ShellAnswer, wall_s: float, timeout_s: float) -> CommandResult:
        match = _ANSWER.search(answer.output)
        if match is None:
            if answer.exit_code == KILLED:
                # The script's own shell was killed: by the end of the sandbox, the command, or for
                # want of memory.
                stop = StopCause.SANDBOX_ENDED if self._is_ending() else StopCause.MEMORY
                return CommandResult(exit_code=KILLED, wall_s=wall_s, stop=stop)
            raise SandboxError(
                f"sandbox {self.id}: a command left no answer (exit code {answer.exit_code}): "
                f"{answer.output[-300:]}"
            )
        exit_code, sizes = int(match[1]), (int(match[2]), int(match[3]))
        stdout, stderr = (base64.b64decode(text) for text in (match[4], match[5]))
        was_slow = exit_code == KILLED and wall_s >= timeout_s
        return CommandResult(
            exit_code=exit_code,
            stdout=stdout,
            stderr=stderr,
            num_dropped_bytes=sum(sizes) - len(stdout) - len(stderr),
            wall_s=wall_s,
            stop=StopCause.TIMEOUT if was_slow else StopCause.EXITED,
        )

    def _is_ending(self) -> bool:
        return time.monotonic() >= self._ends_s - _ENDING_S

    async def _require(self, command: str, path: str, what: str) -> ShellAnswer:
        """Run a command that examines a file; raise SandboxFileError if it fails."""
        self._require_open()
        if time.monotonic() >= self._ends_s:
            raise SandboxFileError(f"sandbox {self.id} has ended, and its files with it")
        answer = await self._service.shell(f"mkdir -p {WORK_FOLDER}; {command}", _FILES_S)
        if answer.exit_code != 0:
            raise SandboxFileError(f"{path} in sandbox {self.id}: {what}")
        return answer

    def _require_open(self) -> None:
        if self._closing is not None or self._is_broken:
            raise SandboxError(f"sandbox {self.id} is closed; make another one")


class CloudProvider(ABC):
    """A provider whose sandboxes are at a service, which is reached through its SDK.

    A subclass says how one is started; a start that is cancelled is undone. A sandbox that the
    service could not end counts as open, so that it is tried again at the end.
    """

    name: str
    """Of the provider, and of the extra of telescope-core that brings its SDK."""
    limits: Mapping[Limit, str]
    """Limits that the service can give one sandbox, and by which means."""
    amounts: Mapping[Limit, ResourceAmount]
    """Amounts of them that it takes."""

    def __init__(self) -> None:
        self._open: set[RemoteSandbox] = set()
        self._client: Any = None

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; raises SandboxUnavailableError without the SDK or a valid key."""
        require_limits(self.name, spec, self.limits, self.amounts)
        starting = asyncio.ensure_future(self.start(spec))
        try:
            service = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.create_task(_abandon(starting)))
            raise
        measures = {limit.value: means for limit, means in self.limits.items()}
        made = RemoteSandbox(service, spec, measures, self._open.discard)
        self._open.add(made)
        return made

    async def close(self) -> None:
        """Close those that are still open; raises the first error once all were tried."""
        try:
            closing = [sandbox.close() for sandbox in tuple(self._open)]
            done = await asyncio.gather(*closing, return_exceptions=True)
        finally:
            client, self._client = self._client, None
            if client is not None:
                await self.leave(client)
        for error in done:
            if error is not None:
                raise error

    async def leave(self, client: Any) -> None:
        """End the connection of the SDK, of a provider that keeps one as `_client`."""
        await client.close()

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> Service:
        """Start a sandbox, whose limits the service can give."""
        ...


async def read_in_shell(service: Service, path: str) -> bytes:
    """Return the content of a file at a service that returns only text."""
    done = await service.shell(f"base64 < {quote(path)}", _DOWNLOAD_S)
    if done.exit_code != 0:
        raise SandboxError(f"sandbox {service.id}: {path} cannot be read")
    return base64.b64decode(done.output)


def sdk_of(provider: str, module: str = "") -> Any:
    """Return a provider's SDK, a module mostly of its name; SandboxUnavailableError without it."""
    try:
        return import_module(module or provider)
    except ImportError as error:
        raise SandboxUnavailableError(
            f"sandbox provider {provider!r} needs its SDK ({error}); run: pip install "
            f"'telescope-core[{provider}]'"
        ) from None


async def _abandon(starting: "asyncio.Future[Service]") -> None:
    """End a sandbox whose caller was cancelled, once it has started."""
    with contextlib.suppress(TelescopeError):
        await (await starting).delete()
