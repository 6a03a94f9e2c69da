"""Slots that follow the servers' caches: in steps, and against a simulated server."""

import asyncio
from dataclasses import replace

import pytest
from tests.train.simulation.test_simulated_runs import scenario

from telescope_train.inference.servers import ServerLoad, parse_load
from telescope_train.rollouts.slots import MOST_READ, Concurrency, SlotLimit, Slots
from telescope_train.simulation.engine import EngineSpeed
from telescope_train.simulation.run import simulate

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
vllm:num_preemptions_total{engine="0",model_name="policy"} 1.2e+01
"""


def load(use: float, *, preemptions: int = 0, running: int = 100) -> ServerLoad:
    return ServerLoad(
        cache_use=use, num_preemptions=preemptions, num_running=running, num_waiting=0
    )


def test_the_metrics_of_vllm_are_read() -> None:
    assert parse_load(METRICS) == ServerLoad(
        cache_use=0.5, num_preemptions=12, num_running=7, num_waiting=0
    )
    assert parse_load("") is None
    assert parse_load("<html>not found</html>") is None


def test_slots_grow_while_they_are_all_used_and_there_is_room() -> None:
    limit = SlotLimit(100)
    assert limit.limit == 25
    assert limit.follow(load(0.2), is_used_up=False) == 25
    assert limit.follow(load(0.2), is_used_up=True) == 29
    for _ in range(20):
        limit.follow(load(0.2), is_used_up=True)
    assert limit.limit == 100, "and no further"
    assert limit.follow(load(0.9), is_used_up=True) == 100


def test_slots_shrink_when_the_cache_is_full_or_somebody_lost_it() -> None:
    limit = SlotLimit(100)
    limit.limit = 100
    assert limit.follow(load(0.96), is_used_up=True) == 80
    assert limit.follow(load(0.8, preemptions=1), is_used_up=True) == 64
    assert limit.follow(load(0.9, preemptions=1), is_used_up=True) == 64, "no further ones"
    assert limit.follow(load(0.96, preemptions=1, running=10), is_used_up=True) == 8
    for _ in range(20):
        limit.follow(load(1.0, preemptions=1, running=0), is_used_up=True)
    assert limit.limit == 1
    assert limit.num_thrown_out == 1
    limit.follow(load(1.0, preemptions=0, running=0), is_used_up=True)
    limit.follow(load(1.0, preemptions=3, running=0), is_used_up=True)
    assert limit.num_thrown_out == 4, "a server that was started anew counts from zero"


def test_slots_that_were_taken_away_come_back_by_a_fiftieth_at_a_time() -> None:
    limit = SlotLimit(1000)
    limit.limit = 500
    assert limit.follow(load(0.96, running=500), is_used_up=True) == 400
    grown = [limit.follow(load(0.2), is_used_up=True) for _ in range(3)]
    assert grown == [408, 416, 424]
    limit.limit = 10
    assert limit.follow(load(0.2), is_used_up=True) == 11, "one at least"


def test_requests_that_begin_anew_at_a_change_of_weights_take_no_slots_away() -> None:
    limit = SlotLimit(100)
    limit.limit = 100
    for preemptions in range(10):
        limit.follow(load(0.02, preemptions=preemptions, running=4), is_used_up=False)
    assert (limit.limit, limit.num_thrown_out) == (100, 0)
    limit.follow(load(0.9, preemptions=10), is_used_up=True)
    assert limit.limit == 80, "a cache that is nearly full throws out"
    limit.follow(load(0.2, preemptions=11), is_used_up=False)
    assert limit.limit < 80, "also when it has room again a moment later"


def test_a_server_that_says_nothing_has_all_its_slots() -> None:
    limit = SlotLimit(100)
    assert limit.follow(None, is_used_up=True) == 100
    limit = SlotLimit(100)
    limit.follow(load(0.2), is_used_up=False)
    assert limit.follow(None, is_used_up=True) == 25, "it did before: nothing changes"


def test_slots_of_groups_are_counted_in_groups() -> None:
    limit = SlotLimit(10, calls_per_slot=8)
    limit.limit = 10
    assert limit.follow(load(0.96, running=64), is_used_up=True) == 6


async def test_the_slots_of_a_run_are_those_of_all_its_servers() -> None:
    answers = [load(0.2), load(0.96, running=4)]
    slots = Slots(20)

    async def first() -> ServerLoad | None:
        return answers[0]

    async def second() -> ServerLoad | None:
        return answers[1]

    following = Concurrency(slots, [first, second])
    assert slots.limit == 4, "a quarter of ten for each"
    waiting = [asyncio.create_task(slots.enter((0, n))) for n in range(8)]
    await asyncio.sleep(0)
    await following.read_once()
    assert slots.limit == 3 + 1
    for task in waiting:
        task.cancel()


class Reader:
    """A server: whether it serves, and what it reports."""

    def __init__(self, use: float | None = 0.2) -> None:
        self.serves = True
        self.use = use
        self.num_asked = 0

    async def load(self) -> ServerLoad | None:
        self.num_asked += 1
        return None if self.use is None else load(self.use)


@pytest.mark.parametrize("follows", [True, False])
async def test_a_server_that_is_lost_takes_its_slots_with_it_and_brings_them_back(
    follows: bool,
) -> None:
    """Otherwise those that are left would work for twice as many rollouts as they may."""
    servers, slots = [Reader(None), Reader(None)], Slots(64)
    following = Concurrency(
        slots,
        [one.load for one in servers],
        serves=lambda index: servers[index].serves,
        follows_load=follows,
    )
    await following.read_once()
    assert slots.limit == 64
    held = [slots.enter_now() for _ in range(64)]
    assert all(held)
    servers[0].serves = False
    await following.read_once()
    assert slots.limit == 32
    assert servers[0].num_asked == (1 if follows else 0), (
        "a dead one would only keep others waiting"
    )
    for _ in range(32):
        slots.leave()
        assert not slots.enter_now(), "what the lost server did is done by nobody else at first"
    slots.leave()
    assert slots.enter_now()
    servers[1].serves = False
    await following.read_once()
    assert slots.limit == 1, "requests wait for a server to come back"
    servers[0].serves = servers[1].serves = True
    await following.read_once()
    assert slots.limit == 64


async def test_slots_of_many_servers_follow_those_that_are_lost_in_their_turn() -> None:
    servers = [Reader(None) for _ in range(MOST_READ + 2)]
    slots = Slots(2 * len(servers))
    following = Concurrency(
        slots,
        [one.load for one in servers],
        serves=lambda index: servers[index].serves,
        follows_load=False,
    )
    servers[-1].serves = False
    await following.read_once()
    await following.read_once()
    assert slots.limit == 2 * (len(servers) - 1)


async def test_a_run_whose_settings_do_not_follow_caches_has_all_slots_at_once() -> None:
    slots, server = Slots(40), Reader(0.99)
    following = Concurrency(slots, [server.load], follows_load=False)
    await following.read_once()
    assert (slots.limit, server.num_asked) == (40, 0)


async def test_what_servers_throw_out_of_full_caches_is_counted_over_all_of_them() -> None:
    counts = [0, 10]
    slots = Slots(40)

    def reader(number: int):
        async def read() -> ServerLoad | None:
            counts[number] += 2
            return load(0.97, preemptions=counts[number])

        return read

    following = Concurrency(slots, [reader(0), reader(1)])
    for _ in range(3):
        await following.read_once()
    assert slots.num_thrown_out == 2 * 2 * 2, "the first reading says what was before"


async def test_many_servers_are_asked_in_turns() -> None:
    num_servers = 2 * MOST_READ + 10
    asked: list[int] = []

    def reader(number: int):
        async def read() -> ServerLoad | None:
            asked.append(number)
            return load(0.2)

        return read

    following = Concurrency(Slots(num_servers), [reader(number) for number in range(num_servers)])
    sizes: list[int] = []
    for _ in range(6):
        before = len(asked)
        await following.read_once()
        sizes.append(len(asked) - before)
    assert sizes == [MOST_READ, MOST_READ, 10] * 2
    assert asked == list(range(num_servers)) * 2


@pytest.mark.slow
def test_a_full_cache_throws_hardly_anything_out_when_slots_follow_it() -> None:
    """The cache has room for about half of what all slots would fill."""
    plain = scenario(groups=64, steps=6, ahead=2, engine=EngineSpeed(cache_tokens=300_000))
    found = {}
    for follows in (True, False):
        section = plain.config.scheduling.model_copy(update={"follow_kv_cache_use": follows})
        config = plain.config.model_copy(update={"scheduling": section})
        found[follows] = simulate(replace(plain, config=config))
    per_rollout = {follows: one.num_preemptions / (6 * 64 * 4) for follows, one in found.items()}
    assert per_rollout[False] > 2
    assert per_rollout[True] < 0.25
    assert found[True].duration_s < 1.1 * found[False].duration_s
