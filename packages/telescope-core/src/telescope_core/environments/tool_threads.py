"""Run sync code in daemon threads, so that code that never returns does no harm.

asyncio's own thread pool is small, and its threads are joined when the process ends. Code that
never returns would use up the pool and then keep the process from ending. The daemon threads here
are reused as long as their functions return.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import ClassVar, Generic, TypeVar

from telescope_core.base.code_places import raised_at

Result = TypeVar("Result")
_IDLE_S = 10.0
"""Seconds without work after which a thread ends."""

_Job = Callable[[], None]


@dataclass(slots=True)
class _Task:
    """The state of one function call."""

    has_returned: bool = False
    is_abandoned: bool = False


class DaemonThreads:
    """Runs each function immediately, in a free thread or a new one."""

    num_abandoned: ClassVar[int] = 0
    """Threads of all instances in this process that still run although their caller gave up."""
    _counting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_free = 0
        """Waiting threads minus queued jobs."""

    async def run(self, function: Callable[[], Result]) -> Result:
        """Return what `function` returns, or raise what it raises.

        When the caller is cancelled, the thread runs on and its result is discarded.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        context = contextvars.copy_context()
        task = _Task()

        def job() -> None:
            finish = outcome(lambda: context.run(function), future)
            with self._counting:
                task.has_returned = True
                DaemonThreads.num_abandoned -= task.is_abandoned
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:  # the loop was closed meanwhile, so nothing waits for the result
                return

        self._start(job)
        try:
            return await future
        except asyncio.CancelledError:
            with self._counting:
                task.is_abandoned = not task.has_returned
                DaemonThreads.num_abandoned += task.is_abandoned
            raise

    def _start(self, job: _Job) -> None:
        with self._lock:
            is_busy = self._num_free == 0
            if not is_busy:
                self._num_free -= 1
        if is_busy:
            name = "telescope-daemon"
            # A thread keeps its arguments as long as it lives.
            threading.Thread(target=self._work, args=([job],), daemon=True, name=name).start()
        else:
            self._jobs.put(job)

    def _work(self, first: list[_Job]) -> None:
        job = first.pop()
        while True:
            job()
            del job
            with self._lock:
                self._num_free += 1
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._num_free > 0:
                        self._num_free -= 1
                        return
                # `_start` has counted this thread for a job that it is about to queue.
                job = self._jobs.get()


def outcome(function: Callable[[], Result], future: "asyncio.Future[Result]") -> _Job:
    """Run `function` and return a callable that completes `future`; it is called on its loop."""
    try:
        result = function()
    except StopIteration as error:  # the only exception that a future does not accept
        raised: BaseException = RuntimeError(f"StopIteration was raised{raised_at(error)}")
    except BaseException as error:  # noqa: BLE001 - raised again by the code that awaits it
        raised = error
    else:
        return lambda: None if future.done() else future.set_result(result)
    return lambda: None if future.done() else future.set_exception(raised)


class OpenedOnce(Generic[Result]):
    """Something that is opened in a thread when it is first needed, by any event loop, and kept."""

    def __init__(self, open_it: Callable[[], Result]) -> None:
        """`open_it` may take long; it is called again only if it raised."""
        self._open_it = open_it
        self._opening = threading.Lock()
        self.found: Result | None = None
        """None = it has not been opened."""

    async def get(self) -> Result:
        """Return it, opened."""
        return await asyncio.to_thread(self._opened) if self.found is None else self.found

    def _opened(self) -> Result:
        with self._opening:
            if self.found is None:
                self.found = self._open_it()
            return self.found
