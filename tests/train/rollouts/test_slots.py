"""Slots: how many at a time, who is next, and that none is lost by a cancellation."""

import asyncio
import random

import pytest

from telescope_train.rollouts.slots import GroupSlot, Slots, to_begin, to_go_on


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_later_turns_go_first_then_older_batches() -> None:
    slots = Slots(1)
    await slots.enter(to_begin(0, 0, 0))
    order: list[str] = []

    async def one(name: str, priority: tuple[int, ...]) -> None:
        await slots.enter(priority)
        order.append(name)
        slots.leave()

    tasks = [
        asyncio.create_task(one("new, batch 1", to_begin(1, 0, 0))),
        asyncio.create_task(one("new, batch 0", to_begin(0, 1, 0))),
        asyncio.create_task(one("turn 2, batch 1", to_go_on(1, 1))),
        asyncio.create_task(one("turn 2, batch 0", to_go_on(0, 1))),
        asyncio.create_task(one("turn 4, batch 0", to_go_on(0, 3))),
    ]
    await settled()
    slots.leave()
    await asyncio.gather(*tasks)
    assert order == [
        *("turn 4, batch 0", "turn 2, batch 0", "turn 2, batch 1"),
        *("new, batch 0", "new, batch 1"),
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["own", "group"])
async def test_no_slot_is_lost_or_held_twice_whatever_is_cancelled(seed: int, kind: str) -> None:
    chance = random.Random(seed)
    slots = Slots(3)
    groups = [GroupSlot(slots) if kind == "group" else slots for _ in range(5)]
    inside: set[tuple[int, int]] = set()
    most = 0

    async def one(group: int, number: int) -> None:
        nonlocal most
        await groups[group].enter(to_begin(0, group, number))
        inside.add((group, number))
        most = max(most, len({g for g, _ in inside}) if kind == "group" else len(inside))
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            inside.remove((group, number))
            groups[group].leave()

    tasks = [asyncio.create_task(one(n % 5, n)) for n in range(60)]
    for _ in range(200):
        await asyncio.sleep(0)
        if chance.random() < 0.3:
            tasks[chance.randrange(60)].cancel()
        if chance.random() < 0.05:
            slots.resize(chance.randrange(1, 4))
    async with asyncio.timeout(120):
        await asyncio.wait(tasks)
    assert slots.num_held == 0
    assert slots.num_waiting == 0
    assert 1 <= most <= 3
    assert slots.enter_now(), "a slot is free"


async def test_a_group_has_one_slot_however_many_of_it_are_inside() -> None:
    slots = Slots(1)
    first, second = GroupSlot(slots), GroupSlot(slots)
    for _ in range(3):
        await first.enter((0,))
    waiting = asyncio.create_task(second.enter((0,)))
    await settled()
    assert slots.num_held == 1
    assert not waiting.done()
    assert not second.enter_now()
    first.leave()
    first.leave()
    await settled()
    assert not waiting.done(), "one of the group is still inside"
    first.leave()
    await waiting
    second.leave()
    assert slots.num_held == 0


async def test_fewer_slots_take_effect_as_they_are_given_back() -> None:
    slots = Slots(4)
    for _ in range(4):
        assert slots.enter_now()
    slots.resize(2)
    waiting = asyncio.create_task(slots.enter((0,)))
    slots.leave()
    slots.leave()
    await settled()
    assert not waiting.done()
    slots.resize(3)
    await waiting
    assert slots.num_held == 3
