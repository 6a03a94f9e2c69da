"""The main thread of a worker: environments are built on it, while the event loop has another.

Python lets only the main thread install signal handlers, and a constructor that calls `asyncio.run`
needs a thread without a running loop. A constructor may also load data for minutes, while the loop
continues to answer.
"""

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

from telescope_core.environments.tool_threads import outcome

Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], None]
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class MainThread:
    """Runs functions on the main thread, one after another, in the order of their arrival."""

    def __init__(self, on_signal: Handler) -> None:
        """`on_signal` handles SIGTERM and SIGINT, whatever handlers a function has installed."""
        self._on_signal = on_signal
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None

    def serve(self, serving: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `serving` on an event loop in a new thread until it ends, and functions meanwhile.

        Call it on the main thread. Raises what `serving` raises.
        """
        self._take_signals()
        thread = threading.Thread(target=self._loop, args=(serving,), name="loop", daemon=True)
        thread.start()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                self._take_signals()
        if self._error is not None:
            raise self._error

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run `function` on the main thread, and return its result or raise its error.

        When the caller is cancelled before `function` began, it does not begin; otherwise it runs
        on, its result is discarded, and later functions wait for it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            if not future.cancelled():
                finish = outcome(lambda: context.run(function), future)
                with suppress(RuntimeError):  # the loop was closed meanwhile: nothing waits
                    loop.call_soon_threadsafe(finish)

        self._jobs.put(job)
        return await future

    def _loop(self, serving: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            asyncio.run(serving())
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            self._error = error
        finally:
            self._jobs.put(None)

    def _take_signals(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
