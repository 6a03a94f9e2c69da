"""The model of an engine: compared with a slow one that takes every decode step by itself."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_train.simulation.engine import EngineLost, EngineSpeed, SimulatedEngine
from telescope_train.simulation.virtual_time import run_in_virtual_time

FLAT = EngineSpeed(
    slots=3,
    cache_tokens=10**9,
    step_s=1.0,
    step_per_request_s=0.5,
    step_per_cached_token_s=0.0,
    prefill_tokens_per_s=1e12,
)


def ends_of(speed, jobs, **at):
    """Return when each of `jobs` ends: (arrival, prompt tokens, tokens). `at`: calls by time."""

    async def main():
        engine, clock = SimulatedEngine(speed), asyncio.get_running_loop()
        spans = {}

        async def one(number, arrival, prompt, tokens):
            await asyncio.sleep(arrival)
            spans[number] = await engine.generate(
                prompt, tokens, rollout_id=f"{number}.0/0", salt="v0"
            )
            return clock.time()

        for seconds, call in at.items():
            clock.call_later(float(seconds.removeprefix("t")), call, engine)
        ends = await asyncio.gather(
            *(one(number, *job) for number, job in enumerate(jobs)), return_exceptions=True
        )
        return ends, spans, engine

    return run_in_virtual_time(main)


def slow_ends(speed, jobs):
    """Take each decode step in turn; requests join between steps, in the order of arrival."""
    now, waiting, running, ends = 0.0, [], {}, {}
    arrivals = sorted((job[0], number) for number, job in enumerate(jobs))
    while len(ends) < len(jobs):
        while arrivals and arrivals[0][0] <= now + 1e-9:
            waiting.append(arrivals.pop(0)[1])
        while waiting and len(running) < speed.slots:
            number = waiting.pop(0)
            running[number] = jobs[number][2]
        if not running:
            now = arrivals[0][0]
            continue
        now += speed.step_s + speed.step_per_request_s * len(running)
        for number in list(running):
            running[number] -= 1
            if not running[number]:
                del running[number]
                ends[number] = now
    return [ends[number] for number in range(len(jobs))]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.just(0.0), st.integers(1, 9), st.integers(1, 30)), max_size=9))
def test_requests_end_when_they_would_step_by_step(jobs):
    found, _, _ = ends_of(FLAT, jobs)
    assert found == pytest.approx(slow_ends(FLAT, jobs), rel=1e-6) if jobs else found == []


def test_one_that_joins_slows_the_others_and_is_slowed_by_them():
    # Alone 1.5 s a step, together 2.0 s: after 3 s the first has 2 of 4 tokens.
    ends, _, engine = ends_of(FLAT, [(0.0, 1, 4), (3.0, 1, 2)])
    assert ends == pytest.approx([3.0 + 2 * 2.0, 3.0 + 2 * 2.0])
    assert engine.num_tokens_written == 6
    assert engine.busy_s == pytest.approx(7.0)


def test_prompts_hold_up_the_batch_but_those_that_are_cached_do_not():
    speed = EngineSpeed(
        slots=9,
        step_s=1.0,
        step_per_request_s=0.0,
        step_per_cached_token_s=0.0,
        prefill_tokens_per_s=100.0,
    )

    async def main(salts):
        engine, clock = SimulatedEngine(speed), asyncio.get_running_loop()
        times = []
        for index, salt in enumerate(salts):
            began_s = clock.time()
            await engine.generate(1001, 5, rollout_id=f"g/{index}", salt=salt)
            times.append(clock.time() - began_s)
        return times

    first, second, other = run_in_virtual_time(lambda: main(["v0", "v0", "v1"]))
    assert first == pytest.approx(10.01 + 5.0)
    assert second == pytest.approx(0.01 + 5.0), "the group's prompt is cached but for a token"
    assert other == pytest.approx(first), "another salt shares nothing"


def test_a_later_turn_finds_its_own_past():
    speed = EngineSpeed(step_s=1.0, step_per_request_s=0.0, prefill_tokens_per_s=10.0)

    async def main():
        engine, clock = SimulatedEngine(speed), asyncio.get_running_loop()
        await engine.generate(100, 5, rollout_id="g/0", salt="v0")
        began_s = clock.time()
        await engine.generate(125, 5, rollout_id="g/0", salt="v0")
        return clock.time() - began_s

    assert run_in_virtual_time(main) == pytest.approx(2.0 + 5.0, rel=1e-3)


def test_lower_priority_numbers_go_first():
    async def main():
        engine = SimulatedEngine(EngineSpeed(slots=1))
        order = []

        async def one(name, priority):
            await engine.generate(1, 5, rollout_id=f"{name}/0", salt="", priority=priority)
            order.append(name)

        first = asyncio.create_task(one("running", 0))
        await asyncio.sleep(0)
        rest = [asyncio.create_task(one(*job)) for job in [("b", 0), ("c", 0), ("urgent", -3)]]
        await asyncio.gather(first, *rest)
        return order

    assert run_in_virtual_time(main) == ["running", "urgent", "b", "c"]


def test_a_full_cache_puts_the_last_back_and_loses_none_of_its_tokens():
    speed = EngineSpeed(
        cache_tokens=100,
        step_s=1.0,
        step_per_request_s=0.0,
        step_per_cached_token_s=0.0,
        prefill_tokens_per_s=1e9,
    )
    ends, spans, engine = ends_of(speed, [(0.0, 10, 60), (0.0, 10, 60)])
    assert engine.num_preemptions == 1
    # Both fit for 40 steps, and step 41 is one too many. The second goes on after the first.
    assert ends == pytest.approx([60.0, 60.0 + (60.0 - 41.0)], abs=0.1)
    assert [sum(span.num_tokens for span in one) for one in spans.values()] == [60, 60]


@pytest.mark.parametrize("clears", [False, True])
def test_an_update_divides_the_tokens_by_version(clears):
    speed = EngineSpeed(
        step_s=1.0,
        step_per_request_s=0.0,
        step_per_cached_token_s=0.0,
        prefill_tokens_per_s=100.0,
    )
    (end,), spans, _ = ends_of(
        speed,
        [(0.0, 100, 20)],
        t6=lambda engine: engine.pause(clears_cache=clears),
        t8=lambda engine: (engine.update(1), engine.resume()),
    )
    assert spans[0] == [(0, 5), (1, 15)]
    # 1 s of prefill, 20 of steps, 2 paused; with a cleared cache the 105 tokens are computed again.
    # The part of that which falls into the pause costs nothing.
    assert end == pytest.approx(23.0, abs=1e-6)


def test_a_dead_engine_fails_what_runs_waits_and_comes():
    async def main():
        engine = SimulatedEngine(EngineSpeed(slots=1))
        tasks = [
            asyncio.create_task(engine.generate(1, 10**5, rollout_id=f"{n}/0", salt=""))
            for n in range(3)
        ]
        await asyncio.sleep(5.0)
        engine.die("killed")
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, EngineLost) and "killed" in str(one) for one in found)
        with pytest.raises(EngineLost, match="killed"):
            await engine.generate(1, 1, rollout_id="a/0", salt="")
        return True

    assert run_in_virtual_time(main)


def test_a_cancelled_request_gives_its_slot_back():
    async def main():
        engine = SimulatedEngine(EngineSpeed(slots=1))
        first = asyncio.create_task(engine.generate(1, 10**5, rollout_id="0/0", salt=""))
        second = asyncio.create_task(engine.generate(1, 5, rollout_id="1/0", salt=""))
        await asyncio.sleep(5.0)
        assert engine.num_waiting == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await second
        assert engine.num_running == engine.num_waiting == 0
        assert engine.cache_use == pytest.approx(0.0, abs=1e-9)
        return True

    assert run_in_virtual_time(main)
