"""Start a sandbox with its supervisor, send it requests and receive answers.

Sandboxes are forked from a `Template`, one running bubblewrap, which costs a third of starting
another user's program, bubblewrap and an interpreter. Where that is not possible, `start` does so.
"""

import asyncio
import contextlib
import json
import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telescope_core.sandboxes.local.bubblewrap import (
    Descriptors,
    InnerLimits,
    Interpreter,
    bubblewrap_words,
    drop_words,
    template_words,
)
from telescope_core.sandboxes.protocol import SandboxError

_START_S = 30.0
_END_S = 10.0
_MOST_SAID_BYTES = 2000
_MAX_ANSWER_BYTES = 1 << 30
_CREDENTIALS_BYTES = 12
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""Environment of bubblewrap itself; programs inside have another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """The parts that all sandboxes of a provider share."""

    program: str
    """Path of bubblewrap."""
    interpreter: Interpreter
    supervisor: bytes
    """Byte code of the supervisor."""
    template: bytes
    """Byte code of the program that forks sandboxes."""
    filter: bytes
    """The seccomp filter."""
    read_only: tuple[str, ...]

    @property
    def is_hidden_in_forks(self) -> bool:
        """Whether a fork's own `/tmp` and `/dev/shm` would hide a file that it needs."""
        needed = map(Path, (self.interpreter.path, self.interpreter.prefix, *self.read_only))
        return any(path.is_relative_to(own) for path in needed for own in ("/tmp", "/dev/shm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of the supervisor."""

    kind: bytes
    """`r` ready, `s` the exit code of a command, `d` data, `l` a port that is listened on, `e` an
    error's text."""
    data: bytes
    descriptor: int = -1
    """An open file that came with the answer."""


class Started:
    """A running sandbox, and the connection to its supervisor."""

    def __init__(
        self, process: asyncio.subprocess.Process | None, connection: socket.socket
    ) -> None:
        """Take over bubblewrap and our end of the connection; see `start`.

        Without bubblewrap it is a fork of the template, which ends by itself.
        """
        self._process = process
        self._connection = connection
        self._pidfd = -1
        self.pid = 0
        """Process id of the supervisor, as seen from this machine."""
        self.has_landlock = False
        self.complaint = ""
        """Reason why a fork of the template did not become a sandbox."""

    async def answer(self) -> Answer | None:
        """Return the next answer; None if the supervisor has ended."""
        try:
            head = await self._receive(9)
            size = int.from_bytes(head[1:], "big")
            if size > _MAX_ANSWER_BYTES:
                return None
            return Answer(kind=head[:1], data=await self._receive(size))
        except (OSError, EOFError):
            return None

    async def ask(self, request: Mapping[str, object], descriptors: Sequence[int] = ()) -> bool:
        """Send a request, with open files; returns False if the supervisor has ended."""
        payload = marshal.dumps(dict(request), 2)
        try:
            socket.send_fds(self._connection, [len(payload).to_bytes(8, "big")], [*descriptors])
            await asyncio.get_running_loop().sock_sendall(self._connection, payload)
        except OSError:
            return False
        return True

    async def listening(self) -> Answer | None:
        """Request a socket that listens inside; the caller must close its descriptor."""
        if not await self.ask({"op": "listen"}):
            return None
        await _readable(self._connection.fileno())
        # Only the first bytes of an answer bring the descriptor, and only to who asks for it.
        try:
            head, descriptors, _, _ = socket.recv_fds(
                self._connection, 9, 1, socket.MSG_CMSG_CLOEXEC
            )
            data = await self._receive(int.from_bytes(head[1:], "big")) if head else b""
        except (OSError, EOFError):
            return None
        descriptor = descriptors[0] if descriptors else -1
        return Answer(kind=head[:1], data=data, descriptor=descriptor) if head else None

    def end_command(self) -> None:
        """Request the end of the running command."""
        payload = marshal.dumps({"op": "kill"}, 2)
        with contextlib.suppress(OSError):
            self._connection.send(len(payload).to_bytes(8, "big") + payload)

    def kill(self) -> None:
        """Kill the supervisor, and with it everything in its namespace. Idempotent.

        One whose id is not known yet ends by itself when its connection closes.
        """
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until the first process has ended, which it does after all others."""
        if self._process is None:
            if self._pidfd >= 0:  # or else it ended before its id was known
                await _readable(self._pidfd)
        else:
            try:
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        self._connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    async def introduced(self) -> int:
        """Return the process id of a fork of the template, or 0 if it failed.

        It comes with the first message, as the kernel knows it: the fork itself sees another.
        The connection must have asked for it before the fork was.
        """
        await _readable(self._connection.fileno())
        head, extra, _, _ = self._connection.recvmsg(9, socket.CMSG_SPACE(_CREDENTIALS_BYTES))
        # Later messages may bring a descriptor, and have no room for both.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        if head[:1] == b"p":
            [(_, _, credentials)] = extra
            return int.from_bytes(credentials[:4], sys.byteorder)
        if head:
            said = await self._receive(int.from_bytes(head[1:], "big"))
            self.complaint = said.decode(errors="replace")
        return 0

    async def become_ready(self, pid: int, on_pid: Callable[[int], None]) -> bool:
        """Wait until the supervisor, process `pid`, answers; returns False if it ended instead.

        `on_pid` is called in a thread, while the supervisor starts: the kernel may take 10 ms to
        move a process to a control group.
        """
        if not pid:
            return False
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            last = await self.answer()
            self.complaint = last.data.decode(errors="replace") if last else ""
            return False

        def move() -> None:
            # One that has ended by now has said why, or nothing.
            with contextlib.suppress(ProcessLookupError):
                on_pid(pid)

        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(move))
            answering = group.create_task(self.answer())
        first = answering.result()
        if first is None or first.kind != b"r":
            self.complaint = first.data.decode(errors="replace") if first else ""
            return False
        self.has_landlock = first.data == b"1"
        return True

    async def _receive(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            part = await loop.sock_recv(self._connection, min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


async def started_by(starting: "asyncio.Task[Started]") -> Started:
    """Await `starting` and return its process; if cancelled, end the process.

    Bubblewrap that is killed while it begins would leave its child behind, waiting for ever.
    """
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.create_task(_abandon(starting)))
        raise


async def _abandon(starting: "asyncio.Task[Started]") -> None:
    with contextlib.suppress(SandboxError):
        started = await starting
        started.kill()
        await started.wait()


async def start(
    ingredients: Ingredients, limits: InnerLimits, on_pid: Callable[[int], None]
) -> Started:
    """Start a sandbox by bubblewrap; raises SandboxError with what it said when it cannot.

    `on_pid` gets the process id of the supervisor; it may raise OSError, which ends the sandbox.
    """
    with contextlib.ExitStack() as passed:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        passed.callback(theirs.close)
        said = passed_memory_file(passed, b"")
        seccomp = passed_memory_file(passed, ingredients.filter)
        code = passed_memory_file(passed, ingredients.supervisor)
        # After all that may fail, as this end is closed below.
        status_reader, status_writer = os.pipe()
        passed.callback(os.close, status_reader)
        descriptors = Descriptors(
            status=status_writer, filter=seccomp, code=code, connection=theirs.fileno()
        )
        words = bubblewrap_words(
            ingredients.program,
            ingredients.interpreter,
            descriptors,
            limits,
            ingredients.read_only,
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *(*drop_words(), *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=said,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=(
                    *(descriptors.status, descriptors.filter),
                    *(descriptors.code, descriptors.connection),
                ),
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"a local sandbox could not be started: {error}") from error
        finally:
            os.close(status_writer)
        theirs.close()
        started = Started(process, ours)
        await made_ready(started, _pid_in(status_reader), on_pid, lambda: text_of(said))
        return started


async def made_ready(
    started: Started,
    introduction: Coroutine[Any, Any, int],
    on_pid: Callable[[int], None],
    said: Callable[[], str],
) -> None:
    """Wait until a sandbox is ready; ends it and raises SandboxError if it does not become so.

    `introduction` returns the process id of its supervisor, or 0 if there will be none.
    """
    is_ready, error = False, ""
    try:
        async with asyncio.timeout(_START_S):
            is_ready = await started.become_ready(await introduction, on_pid)
    except TimeoutError:
        error = f"it was not ready after {_START_S:g} s"
    except ExceptionGroup as errors:
        error = f"its control group: {errors.exceptions[0]}"
    finally:
        if not is_ready:
            started.kill()
            await asyncio.shield(started.wait())
    if not is_ready:
        reason = error or started.complaint or said()
        raise SandboxError(f"a local sandbox could not be started: {reason}")


async def _pid_in(status: int) -> int:
    """Return the process id in bubblewrap's first line about itself; 0 if it ended before."""
    said = b""
    while b"\n" not in said:
        await _readable(status)
        # It is written in pieces.
        part = os.read(status, 4096)
        if not part:
            return 0
        said += part
    return int(json.loads(said.splitlines()[0])["child-pid"])


async def _readable(descriptor: int) -> None:
    """Wait until there is something to read, or the end; of a process, until it has ended."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(descriptor)


def memory_file(content: bytes) -> int:
    """Return the descriptor of a file in memory that holds `content`, at its beginning."""
    descriptor = os.memfd_create("telescope-sandbox")
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def passed_memory_file(passed: contextlib.ExitStack, content: bytes) -> int:
    """Return such a descriptor, which is closed with `passed`."""
    descriptor = memory_file(content)
    passed.callback(os.close, descriptor)
    return descriptor


def text_of(descriptor: int) -> str:
    """Return the end of bubblewrap's error output in a file."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, _MOST_SAID_BYTES, max(0, size - _MOST_SAID_BYTES))
    return data.decode(errors="replace").strip() or "bubblewrap said nothing"


class Template:
    """A running template. It ends with this process, or after a minute without a sandbox.

    See `zygote.py` for what a fork does before a program may run in it.
    """

    def __init__(self, ingredients: Ingredients) -> None:
        """Start it; raises SandboxError if bubblewrap cannot be started."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with contextlib.ExitStack() as passed:
            passed.callback(theirs.close)
            descriptors = Descriptors(
                status=-1,
                filter=-1,
                code=passed_memory_file(passed, ingredients.supervisor),
                connection=theirs.fileno(),
                template=passed_memory_file(passed, ingredients.template),
            )
            words = template_words(
                ingredients.program, ingredients.interpreter, descriptors, ingredients.read_only
            )
            self._said = os.memfd_create("telescope-sandbox")
            try:
                self._process = subprocess.Popen(
                    [*drop_words(), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    env=ENVIRONMENT,
                    cwd="/",
                    pass_fds=(descriptors.code, descriptors.template, descriptors.connection),
                )
            except OSError as error:
                self._control.close()
                os.close(self._said)
                raise SandboxError(f"a local sandbox could not be started: {error}") from error
            # While this process has the other end too: who asks for a fork is told why it ended.
            self._control.send(ingredients.filter)

    @property
    def is_running(self) -> bool:
        """Whether it is running; its connection shows first that it has ended."""
        try:
            self._control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._process.poll() is None
        except OSError:
            return False
        return False

    async def fork(self, limits: InnerLimits, on_pid: Callable[[int], None]) -> Started:
        """Start a sandbox, as `start` does with bubblewrap alone."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        wanted = (
            *(limits.max_processes, limits.disk_bytes, limits.address_bytes),
            limits.time_to_live_s,
        )
        try:
            await self._send(marshal.dumps(wanted, 2), theirs.fileno())
        except OSError as error:
            ours.close()
            said = text_of(self._said)
            raise SandboxError(
                f"the template of local sandboxes has ended ({error}): {said}"
            ) from error
        finally:
            theirs.close()
        started = Started(None, ours)
        await made_ready(started, started.introduced(), on_pid, lambda: text_of(self._said))
        return started

    async def close(self) -> None:
        """End it, and every sandbox that was forked from it."""
        self._control.close()
        await asyncio.to_thread(self._ended)
        if self._said >= 0:
            os.close(self._said)
            self._said = -1

    def _ended(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _send(self, message: bytes, descriptor: int) -> None:
        """Send a request; with many at once, waits until there is room."""
        while True:
            try:
                socket.send_fds(self._control, [message], [descriptor])
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
