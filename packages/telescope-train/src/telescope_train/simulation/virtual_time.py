"""An asyncio event loop whose clock jumps from one timer to the next.

Waiting takes no real time, the order of events is exact, and it is the same every time. Code under
this loop asks `loop.time()` for the time. It may not open sockets, start threads or processes:
nothing would wake the loop. `asyncio.to_thread` is allowed; the function is called at once.
"""

import asyncio
import contextvars
import heapq
import inspect
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

_BACKGROUND = contextvars.ContextVar[bool]("background")
_ASYNCIO = str(Path(asyncio.__file__).parent)


class Deadlock(RuntimeError):
    """Every task waits, and no timer can wake one: the run would hang forever."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that never sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_NeverWaits(self))

    def time(self) -> float:
        """Return the virtual time in seconds; it starts at 0."""
        return self._now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Call `func` at once, in no time: a thread would take real time."""
        del executor
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - a thread would hand on any of them
            future.set_exception(error)
        return future

    def jump(self) -> None:
        """Advance to the time of the next timer; raises Deadlock if there is none."""
        # The heap of timers is private to asyncio and has been the same since Python 3.4. A test
        # with many timers pins it on each Python that is supported.
        timers: list[asyncio.TimerHandle] = self._scheduled  # pyright: ignore[reportAttributeAccessIssue]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False  # pyright: ignore[reportAttributeAccessIssue]
            self._timer_cancelled_count = max(0, self._timer_cancelled_count - 1)
        if not timers:
            raise Deadlock(
                f"at {self._now_s:.3f} s every task waits, and no timer is left that could wake "
                f"one; waiting are: {_waiting(self)}"
            )
        if _is_background(timers[0]) and all(map(_is_background, timers)):
            raise Deadlock(
                f"at {self._now_s:.3f} s every task waits, and only timers of the background are "
                f"left; waiting are: {_waiting(self)}"
            )
        self._now_s = max(self._now_s, timers[0].when())


def in_background(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Return a task for `work`, whose timers alone do not keep the loop going."""
    context = contextvars.copy_context()
    context.run(_BACKGROUND.set, True)
    return asyncio.get_running_loop().create_task(work, context=context)


def _is_background(timer: asyncio.TimerHandle) -> bool:
    context: contextvars.Context = timer._context  # pyright: ignore[reportAttributeAccessIssue]
    return timer.cancelled() or context.get(_BACKGROUND, False)


class _NeverWaits(selectors.SelectSelector):
    """Advances the clock of its loop where another selector would wait for input."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._loop.jump()
        return []


def run_in_virtual_time(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Return the result of `main()`, whose time is virtual.

    Raises Deadlock when `main` waits for something that cannot happen any more.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Return the names of the coroutines in which tasks wait, each once."""
    places = sorted({_place(task) for task in asyncio.all_tasks(loop) if not task.done()})
    return "; ".join(places[:8]) or "none"


def _place(task: "asyncio.Task[Any]") -> str:
    """Return the innermost coroutine in which a task waits, without asyncio's own."""
    place, inner = task.get_name(), task.get_coro()
    while inspect.iscoroutine(inner):
        frame = inner.cr_frame
        if frame is not None and not frame.f_code.co_filename.startswith(_ASYNCIO):
            place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
        inner = inner.cr_await
    return place
