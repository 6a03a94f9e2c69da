"""A thread in every worker that reports the state of the process, even while its loop is blocked.

Several times a second it schedules a callback on the event loop and measures how long that takes.
A blocked loop runs code that should have been awaited or run in a thread, and the beat names it.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from telescope_core.base.process_facts import resident_bytes
from telescope_core.environments.author_errors import as_failure
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
