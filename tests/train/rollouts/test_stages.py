"""The life of an attempt: what may follow what, and what is written of it."""

import asyncio
from collections.abc import Sequence
from itertools import groupby

import pytest
from tests.train.rollouts.samplers import GROUP_SIZE, GROUPS, EventList, echo, sampler_over
from tests.train.rollouts.test_sampled_attempts import Walker

from telescope_core import RolloutStatus
from telescope_core.records.events import AttemptEvent, Stage
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion, Rollout
from telescope_train.rollouts.attempts import AttemptKey, Attempts, AttemptStages

KEY = AttemptKey(step=1, environment="e", group_id="0.0", index=0, attempt=1)
LAST = (Stage.DONE, Stage.CANCELLED, Stage.FAILED)
ROLLOUT = Rollout(environment="e", example_id="1", group_id="0.0", index=0)


def by_attempt(events: Sequence[AttemptEvent]) -> dict[tuple[str, int, int], list[AttemptEvent]]:
    def key(event: AttemptEvent) -> tuple[str, int, int]:
        return event.group_id, event.index, event.attempt

    return {name: list(found) for name, found in groupby(sorted(events, key=key), key)}


async def test_a_life_without_detours() -> None:
    events = EventList()
    life = AttemptStages(KEY, events.add)
    life.waits_to_begin()
    life.begins()
    for server, version in (("a", 3), ("b", 4)):
        life.waits()
        life.no_longer_waits()
        life.is_sent(server, version)
        life.is_answered()
    life.ends(ROLLOUT)
    assert [event.stage for event in events] == [
        *(Stage.DRAWN, Stage.WAITING, Stage.ENVIRONMENT),
        *(Stage.WAITING, Stage.GENERATING, Stage.ENVIRONMENT) * 2,
        *(Stage.SCORING, Stage.DONE),
    ]
    sent = [event for event in events if event.stage is Stage.GENERATING]
    assert [(one.call, one.server, one.version) for one in sent] == [(1, "a", 3), (2, "b", 4)]
    assert life.oldest_version == 3


async def test_calls_at_the_same_time_are_one_stage() -> None:
    events = EventList()
    life = AttemptStages(KEY, events.add)
    life.waits_to_begin()
    life.begins()
    life.is_sent("a", 0)
    life.is_sent("b", 0)
    life.is_answered()
    assert life.stage is Stage.GENERATING, "the other call goes on"
    life.waits()
    life.is_answered()
    assert life.stage is Stage.WAITING
    life.no_longer_waits()
    life.is_cancelled("run_ended")
    life.is_cancelled("off_policy")
    assert (events[-1].stage, events[-1].reason) == (Stage.CANCELLED, "run_ended")


@pytest.mark.parametrize("at", ["drawn", "waiting", "playing", "generating"])
async def test_it_can_be_stopped_at_any_stage_and_not_after_its_end(at: str) -> None:
    life = AttemptStages(KEY, EventList().add)
    if at != "drawn":
        life.waits_to_begin()
    if at in ("playing", "generating"):
        life.begins()
    if at == "generating":
        life.is_sent("a", 0)
    life.is_cancelled("why")
    assert life.is_over
    with pytest.raises(AssertionError, match="an attempt went from cancelled to"):
        life.ends(ROLLOUT)


async def test_what_cannot_follow_is_a_defect() -> None:
    events = EventList()
    life = AttemptStages(KEY, events.add)
    with pytest.raises(AssertionError, match=r"drawn.*environment"):
        life.begins()
    assert [event.stage for event in events] == [Stage.DRAWN], "nothing false is written"


async def test_every_attempt_of_a_run_has_one_whole_life() -> None:
    class Policies(ScriptedClient):
        """Fails one attempt, and never answers another rollout."""

        num_failures = 0

        def policy(self, rollout_id, sampling=None):
            if rollout_id == "1.0/0":
                return Walker(num_turns=17).hanging()
            if rollout_id == "0.0/1" and not self.num_failures:
                self.num_failures += 1
                return Broken()
            return super().policy(rollout_id, sampling)

    class Broken:
        endpoint = None

        async def complete(self, messages, sampling, *, tools=()) -> Completion:
            raise RuntimeError("broken")

    events = EventList()
    sampler = sampler_over(Policies(echo), ahead=1, slots=40, events=events, environment=None)
    sampler.advance(0)
    batch = await sampler.take(0)
    await sampler._pending[1][1].task
    left = await sampler.close()
    lives = by_attempt(events)
    assert len(lives) == 2 * GROUPS * GROUP_SIZE + 1, "one attempt was played again"
    for life in lives.values():
        assert life[0].stage is Stage.DRAWN
        assert [event.stage in LAST for event in life] == [False] * (len(life) - 1) + [True]
        assert [event.time_s for event in life] == sorted(event.time_s for event in life)
    ends = {name: life[-1] for name, life in lives.items()}
    assert ends["0.0", 1, 1].stage is Stage.FAILED
    assert ends["0.0", 1, 1].reason == "RuntimeError"
    assert ends["0.0", 1, 2].stage is Stage.DONE
    assert ends["1.0", 0, 1].stage is Stage.CANCELLED
    rows = [*batch.all_rollouts, *(rollout for rollouts in left.values() for rollout in rollouts)]
    keys = [(row.group_id, row.index, row.attempt) for row in rows]
    assert sorted(keys) == sorted(lives), "every attempt leaves one row, and no other does"
    statuses = dict(zip(keys, (row.status for row in rows), strict=True))
    assert statuses["0.0", 1, 1] is RolloutStatus.FAILED
    assert statuses["1.0", 0, 1] is RolloutStatus.CANCELLED
    assert statuses["1.0", 1, 1] is RolloutStatus.DISCARDED


@pytest.mark.parametrize("until_end", [False, True])
async def test_tools_and_rewards_hold_no_slot_unless_asked_for(until_end: bool) -> None:
    """The environment waits until others have been with the servers, which needs their slot."""
    slots, most = 1, 0
    attempts = Attempts(slots, EventList(), until_end=until_end)
    both = asyncio.Barrier(2)

    async def rollout(index: int) -> None:
        nonlocal most
        key = AttemptKey(step=1, environment="e", group_id="0.0", index=index, attempt=1)
        async with attempts.running(f"0.0/{index}", key, attempts.slots, (1, index)) as attempt:
            async with attempt.call() as sent:
                sent("server", 0)
                most = max(most, attempts.slots.num_held)
                await asyncio.sleep(0)
            await both.wait()
            async with attempt.call() as sent:
                sent("server", 0)

    rollouts = asyncio.gather(*(rollout(index) for index in range(2)))
    if until_end:
        for _ in range(100):
            await asyncio.sleep(0)
        assert not rollouts.done()
        assert both.n_waiting == 1
        rollouts.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollouts
    else:
        async with asyncio.timeout(120):
            await rollouts
    assert most == 1
    assert attempts.slots.num_held == 0
    assert attempts.num_playing == 0


async def test_open_rollouts_are_bounded() -> None:
    attempts = Attempts(2, EventList(), max_open=3)
    release = asyncio.Event()
    most = 0

    async def rollout(index: int) -> None:
        nonlocal most
        key = AttemptKey(step=1, environment="e", group_id="0.0", index=index, attempt=1)
        async with attempts.running(f"0.0/{index}", key, attempts.slots, (1, index)) as attempt:
            async with attempt.call():
                pass
            most = max(most, attempts.num_playing)
            await release.wait()

    rollouts = [asyncio.create_task(rollout(index)) for index in range(8)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert attempts.num_playing == 3, (
        "one more than there are slots, for those with the environment"
    )
    assert attempts.num_waiting == 5
    release.set()
    await asyncio.gather(*rollouts)
    assert most == 3


async def test_programs_that_ask_many_things_at_once_get_a_slot_for_each() -> None:
    attempts = Attempts(2, EventList())
    inside = most = 0

    async def call(attempt) -> None:
        nonlocal inside, most
        async with attempt.call() as sent:
            sent("server", 0)
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    async with attempts.running("0.0/0", KEY, attempts.slots, (1,)) as attempt:
        await asyncio.gather(*(call(attempt) for _ in range(6)))
        assert attempt.stages.stage is Stage.ENVIRONMENT
    assert most == 2
    assert attempts.slots.num_held == 0
