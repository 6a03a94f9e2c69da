"""A failure is reported as the death that caused it, when there was one."""

import asyncio
import gc

import pytest

from telescope_core.errors import ProcessDiedError
from telescope_train.cluster.supervision import supervised


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(error: Exception) -> None:
    raise error


async def fail_after(trigger: asyncio.Event, error: Exception) -> None:
    await trigger.wait()
    raise error


async def test_work_that_ends_ends_the_watch() -> None:
    await supervised(asyncio.sleep(0), [forever(), forever()])


async def test_a_death_ends_the_work() -> None:
    with pytest.raises(ProcessDiedError, match="rank 0"):
        await supervised(forever(), [forever(), fail(ProcessDiedError("rank 0"))])


async def test_a_second_death_is_not_reported_as_an_error_that_nobody_noticed() -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, one: told.append(one["message"]))
    deaths = [fail(ProcessDiedError("rank 0")), fail(ProcessDiedError("rank 1"))]
    with pytest.raises(ProcessDiedError, match="rank 0"):
        await supervised(forever(), deaths)
    gc.collect()
    assert told == []


@pytest.mark.parametrize("first", [RuntimeError("reset by peer"), OSError("broken pipe")])
async def test_a_death_that_shows_later_is_the_reason(first: Exception) -> None:
    has_failed = asyncio.Event()

    async def work() -> None:
        has_failed.set()
        raise first

    watches = [forever(), fail_after(has_failed, ProcessDiedError("server 1"))]
    with pytest.raises(ProcessDiedError, match="server 1"):
        await supervised(work(), watches)


async def test_without_a_death_the_failure_is_its_own_reason() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        await supervised(fail(RuntimeError("a bug")), [forever()], grace_s=0.01)


async def test_what_is_being_closed_is_closed_when_whoever_waits_is_cancelled_too() -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()
    closed: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closing.set()
            await may_close.wait()
            closed.append("all")

    async def watch() -> None:
        raise ProcessDiedError("trainer rank 0 died")

    supervision = asyncio.create_task(supervised(work(), [watch()], grace_s=0.0))
    async with asyncio.timeout(120):
        await closing.wait()
        supervision.cancel()
        await asyncio.sleep(0)
        may_close.set()
        with pytest.raises(asyncio.CancelledError):
            await supervision
    assert closed == ["all"]
