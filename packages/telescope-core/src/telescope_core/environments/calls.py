"""Call an author's methods, sync or async, without blocking the event loop.

Sync methods run in a thread unless `@runs_in` on the method, or `sync_runs_in` on the class,
declares otherwise. An exception from a method gets a note with the method's name, file and line.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, TypeVar, cast

from telescope_core.base.code_places import is_authors, location_of, raised_at
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.environments.author_errors import contained
from telescope_core.environments.doing import doing
from telescope_core.environments.running import noted, noting
from telescope_core.environments.score_processes import ScoreProcesses
from telescope_core.environments.tool_threads import DaemonThreads

Method = TypeVar("Method", bound=Callable[..., Any])
Result = TypeVar("Result")
RunsIn = Literal["thread", "loop", "process"]
RUNS_IN: tuple[RunsIn, ...] = ("thread", "loop", "process")
SCORES = ("reward", "metric", "group_reward")
"""Kinds of methods that may run in a process, because copies of their arguments are enough."""
ADVICE = (
    "`next` was called on something empty, such as a file without lines: give it a default, "
    "next(lines, None), and check it"
)
"""Advice for code that raised StopIteration."""
_MARK = "__telescope_runs_in__"


def runs_in(place: RunsIn) -> Callable[[Method], Method]:
    """Declare where a sync method runs.

    `thread` (the default) is for code that waits, such as I/O. `loop` runs the method on the event
    loop and is for code that takes well under a millisecond. `process` is for code that computes
    for long or may hang: the method runs in a separate process that is killed when the rollout's
    deadline passes. It gets copies of the rollout and the example, so only rewards and metrics,
    sync or async, can run there.
    """
    if place not in RUNS_IN:
        raise EnvironmentLoadError(f"runs_in must be one of {', '.join(RUNS_IN)}, got {place!r}")

    def mark(function: Method) -> Method:
        setattr(function, _MARK, place)
        return function

    return mark


def declared_place(function: object) -> RunsIn | None:
    """Return the place that `@runs_in` declares for `function`; None without the decorator."""
    return getattr(function, _MARK, None)


async def call(function: Callable[..., Any], *arguments: object) -> object:
    """Call a function and return its result; a sync function runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await cast(Awaitable[object], function(*arguments))
    return await asyncio.to_thread(function, *arguments)


@dataclass(frozen=True, slots=True)
class MethodCall:
    """One method with its arguments."""

    method: Callable[..., Any]
    arguments: tuple[object, ...]
    what: str
    """Role of the method, such as `reward`, for the note on its exceptions."""


class Caller:
    """Calls the methods of one environment where they are declared to run."""

    def __init__(self, *, place: RunsIn, max_threads: int, processes: ScoreProcesses) -> None:
        self._place: RunsIn = place
        self._threads = DaemonThreads()
        self._lanes = asyncio.Semaphore(max_threads)
        self._processes = processes

    async def one(self, what: str, method: Callable[..., Any], *arguments: object) -> object:
        """Call `method` and return its result; an async one is awaited."""
        (value,) = await self.all([MethodCall(method, arguments, what)])
        return value

    async def all(self, calls: Sequence[MethodCall]) -> list[object]:
        """Make `calls` in order; consecutive calls that run in threads share one thread."""
        values: list[object] = []
        for place, group in groupby(calls, key=self._place_of):
            if place == "thread":
                returned = await self.in_thread(partial(_in_order, tuple(group)))
                # A method without `async` may return what another one promised.
                values += [await _settled(one, value) for one, value in returned]
            elif place == "process":
                values += [await self._in_process(one) for one in group]
            else:
                for one in group:
                    ((_, result),) = _in_order([one])
                    values.append(await _settled(one, result))
        return values

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Return `function()`, called in one of the environment's threads.

        When the caller is cancelled, its thread no longer counts against `max_threads`, so code
        that never returns cannot starve other calls.
        """
        async with self._lanes:
            with contained():
                return await self._threads.run(function)

    def close(self) -> None:
        """Kill the processes. Threads end by themselves."""
        self._processes.close()

    def _place_of(self, one: MethodCall) -> RunsIn:
        declared = declared_place(one.method)
        if declared == "process":
            return declared
        if inspect.iscoroutinefunction(one.method):
            return "loop"
        place = declared or self._place
        return "thread" if place == "process" and one.what not in SCORES else place

    async def _in_process(self, one: MethodCall) -> object:
        try:
            with doing(one.what, one.method):
                return await self._processes.run(one.method.__name__, one.arguments)
        except Exception as error:
            _note(error, one)
            raise


async def _settled(one: MethodCall, result: object) -> object:
    if not inspect.isawaitable(result):
        return result
    try:
        with contained(), doing(one.what, one.method):
            return await noted(cast(Awaitable[object], result), one.method, one.what)
    except Exception as error:
        _note(error, one)
        raise


def _in_order(calls: Sequence[MethodCall]) -> list[tuple[MethodCall, object]]:
    values: list[tuple[MethodCall, object]] = []
    for one in calls:
        try:
            with contained(), noting(one.method, one.what), doing(one.what, one.method):
                values.append((one, one.method(*one.arguments)))
        except StopIteration as error:
            # Neither a thread nor a coroutine can pass it on.
            raised = RuntimeError(f"StopIteration was raised{raised_at(error)}; {ADVICE}")
            _note(raised, one)
            raise raised from error
        except Exception as error:
            _note(error, one)
            raise
    return values


def _note(error: Exception, one: MethodCall) -> None:
    """Add a note that names the author's method; Telescope's own errors are clear without one."""
    if is_authors(one.method):
        error.add_note(f"in {one.what} {location_of(one.method)}")
