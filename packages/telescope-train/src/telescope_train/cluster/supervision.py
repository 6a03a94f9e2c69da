"""Working while watching the run's processes, so that a death is reported as the cause it is."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

DEATH_SHOWS_WITHIN_S = 20.0
"""How long a process that caused a failure may take to end, for its death to be the reason."""


async def supervised(
    work: Coroutine[Any, Any, None],
    watches: Sequence[Coroutine[Any, Any, None]],
    *,
    grace_s: float = DEATH_SHOWS_WITHIN_S,
) -> None:
    """Await `work` while `watches` run, which only ever end by raising what died.

    A dying process shows first in those it talks to: a request fails, a connection is reset.
    So when the work fails, the watches are given time to say that its cause was a death.
    """
    watchers = [asyncio.create_task(watch) for watch in watches]
    worker = asyncio.create_task(work)
    try:
        await asyncio.wait([*watchers, worker], return_when=asyncio.FIRST_COMPLETED)
        if worker.done() and isinstance(worker.exception(), Exception):
            await asyncio.wait(watchers, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for watcher in watchers:
            if watcher.done():
                await watcher
        await worker
    finally:
        for task in (*watchers, worker):
            task.cancel()
        await asyncio.wait([*watchers, worker])
