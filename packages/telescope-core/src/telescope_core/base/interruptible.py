"""An event loop whose main task ends in order when a signal asks the process to end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from telescope_core.base import interrupts

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Return what `main` returns, run on an event loop of its own.

    A signal that asks the process to end cancels `main`. When `main` has ended, with whatever
    error, Interrupted is raised: other processes of the group may have received the signal too and
    caused that error.
    """
    try:
        interrupts.raise_if_asked()
        return asyncio.run(_cancelled_by_signals(main))
    except BaseException as error:
        if isinstance(error, interrupts.Interrupted) or (number := interrupts.cut_short()) is None:
            raise
        raise interrupts.Interrupted(number) from error
    finally:
        main.close()


async def _cancelled_by_signals(main: Coroutine[Any, Any, Result]) -> Result:
    task = asyncio.current_task()
    assert task is not None, "asyncio.run makes one"
    with interrupts.cancelling(task.cancel, asyncio.get_running_loop().call_soon_threadsafe):
        # One that came before the line above found nothing to cancel, and was raised.
        return await main
