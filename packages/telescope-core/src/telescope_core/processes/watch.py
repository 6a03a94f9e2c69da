"""A thread in every worker that reports the state of the process, even while its loop is blocked.

Several times a second it schedules a callback on the event loop and measures how long that takes.
A blocked loop runs code that should have been awaited or run in a thread, and the beat names it.

Code that holds the interpreter stops every thread of the worker, this one included. The worker's
supervisor, which a host starts and which forks the worker, sees that in the memory that both share,
and sends the beats in its place. When code has ended the worker, its last beat says which.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from telescope_core.base.open_files import is_ready
from telescope_core.base.process_facts import resident_bytes
from telescope_core.environments.author_errors import as_failure
from telescope_core.environments.held import Noted, Watched
from telescope_core.environments.running import Notes, noting
from telescope_core.environments.tool_threads import DaemonThreads
from telescope_core.processes.frames import Beat, to_bytes
from telescope_core.processes.serve import CALL, ServedCall

P = ParamSpec("P")
T = TypeVar("T")

BEAT_EVERY_S = 0.5
_LOOK_EVERY_S = 0.1
_NAMED_AFTER_S = 0.25
"""Seconds after which a blocked loop is reported together with the blocking code."""
NUM_THREADS = 64


class WorkerThreads(ThreadPoolExecutor):
    """The threads of sync environment code; counts those that outlived their request."""

    def __init__(self) -> None:
        super().__init__(max_workers=NUM_THREADS, thread_name_prefix="environment")
        self._running: set[tuple[int, ServedCall]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` in a thread, on behalf of the current request."""
        call = CALL.get()
        if call is None:
            return super().submit(fn, *args, **kwargs)

        def counted() -> T:
            mark = (threading.get_ident(), call)
            self._running.add(mark)
            try:
                with noting(fn, "thread"):
                    return fn(*args, **kwargs)
            finally:
                self._running.discard(mark)

        return super().submit(counted)

    @property
    def num_stuck(self) -> int:
        """Number of threads that still run code of a request that has ended."""
        return sum(call.has_ended for _, call in list(self._running))


class WorkerWatch:
    """Measures the running loop; a thread calls `send` with each beat and the blocking request."""

    def __init__(
        self,
        threads: WorkerThreads,
        send: Callable[[Beat, ServedCall | None], None],
        notes: Notes | None = None,
    ) -> None:
        """`notes`: memory in which signs of the interpreter are written."""
        self._threads = threads
        self._notes = notes
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._calls: WeakKeyDictionary[asyncio.Task[Any], ServedCall] = WeakKeyDictionary()
        self._asked_s = 0.0
        self._is_asked = False
        self._lag_s = 0.0
        self._loop.set_task_factory(self._task_of_call)
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def _task_of_call(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        call = CALL.get()
        if call is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        if asyncio.iscoroutine(coroutine):
            coroutine = _not_exiting(coroutine)
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        self._calls[task] = call
        return task

    def _watch(self) -> None:
        next_beat_s = time.monotonic()
        while not self._loop.is_closed():
            time.sleep(_LOOK_EVERY_S)
            if self._notes is not None:
                self._notes.beat()
            now_s = time.monotonic()
            blocked_s = now_s - self._asked_s if self._is_asked else 0.0
            if not self._is_asked:
                self._asked_s, self._is_asked = now_s, True
                try:
                    self._loop.call_soon_threadsafe(self._turned)
                except RuntimeError:  # the loop was closed in between
                    return
            if now_s >= next_beat_s:
                next_beat_s = now_s + BEAT_EVERY_S
                self._beat(blocked_s if blocked_s >= _NAMED_AFTER_S else 0.0)

    def _turned(self) -> None:
        self._lag_s = max(self._lag_s, time.monotonic() - self._asked_s)
        self._is_asked = False

    def _beat(self, blocked_s: float) -> None:
        lag_s, self._lag_s = max(self._lag_s, blocked_s), 0.0
        blocked_by, where = None, ""
        if blocked_s:
            task = asyncio.current_task(self._loop)
            blocked_by = self._calls.get(task) if task is not None else None
            frame = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage]
            if frame is not None:
                code = frame.f_code
                where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        beat = Beat(
            lag_s=lag_s,
            blocked_s=blocked_s,
            blocked_where=where,
            memory_bytes=resident_bytes(),
            num_stuck_threads=self._threads.num_stuck + DaemonThreads.num_abandoned,
            io_bytes=io_bytes(),
        )
        self._send(beat, blocked_by)


async def _not_exiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await `coroutine`, and raise its SystemExit as another error, which does not end the loop."""
    try:
        return await coroutine
    except SystemExit as error:
        raise as_failure(error) from error


@contextmanager
def beating(descriptor: int) -> Generator[None]:
    """Send beats over the socket during the block, while there is no event loop yet.

    Imports run in it, which may take any time as long as they read something.
    """
    has_ended = threading.Event()

    def beat() -> None:
        while not has_ended.wait(BEAT_EVERY_S):
            now = Beat(memory_bytes=resident_bytes(), io_bytes=io_bytes())
            with suppress(OSError):  # a host that is gone is noticed later
                os.write(descriptor, to_bytes(now))

    thread = threading.Thread(target=beat, name="beats of the start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Before this process forks: it may have no other thread then.
        has_ended.set()
        thread.join()


def io_bytes() -> int:
    """Return the bytes that this process has read and written, pipes included; 0 without /proc."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])


_MAX_DESCRIPTORS = 4096
_HELD_AFTER_S = 2.0
"""Seconds without a sign of the interpreter after which it counts as blocked."""


def go_on_in_kept_child(guard_fd: int, socket_fd: int, notes: Notes) -> None:
    """Fork, and return only in the child, which leads its own process group.

    This process stays as the supervisor of the child. When the host ends, even by kill -9, the pipe
    behind `guard_fd` closes. When the child ends, another pipe closes. In both cases the supervisor
    ends the process group, and then exits with the child's exit code (128 + n for signal n).
    Programs that environment code starts share that group. When a worker hangs, the host decides
    (`pool`). `socket_fd` leads to the host, and the child writes to `notes`.
    """
    # Nothing is written to this pipe: it closes when the child, which holds the other end, ends.
    alive_read, _alive_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(guard_fd)
        os.close(alive_read)
        return
    with suppress(OSError):  # the child has already done it
        os.setpgid(child, child)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The other end of the pipe to the child is among them.
    for descriptor in range(3, _MAX_DESCRIPTORS):
        if descriptor not in (guard_fd, alive_read, socket_fd):
            with suppress(OSError):
                os.close(descriptor)
    watched = Watched(notes.memory, child)
    while not is_ready(guard_fd, alive_read, wait_s=BEAT_EVERY_S):
        held_s = watched.still_s()
        if held_s > _HELD_AFTER_S:
            _say(socket_fd, child, watched.holder(), held_s=held_s)
    # macOS refuses it for a group of which only its ended leader is left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    culprit = watched.ended_by(code)
    if culprit is not None:
        _say(socket_fd, child, culprit, ended_by=culprit.call)
    os._exit(code if code >= 0 else 128 - code)


def _say(
    socket_fd: int, child: int, code: Noted | None, *, held_s: float = 0.0, ended_by: int = -1
) -> None:
    """Send the host a beat in place of the worker, which sends none while it is blocked."""
    beat = Beat(
        lag_s=held_s,
        blocked_s=held_s,
        blocked_call=-1 if code is None else code.call,
        blocked_where="" if code is None else code.text,
        memory_bytes=resident_bytes(str(child)) if held_s else 0,
        is_held=held_s > 0,
        ended_by=ended_by,
    )
    with suppress(OSError):  # the host is gone, or does not read: it will find out by itself
        os.write(socket_fd, to_bytes(beat))
