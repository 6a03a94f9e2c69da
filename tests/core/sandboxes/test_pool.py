"""The pool: what is ready, how many there are, what is used again, and the end of all of it."""

import asyncio
import logging
import time

import pytest
from tests.core.sandboxes.attacks import LIFE_S, MARK, processes_of

from telescope_core.errors import ConfigError
from telescope_core.sandboxes import SandboxError, SandboxPool, SandboxSpec
from telescope_core.sandboxes.local.provider import LocalProvider


@pytest.fixture
def provider(shared):
    return shared


class Failing:
    """A provider whose every second sandbox cannot be made."""

    name = "failing"

    def __init__(self, inner: LocalProvider) -> None:
        self._inner = inner
        self._asked = 0
        self.limits = inner.limits

    async def create(self, spec: SandboxSpec):
        self._asked += 1
        if self._asked % 2 == 0:
            raise SandboxError("the provider is gone")
        return await self._inner.create(spec)

    async def close(self) -> None:
        await self._inner.close()


async def test_a_sandbox_is_used_once_unless_asked(provider, caplog):
    caplog.set_level(logging.INFO)
    async with SandboxPool(provider, max_open=1) as pool:
        async with pool.take() as one:
            await one.write("left", b"x")
        async with pool.take() as other:
            assert other is not one
            assert await other.list() == []
        usage = pool.usage()
    assert (usage.num_created, usage.num_taken, usage.num_reused) == (2, 2, 0)
    assert usage.open_s > 0
    assert usage.metrics()["sandboxes/num_created"] == 2.0
    await pool.close()
    [said] = [one.getMessage() for one in caplog.records if one.name.endswith("sandboxes.pool")]
    assert said.startswith("sandboxes of local are closed: sandboxes/num_created=2 ")
    assert " sandboxes/num_taken=2 " in said
    assert " sandboxes/num_open=0 " in said


async def test_one_that_is_used_again_is_empty(provider):
    async with SandboxPool(provider, max_open=1, max_uses=3) as pool:
        seen = []
        for _ in range(4):
            async with pool.take() as box:
                names = [entry.name for entry in await box.list("/tmp")]
                assert names == ["work"], names
                await box.run(
                    ["sh", "-c", "mkdir -p a/.b; touch a/.b/c /tmp/x /dev/shm/y; chmod 0 a"]
                )
                seen.append(box.id)
    assert [seen.count(one) for one in dict.fromkeys(seen)] == [3, 1]
    assert pool.usage().num_reused == 2


async def test_one_that_died_or_was_left_by_an_error_is_not_given_out_again(provider):
    async with SandboxPool(provider, max_open=1, max_uses=9) as pool:
        with pytest.raises(ValueError, match="mine"):
            async with pool.take() as one:
                raise ValueError("mine")
        assert not one.is_alive
        async with pool.take() as two:
            await two.close()
        async with pool.take() as three:
            assert three.is_alive
        assert pool.usage().num_discarded == 1


async def test_warm_ones_are_there_and_are_made_again(provider):
    async with SandboxPool(provider, max_open=4, num_warm=2) as pool:
        assert pool.usage().num_open == 2
        async with pool.take() as box:
            assert (await box.run(["echo", "1"])).text == "1\n"
            assert pool.usage().num_open == 3, "another one is made while this one is used"
    assert pool.usage().num_open == 0
    assert provider._open == set()


@pytest.mark.slow
async def test_one_whose_time_is_half_over_is_not_given_out(provider):
    spec = SandboxSpec(time_to_live_s=0.2)
    async with SandboxPool(provider, spec, max_open=1, num_warm=1) as pool:
        first = next(iter(provider._open))
        await asyncio.wait_for(first._started.answer(), 60)
        async with pool.take() as box:
            assert box is not first
        assert pool.usage().num_discarded == 1


async def test_never_more_are_open_than_allowed(provider):
    async with SandboxPool(provider, max_open=3) as pool:

        async def use() -> str:
            async with pool.take() as box:
                assert pool.usage().num_open <= 3
                return (await box.run(["python3", "-c", "print(1)"])).text

        assert await asyncio.gather(*(use() for _ in range(9))) == ["1\n"] * 9
        assert pool.usage().max_open == 3


async def test_a_provider_that_fails_is_told_to_whoever_takes_and_counted(provider):
    pool = SandboxPool(Failing(provider), max_open=2)
    async with pool.take() as box:
        with pytest.raises(SandboxError, match="gone"):
            async with pool.take():
                pass
        assert (await box.run(["true"])).succeeded
    async with pool.take():
        pass
    await pool.close()
    assert pool.usage().num_failed == 1


async def test_closing_ends_what_is_in_use_and_what_is_being_made(provider):
    pool = SandboxPool(provider, SandboxSpec(time_to_live_s=LIFE_S), max_open=4, num_warm=2)
    await pool.warm_up()
    assert processes_of(MARK)
    failed = []

    async def use() -> None:
        async with pool.take() as box:
            try:
                await box.run(["sleep", "600"])
            except SandboxError as error:
                failed.append(error)
                raise

    using = [asyncio.create_task(use()) for _ in range(4)]
    async with asyncio.timeout(60):
        while pool.usage().num_open < 4:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
    await pool.close()
    await pool.close()
    done = await asyncio.gather(*using, return_exceptions=True)
    assert all(isinstance(one, SandboxError) for one in done), done
    with pytest.raises(SandboxError, match="closed"):
        async with pool.take():
            pass
    assert processes_of(MARK) == []


async def test_a_taker_that_is_cancelled_at_any_moment_leaves_nothing(provider):
    await (await provider.create(SandboxSpec())).close()
    pool = SandboxPool(provider, SandboxSpec(time_to_live_s=LIFE_S), max_open=2, num_warm=1)

    async def use() -> None:
        async with pool.take() as box:
            await box.run(["python3", "-c", "print(1)"])

    for delay_ms in range(0, 60, 4):
        task = asyncio.create_task(use())
        await asyncio.wait([task], timeout=delay_ms / 1000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await pool.close()
    assert provider._open == set()
    # One that was cancelled while bubblewrap began ends by itself.
    async with asyncio.timeout(60):
        while processes_of(MARK):
            await asyncio.to_thread(time.sleep, 0.02)


@pytest.mark.parametrize("wrong", [{"max_uses": 0}, {"max_uses": 1.5}])
def test_bounds_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"max_uses >= 1"):
        SandboxPool(None, **wrong)
