"""Run code while the run's processes are watched, so that a death is reported as the cause."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")

# The slowest way to notice a death takes several waits: Ray reports that a process is gone, the
# actors are asked every second, and each question waits for a health request of up to 5 s.
DEATH_SHOWS_WITHIN_S = 20.0
"""Seconds after a failure within which the death of a process counts as its cause."""


async def supervised(
    work: Coroutine[Any, Any, Result],
    watches: Sequence[Coroutine[Any, Any, None]],
    *,
    grace_s: float = DEATH_SHOWS_WITHIN_S,
) -> Result:
    """Return the result of `work`, while `watches` run.

    A watch ends only by raising the death of a process.
    When a process dies, the first sign is often elsewhere: a request fails, or a connection is
    reset. When the work fails, the watches therefore get `grace_s` seconds to report a death, which
    is then raised instead.
    """
    watchers = [asyncio.create_task(watch) for watch in watches]
    worker = asyncio.create_task(work)
    try:
        await asyncio.wait([*watchers, worker], return_when=asyncio.FIRST_COMPLETED)
        if worker.done() and isinstance(worker.exception(), Exception):
            await asyncio.wait(watchers, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        # The watches come first, because awaiting a finished task raises its error: a death is
        # raised before the failure that it caused.
        for watcher in watchers:
            if watcher.done():
                await watcher
        return await worker
    finally:
        # Waited for, so that the work has closed what it opened before the caller closes the rest.
        await cancel([*watchers, worker])
        for watcher in watchers:
            if not watcher.cancelled():
                watcher.exception()  # a further death, told or not, is no unnoticed failure


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel unfinished tasks, and return when all have ended.

    This also holds if it is canceled itself, so that no task is left behind.
    """
    running = [task for task in tasks if not task.done()]
    for task in running:
        # A second time would break off what the first one began to clean up.
        if not task.cancelling():
            task.cancel()
    canceled: asyncio.CancelledError | None = None
    while running:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            canceled = error
        running = [task for task in running if not task.done()]
    if canceled is not None:
        raise canceled
