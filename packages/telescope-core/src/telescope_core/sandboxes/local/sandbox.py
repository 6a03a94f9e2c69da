"""One local sandbox: commands one after another, their output and memory, files, and its end."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

from telescope_core.sandboxes.local.cgroups import ControlGroup
from telescope_core.sandboxes.local.relay import relayed
from telescope_core.sandboxes.local.started import Answer, Started, memory_file
from telescope_core.sandboxes.protocol import (
    KILLED,
    CommandResult,
    FileEntry,
    SandboxError,
    SandboxFileError,
    SandboxSpec,
    StopCause,
    absolute,
    cpu_limits,
    require_command,
    require_endpoint,
    with_cpu_stop,
)

_EVERY_S = 0.02
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


async def watch_memory(root_pid: int, max_bytes: int, on_exceeded: Callable[[], None]) -> None:
    """Call `on_exceeded` once when `root_pid` and its descendants use more than `max_bytes`.

    Without control groups, the kernel limits each process alone, and a program may start many.
    """
    while held_bytes(root_pid) <= max_bytes:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(_EVERY_S)
    on_exceeded()


def held_bytes(root_pid: int) -> int:
    """Return the memory of a process and its descendants, without pages of files."""
    waiting, total = [root_pid], 0
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            _, resident, shared, *_ = (folder / "statm").read_text().split()
            total += max(0, int(resident) - int(shared)) * _PAGE_BYTES
            for thread in (folder / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
    return total


_CHUNK_BYTES = 1 << 16


class Capture:
    """A pipe that the event loop empties while a program writes to it, so that it never waits."""

    def __init__(self, max_bytes: int) -> None:
        """Open the pipe; `max_bytes` are kept."""
        self._loop = asyncio.get_running_loop()
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.num_dropped_bytes = 0
        self._is_open = True
        self._loop.add_reader(self._reader, self._read_some)

    def finish(self) -> bytes:
        """Read the rest of the pipe, close it, and return the output that was kept."""
        while self._is_open and self._read_some():
            pass
        self.close()
        return bytes(self._kept)

    def close_writer(self) -> None:
        """Close our copy of the writing end; only the program's own then keeps the pipe open."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self.close_writer()
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._reader)
            os.close(self._reader)

    def _read_some(self) -> bool:
        """Read once, and return whether there was data."""
        try:
            data = os.read(self._reader, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        room = self._max_bytes - len(self._kept)
        self._kept += data[: max(0, room)]
        self.num_dropped_bytes += max(0, len(data) - max(0, room))
        return True


_KILL_S = 5.0
_FILE_S = 30.0
_MAX_FILE_BYTES = 256 << 20


class LocalSandbox:
    """A sandbox of the provider `local`."""

    def __init__(
        self,
        started: Started,
        group: ControlGroup | None,
        spec: SandboxSpec,
        *,
        watched_bytes: int,
        environment: Mapping[str, str],
        measures: Mapping[str, str],
        on_closed: Callable[["LocalSandbox"], None],
    ) -> None:
        """`watched_bytes`: memory limit to watch if no control group sets it; else 0."""
        self.id = f"local-{started.pid}"
        self.measures = measures
        self._started = started
        self._group = group
        self._spec = spec
        self._watched_bytes = watched_bytes
        self._environment = environment
        self._on_closed = on_closed
        self._lock = asyncio.Lock()
        self._ended: StopCause | None = None
        self._closing: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(spec.time_to_live_s, self._expire)

    @property
    def is_alive(self) -> bool:
        """Whether further commands can run."""
        return self._ended is None and self._closing is None

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
        """Run a command; all processes that it started have ended when this returns."""
        require_command(argv, timeout_s, cpu_timeout_s)
        request = {
            "op": "run",
            "argv": tuple(argv),
            "environment": {**self._environment, **(environment or {})},
            "folder": absolute(folder or "."),
            "cpu_limits": cpu_limits(cpu_timeout_s) if cpu_timeout_s else (),
        }
        async with self._lock:
            if self._ended is not None and self._closing is None:
                return CommandResult(exit_code=KILLED, stop=self._ended)
            self._require_open()
            result = await self._run(request, stdin, timeout_s)
            return with_cpu_stop(result, cpu_timeout_s)

    async def read(self, path: str) -> bytes:
        """Return the content of a file, at most 256 MiB."""
        return await self._ask_file({"op": "read", "path": absolute(path), "most": _MAX_FILE_BYTES})

    async def write(self, path: str, content: bytes) -> None:
        """Write a file and the folders above it."""
        await self._ask_file({"op": "write", "path": absolute(path), "content": content})

    async def list(self, path: str = ".") -> list[FileEntry]:
        """Return the entries of a folder by name."""
        data = await self._ask_file({"op": "list", "path": absolute(path)})
        rows = [row.split(b" ", 2) for row in data.split(b"\0") if row]
        entries = [
            FileEntry(name=os.fsdecode(name), is_folder=kind == b"1", size_bytes=int(size))
            for kind, size, name in rows
        ]
        return sorted(entries, key=lambda entry: entry.name)

    @contextlib.asynccontextmanager
    async def opened(self, host: str, port: int) -> AsyncGenerator[str]:
        """Let programs reach `host:port` during a block; yields the address for them."""
        require_endpoint(self.id, self._spec)
        async with self._lock:
            self._require_open()
            if self._ended is not None:
                raise SandboxError(f"sandbox {self.id} has ended; make another one")
            answer = await self._whole(asyncio.create_task(self._started.listening()))
        if answer.descriptor < 0:
            said = answer.data.decode(errors="replace")
            raise SandboxError(f"sandbox {self.id} cannot listen: {said}")
        async with relayed(answer.descriptor, host, port):
            yield f"127.0.0.1:{int(answer.data)}"

    async def close(self) -> None:
        """End everything in it, and remove its control group."""
        self._started.kill()
        self._expiry.cancel()
        if self._closing is None:
            self._closing = asyncio.create_task(self._finish())
        await asyncio.shield(self._closing)

    async def _finish(self) -> None:
        await self._started.wait()
        if self._group is not None:
            await self._group.removed()
        self._on_closed(self)

    def _expire(self) -> None:
        self._ended = self._ended or StopCause.SANDBOX_ENDED
        self._started.kill()

    def _require_open(self) -> None:
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.id} is closed; make another one")

    async def _run(
        self, request: Mapping[str, object], stdin: bytes, timeout_s: float
    ) -> CommandResult:
        before = self._group.num_killed() if self._group is not None else 0
        began_s = time.monotonic()
        captures: list[Capture] = []
        try:
            while len(captures) < 2:
                captures.append(Capture(self._spec.max_output_bytes))
            given = memory_file(stdin)
            try:
                readable = os.open(f"/proc/self/fd/{given}", os.O_RDONLY)
            finally:
                os.close(given)
            try:
                files = (readable, *(capture.writer for capture in captures))
                await self._started.ask(request, files)
            finally:
                os.close(readable)
            for capture in captures:
                capture.close_writer()
            stop, answer = await self._answer_within(timeout_s)
            if answer is not None and answer.kind == b"e":
                raise SandboxError(f"sandbox {self.id}: {answer.data.decode(errors='replace')}")
            if answer is None:
                stop = self._lost(stop)
            if self._group is not None and self._group.num_killed() > before:
                stop = StopCause.MEMORY
            stdout, stderr = (capture.finish() for capture in captures)
        finally:
            for capture in captures:
                capture.close()
        return CommandResult(
            exit_code=KILLED if answer is None else int(answer.data),
            stdout=stdout,
            stderr=stderr,
            num_dropped_bytes=sum(capture.num_dropped_bytes for capture in captures),
            wall_s=time.monotonic() - began_s,
            stop=stop,
        )

    async def _answer_within(self, timeout_s: float) -> tuple[StopCause, Answer | None]:
        """Return why the command ended, and the supervisor's answer; None without an answer."""
        answer = asyncio.create_task(self._started.answer())
        waited: set[asyncio.Task[object]] = {answer}
        stop, watch = StopCause.EXITED, None
        if self._watched_bytes:
            watch = asyncio.create_task(
                watch_memory(self._started.pid, self._watched_bytes, self._started.end_command)
            )
            waited.add(watch)
        try:
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                stop = StopCause.MEMORY if watch and watch.done() else StopCause.TIMEOUT
        finally:
            if watch is not None:
                watch.cancel()
            if not answer.done():
                await self._end_command(answer)
        return stop, answer.result()

    async def _end_command(self, answer: "asyncio.Task[Answer | None]") -> None:
        """End the running command; if that fails, end the sandbox."""
        self._started.end_command()
        try:
            await asyncio.wait([answer], timeout=_KILL_S)
        finally:
            if not answer.done():
                self._expire()
                await answer

    def _lost(self, stop: StopCause) -> StopCause:
        """Record that the supervisor ended, because of the program or the time to live."""
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.id} was closed while a command ran in it")
        self._ended = self._ended or StopCause.SANDBOX_ENDED
        return self._ended if stop is StopCause.EXITED else stop

    async def _ask_file(self, request: Mapping[str, object]) -> bytes:
        async with self._lock:
            self._require_open()
            if self._ended is not None:
                raise SandboxFileError(f"sandbox {self.id} has ended, and its files with it")
            answer = await self._whole(asyncio.create_task(self._ask(request)))
        if answer.kind == b"e":
            said = answer.data.decode(errors="replace")
            raise SandboxFileError(f"{request['path']} in sandbox {self.id}: {said}")
        return answer.data

    async def _whole(self, answering: "asyncio.Task[Answer | None]") -> Answer:
        """Return the answer to a request; a supervisor that does not answer ends the sandbox.

        A canceled caller waits for its answer, so that it is not taken for that of the next
        request.
        """
        answer = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FILE_S):
                    answer = await asyncio.shield(answering)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_S):
                    late = await asyncio.shield(answering)
                if late is not None and late.descriptor >= 0:
                    os.close(late.descriptor)
            raise
        finally:
            if not answering.done():
                self._expire()
                await answering
        if answer is None:
            self._ended = self._ended or StopCause.SANDBOX_ENDED
            raise SandboxError(f"sandbox {self.id} did not answer")
        return answer

    async def _ask(self, request: Mapping[str, object]) -> Answer | None:
        await self._started.ask(request)
        return await self._started.answer()
