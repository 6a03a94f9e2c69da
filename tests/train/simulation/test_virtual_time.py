"""Virtual time: nothing is waited for, the order of events is exact, and hanging is an error."""

import asyncio
import threading
import time

import pytest

from telescope_train.simulation.virtual_time import Deadlock, run_in_virtual_time


def test_waiting_takes_no_real_time_and_the_clock_is_exact():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600.0)
        assert loop.time() == 3600.0
        async with asyncio.timeout(1e6):
            await asyncio.sleep(86_400.0)
        return loop.time()

    began_s = time.monotonic()
    assert run_in_virtual_time(main) == 90_000.0
    assert time.monotonic() - began_s < 3600.0


def test_events_happen_in_the_order_of_their_times():
    async def main():
        seen = []

        async def at(seconds):
            await asyncio.sleep(seconds)
            seen.append((asyncio.get_running_loop().time(), seconds))

        await asyncio.gather(*(at((7919 * n) % 1009 / 8) for n in range(1009)))
        return seen

    seen = run_in_virtual_time(main)
    assert seen == sorted(seen)
    assert all(now == seconds for now, seconds in seen)


def test_many_cancelled_timers_are_no_events():
    """asyncio drops cancelled timers in two ways, by their number and when they are due."""

    async def main():
        loop = asyncio.get_running_loop()
        for number in range(1000):
            loop.call_later(1.0 + number, lambda: None).cancel()
        last = loop.call_later(5000.0, lambda: None)
        await asyncio.sleep(4000.5)
        assert loop.time() == 4000.5
        last.cancel()
        return True

    assert run_in_virtual_time(main)


def test_a_wait_that_nothing_can_end_is_an_error_that_names_the_place():
    async def waits_for_nobody():
        await asyncio.Event().wait()

    async def main():
        await asyncio.sleep(12.5)
        await waits_for_nobody()

    with pytest.raises(Deadlock) as caught:
        run_in_virtual_time(main)
    assert "12.500 s" in str(caught.value)
    assert waits_for_nobody.__name__ in str(caught.value)


def test_a_lock_that_is_never_released_is_a_deadlock_unless_a_deadline_ends_it():
    async def main(deadline_s):
        lock = asyncio.Lock()
        await lock.acquire()
        async with asyncio.timeout(deadline_s):
            await lock.acquire()

    with pytest.raises(Deadlock):
        run_in_virtual_time(lambda: main(None))
    with pytest.raises(TimeoutError):
        run_in_virtual_time(lambda: main(9.0))


def test_functions_for_threads_are_called_at_once_and_their_errors_arrive():
    def fails():
        raise ValueError("told")

    async def main():
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ValueError, match="told"):
            await asyncio.to_thread(fails)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main) == 0.0


def test_an_error_of_the_program_is_raised_as_it_is():
    async def main():
        await asyncio.sleep(1.0)
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own"):
        run_in_virtual_time(main)
