"""`batch_order = "finished"`, `max_off_policy_steps`, and what a checkpoint keeps of both."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.train.rollouts.samplers import GROUP_SIZE, GROUPS, EventList, sampler_over

from telescope_core.records.events import Stage
from telescope_core.types import (
    Completion,
    Group,
    Message,
    Rollout,
    RolloutStatus,
    Sampling,
    Turn,
)
from telescope_train.checkpoints.sampler_state import read_sampler_state, write_sampler_state
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.draw import Drawn
from telescope_train.rollouts.order import OFF_POLICY, PendingGroup, by_draw, oldest_version
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.rollouts.sampler import RolloutSampler

VERSIONS = 12


class Held:
    """Policies whose rollouts wait until `release` lets them go, and sample at `version`."""

    def __init__(self) -> None:
        self.version = 0
        self.attempts: Attempts | None = None
        self.asked: list[str] = []
        self.num_tokens: Callable[[str], int] = lambda rollout_id: 1
        self._open: dict[str, asyncio.Event] = {}
        self._is_free: Callable[[str], bool] = lambda rollout_id: True

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> "HeldPolicy":
        return HeldPolicy(self, rollout_id)

    def hold(self, *prefixes: str) -> None:
        """Keep rollouts whose ids begin so from ending."""
        self._is_free = lambda rollout_id: not rollout_id.startswith(prefixes)

    def release(self) -> None:
        self._is_free = lambda rollout_id: True
        for event in self._open.values():
            event.set()

    async def wait(self, rollout_id: str) -> None:
        self.asked.append(rollout_id)
        if not self._is_free(rollout_id):
            event = self._open[rollout_id] = asyncio.Event()
            await event.wait()

    async def close(self) -> None: ...


class HeldPolicy:
    endpoint = None

    def __init__(self, held: Held, rollout_id: str) -> None:
        self._held = held
        self._rollout_id = rollout_id

    async def complete(self, messages, sampling, *, tools=()) -> Completion:
        held, version = self._held, self._held.version
        attempt = None if held.attempts is None else held.attempts.of_rollout(self._rollout_id)
        assert attempt is not None
        async with attempt.call() as sent:
            sent("server", version)
            await held.wait(self._rollout_id)
        return Completion(
            message=Message(role="assistant", content=messages[-1].content),
            finish_reason="stop",
            num_prompt_tokens=1,
            num_completion_tokens=held.num_tokens(self._rollout_id),
            oldest_version=version,
            newest_version=held.version,
        )


def sampler_of(held: Held, events: EventList | None = None, **settings) -> RolloutSampler:
    options = {"ahead": 1, "batches": VERSIONS, "slots": 1000, "timeout_s": 600.0}
    sampler = sampler_over(held, events=events, **{**options, **settings})
    held.attempts = sampler.attempts
    return sampler


def finished(held: Held, events: EventList | None = None, **settings) -> RolloutSampler:
    return sampler_of(held, events, is_in_drawn_order=False, **settings)


async def settled() -> None:
    """Give whatever could happen a chance to."""
    for _ in range(300):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def ended(sampler: RolloutSampler, *, but: str = "none") -> None:
    """Wait until every place that nobody has taken has ended, except `but`."""
    pending_groups = [one for batch in sampler._pending.values() for one in batch]
    left = [one for one in pending_groups if one.group_id != but]
    await until(lambda: all(one.is_done for one in left))


def ids(batch: SampledBatch) -> list[str]:
    return [group.id for group in batch.groups]


async def take(sampler: RolloutSampler, held: Held, step: int) -> SampledBatch:
    async with asyncio.timeout(120):
        batch = await sampler.take(step)
    held.version = step + 1
    sampler.advance(step + 1)
    return batch


async def taken_with(
    group_id: str, sampler: RolloutSampler, held: Held, *, first_step: int
) -> tuple[SampledBatch, Group]:
    """Take batches until one has this group; returns both."""
    for step in range(first_step, VERSIONS):
        batch = await take(sampler, held, step)
        for group in batch.groups:
            if group.id == group_id:
                return batch, group
    raise AssertionError(f"{group_id} was never trained on")


async def test_a_batch_in_finished_order_waits_for_no_straggler() -> None:
    held = Held()
    held.hold("0.1/2")
    sampler = finished(held)
    sampler.advance(0)
    taken: list[str] = []
    for step in range(3):
        taken += ids(await take(sampler, held, step))
    await ended(sampler, but="0.1")
    held.release()
    (left,) = {"0.0", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"} - set(taken)
    fourth = await take(sampler, held, 3)
    # All three had ended before the straggler was let go; which of them was last, threads decide.
    assert set(ids(fourth)) < {left, "4.0", "4.1"}
    await taken_with("0.1", sampler, held, first_step=4)
    await sampler.close()


async def test_every_draw_is_trained_on_once_in_finished_order() -> None:
    held = Held()
    held.hold("0.1", "3.0/1")
    sampler = finished(held, batches=6, max_off_policy_steps=2)
    sampler.advance(0)
    taken: list[str] = []
    for step in range(6):
        if step == 4:
            held.release()
        taken += ids(await take(sampler, held, step))
    assert Counter(taken) == Counter(f"{b}.{p}" for b in range(6) for p in range(GROUPS))
    assert await sampler.close() == {}


async def test_rollouts_that_are_too_old_are_stopped_at_once_and_played_again() -> None:
    held, events = Held(), EventList()
    held.hold("0.1/2")
    sampler = finished(held, events, max_off_policy_steps=2)
    sampler.advance(0)
    for step in range(2):
        await take(sampler, held, step)
    await settled()
    assert held.asked.count("0.1/2") == 1, "two updates behind is within the bound"
    held.version = 3
    sampler.advance(3)
    assert not sampler._pending[0][0].is_done
    # The one that was waiting, and those of its group that had ended.
    await until(lambda: [held.asked.count(f"0.1/{n}") for n in range(3)] == [2, 2, 2])
    held.release()
    batch, late = await taken_with("0.1", sampler, held, first_step=3)
    assert {turn.completion.oldest_version for r in late.rollouts for turn in r.turns} == {3}
    replaced = [one for one in batch.replaced if one.group_id == "0.1"]
    assert sorted((r.index, r.attempt) for r in replaced) == [(0, 1), (1, 1), (2, 1)]
    assert {r.status for r in replaced} == {RolloutStatus.CANCELLED}
    assert {r.status_reason for r in replaced} == {OFF_POLICY}
    assert sorted(r.attempt for r in late.rollouts) == [2, 2, 2]
    stops = [one for one in events if one.stage is Stage.CANCELLED]
    assert [(one.group_id, one.index, one.reason) for one in stops] == [("0.1", 2, OFF_POLICY)]
    assert batch.failed_attempts == {}, "none of them failed"
    await sampler.close()


async def test_groups_that_wait_too_long_for_their_turn_are_played_again() -> None:
    held = Held()
    sampler = finished(held, ahead=4, max_off_policy_steps=4, batches=20)
    sampler.advance(0)
    await ended(sampler)
    held.version = 5
    sampler._version = 5
    batch = await sampler.take(5)
    assert {
        t.completion.oldest_version for g in batch.groups for r in g.rollouts for t in r.turns
    } == {5}
    assert Counter(one.status_reason for one in batch.replaced) == {OFF_POLICY: GROUPS * GROUP_SIZE}
    await sampler.close()


async def test_within_the_bound_nothing_is_stopped_in_drawn_order() -> None:
    held, events = Held(), EventList()
    held.hold("1.1/0")
    sampler = sampler_of(held, events, max_off_policy_steps=1)
    sampler.advance(0)
    assert ids(await take(sampler, held, 0)) == ["0.0", "0.1"]
    await settled()
    held.release()
    assert ids(await take(sampler, held, 1)) == ["1.0", "1.1"]
    assert not [one for one in events if one.stage is Stage.CANCELLED]
    await sampler.close()


@pytest.mark.parametrize("steps_before", [1, 3])
async def test_finished_order_goes_on_after_a_checkpoint(tmp_path: Path, steps_before: int) -> None:
    def odd(group: Group) -> bool | str:
        return int(group.example_id) % 4 != 0 or "multiple of four"

    held = Held()
    held.hold("0.1")
    sampler = finished(held, batches=6, accept=odd)
    sampler.advance(0)
    taken: list[str] = []
    for step in range(steps_before):
        taken += ids(await take(sampler, held, step))
    await ended(sampler, but="0.1")
    write_sampler_state(tmp_path, await sampler.settled(steps_before))
    await sampler.close()

    again = Held()
    again.version = steps_before
    state = read_sampler_state(tmp_path)
    assert {one.ready is None for one in state.open_places} == {True, False}
    sampler = finished(again, batches=6, accept=odd)
    sampler.restore(state)
    sampler.advance(steps_before)
    ready = {one.ready.group.id for one in state.open_places if one.ready is not None}
    for step in range(steps_before, 6):
        batch = await take(sampler, again, step)
        taken += ids(batch)
        # How long groups of the checkpoint took is not known.
        assert (batch.duration_s is None) == bool(ready.intersection(ids(batch)))
    assert Counter(one.partition("-")[0] for one in taken) == Counter(
        f"{b}.{p}" for b in range(6) for p in range(GROUPS)
    )
    assert not [one for one in again.asked if one.rpartition("/")[0] in ready]
    assert await sampler.close() == {}


async def test_a_restored_place_that_was_replaced_draws_the_same_again(tmp_path: Path) -> None:
    """When what a checkpoint kept becomes too old, the same example is played, not the first."""
    held = Held()
    rejected_once: set[str] = set()

    def accept(group: Group) -> bool | str:
        place = group.id.partition("-")[0]
        return place in rejected_once or bool(rejected_once.add(place)) or "the first"

    sampler = finished(held, accept=accept, max_off_policy_steps=1)
    sampler.advance(0)
    await ended(sampler)
    state = await sampler.settled(0)
    before = {one.batch: one.ready.group for one in state.open_places if one.position == 0}
    await sampler.close()
    sampler = finished(again := Held(), max_off_policy_steps=1)
    sampler.restore(state)
    again.version = 2
    sampler.advance(2)
    _, after = await taken_with("0.0-2", sampler, again, first_step=2)
    assert after.example_id == before[0].example_id
    await sampler.close()


async def test_steps_are_complete_when_nothing_of_them_is_played_any_more() -> None:
    held = Held()
    held.hold("0.1")
    sampler = finished(held, batches=6)
    sampler.advance(0)
    taken: Counter[int] = Counter()
    for step in range(6):
        if step == 3:
            held.release()
        before = {number for number, count in taken.items() if count == GROUPS}
        batch = await take(sampler, held, step)
        taken.update(int(name.partition(".")[0]) for name in ids(batch))
        now = {number for number, count in taken.items() if count == GROUPS}
        assert batch.ended_steps == tuple(sorted(number + 1 for number in now - before))
    assert len(now) == 6
    await sampler.close()


async def test_what_was_trained_on_is_compared_with_what_was_drawn() -> None:
    """Against a slow version: the lengths of all that is trained on, and of batches as a whole."""
    held = Held()
    held.num_tokens = lambda rollout_id: 90 if ".1/" in rollout_id else 10
    held.hold("0.1")
    sampler = finished(held, batches=6)
    sampler.advance(0)
    trained: list[str] = []
    found: list[float] = []
    for step in range(6):
        if step == 3:
            held.release()
            await ended(sampler)
        batch = await take(sampler, held, step)
        trained += ids(batch)
        whole = [n for n in range(6) if sum(i.startswith(f"{n}.") for i in trained) == GROUPS]
        drawn = [held.num_tokens(f"{n}.{p}/") for n in whole for p in range(GROUPS)]
        if not drawn:
            assert batch.length_bias is None
            continue
        lengths = [held.num_tokens(f"{one}/") for one in trained]
        expected = (sum(lengths) / len(lengths)) / (sum(drawn) / len(drawn))
        assert batch.length_bias == pytest.approx(expected)
        found.append(expected)
    assert found[-1] == 1.0, "in the end everything was trained on"
    assert min(found) < 0.9, "without the straggler, short answers came first"
    await sampler.close()


async def test_of_more_groups_than_a_batch_takes_those_that_ended_first_are_taken() -> None:
    held = Held()
    held.hold("0.")
    sampler = finished(held)
    sampler.advance(0)
    await until(lambda: len(held.asked) == 2 * GROUPS * GROUP_SIZE)
    later = list(sampler._pending[1])
    await until(lambda: all(one.is_done for one in later))
    held.release()
    await ended(sampler)
    batch = await take(sampler, held, 0)
    assert sorted(ids(batch)) == [one.group_id for one in later]
    await sampler.close()


def played(group_id: str, *versions: int, index: int = 0) -> Rollout:
    """Return a rollout whose turns were sampled at these versions."""
    said = Message(role="assistant", content="")
    turns = [
        Completion(message=said, finish_reason="stop", oldest_version=one, newest_version=9)
        for one in versions
    ]
    return Rollout(
        environment="toy",
        example_id="e",
        group_id=group_id,
        index=index,
        turns=tuple(Turn(completion=one, started_s=0.0, ended_s=1.0) for one in turns),
    )


def group_of(*rollouts: Rollout) -> Group:
    first = rollouts[0]
    return Group(id=first.group_id, environment="toy", example_id="e", rollouts=rollouts)


def test_a_rollout_is_as_old_as_the_oldest_of_its_turns() -> None:
    assert oldest_version(played("0.0", 4, 2, 3)) == 2
    assert oldest_version(played("0.0")) is None


def test_groups_are_in_the_order_of_their_numbers_not_of_their_letters() -> None:
    ordered = ["0.3", "1.2", "1.2-2", "1.2-10", "1.10", "10.0"]
    groups = [group_of(played(one)) for one in sorted(ordered, reverse=True)]
    assert [group.id for group in by_draw(groups)] == ordered


async def test_attempts_that_no_step_was_trained_on_say_why() -> None:
    """Those of a group that is given up had become too old; the others outlived the run."""
    drawn = Drawn(environment="toy", example_index=0)
    pending = PendingGroup(batch=1, position=2, drawn=drawn, num_draws=2)
    earlier = [replace(played("1.2"), status=RolloutStatus.DISCARDED, status_reason="too easy")]
    old = [played("1.2-2", index=index) for index in range(2)]
    pending.ended += [*earlier, *old]
    loop = asyncio.get_running_loop()
    pending.task = loop.create_task(asyncio.sleep(0, group_of(*old)))
    await pending.task
    kept = [(one.index, one.status, one.status_reason) for one in pending.unused()]
    assert kept == [
        (0, RolloutStatus.DISCARDED, "too easy"),
        *((index, RolloutStatus.DISCARDED, "run_ended") for index in range(2)),
    ]
    pending.give_up()
    assert [(one.index, one.status, one.status_reason) for one in pending.unused()] == [
        *((index, RolloutStatus.CANCELLED, OFF_POLICY) for index in range(2)),
        (0, RolloutStatus.DISCARDED, "too easy"),
    ]
