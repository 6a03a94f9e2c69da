"""How attempts end: one at a time, each with a row, and with the stages that it went through."""

import asyncio
from collections.abc import Callable

import pytest
from tests.train.rollouts.samplers import (
    GROUP_SIZE,
    GROUPS,
    Echo,
    EventList,
    echo,
    sampler_over,
)
from tests.train.rollouts.test_batch_order import Held, finished, settled, take, until
from tests.train.rollouts.test_stages import KEY, LAST, ROLLOUT, by_attempt

from telescope_core import Example, Rollout, TelescopeError, cleanup, reward
from telescope_core.errors import EndpointAccessError, EnvironmentProcessError
from telescope_core.records.events import Stage
from telescope_core.scripted import ScriptedClient
from telescope_core.types import RolloutStatus
from telescope_train.rollouts.attempts import AttemptStages
from telescope_train.rollouts.order import OFF_POLICY
from telescope_train.rollouts.sampler import RolloutSampler


class SlowToEnd(Echo):
    """Its cleanups wait until they are let go, as a container does that takes long to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ending = 0
        self.let_go = asyncio.Event()
        self.let_go.set()

    @cleanup
    async def stop_container(self, episode) -> None:
        self.num_ending += 1
        await self.let_go.wait()
        self.num_ending -= 1


class SlowToScore(Echo):
    """Its rewards wait until they are let go."""

    sync_runs_in = "loop"

    def __init__(self) -> None:
        super().__init__()
        self.num_scoring = 0
        self.let_go = asyncio.Event()

    @reward
    async def judged(self, rollout: Rollout, example: Example) -> float:
        self.num_scoring += 1
        await self.let_go.wait()
        return 1.0


def keys_of(rows) -> list[tuple[str, int, int]]:
    return sorted((row.group_id, row.index, row.attempt) for row in rows)


async def rows_after_close(sampler: RolloutSampler) -> list[Rollout]:
    async with asyncio.timeout(120):
        return [row for rows in (await sampler.close()).values() for row in rows]


async def slow_straggler() -> tuple[Held, EventList, SlowToEnd, RolloutSampler]:
    """Return a run whose rollout 0.1/2 is too old, and is being stopped, which takes long."""
    held, events, environment = Held(), EventList(), SlowToEnd()
    held.hold("0.1/2")
    sampler = finished(held, events, environment=environment, max_off_policy_steps=2)
    sampler.advance(0)
    for step in range(2):
        await take(sampler, held, step)
    await settled()
    environment.let_go.clear()
    held.version = 3
    sampler.advance(3)
    await until(lambda: environment.num_ending >= 1)
    return held, events, environment, sampler


async def test_an_attempt_begins_when_the_one_before_has_really_ended() -> None:
    """Weights change again while the first attempt still ends, which a worker has 10 s for."""
    held, events, environment, sampler = await slow_straggler()
    held.version = 4
    sampler.advance(4)
    await settled()
    mine = [one for one in events if (one.group_id, one.index) == ("0.1", 2)]
    assert {one.attempt for one in mine} == {1}, "two attempts at one rollout at once"
    held.release()
    environment.let_go.set()
    await until(lambda: held.asked.count("0.1/2") == 2)
    await settled()
    life = by_attempt(events)["0.1", 2, 2]
    assert [one.stage for one in life[:3]] == [Stage.DRAWN, Stage.WAITING, Stage.ENVIRONMENT]
    assert Stage.GENERATING in [one.stage for one in life], "it has kept its seat"
    rows = await rows_after_close(sampler)
    straggler = [row for row in rows if (row.group_id, row.index, row.attempt) == ("0.1", 2, 1)]
    assert [(row.status, row.status_reason) for row in straggler] in (
        [(RolloutStatus.CANCELLED, OFF_POLICY)],
        [],
    )
    assert sampler.attempts.num_playing == 0
    assert sampler.attempts.slots.num_held == 0


@pytest.mark.parametrize("has_begun_to_wait", [False, True])
async def test_a_run_that_ends_waits_for_attempts_that_are_being_stopped(
    has_begun_to_wait: bool,
) -> None:
    held, events, environment, sampler = await slow_straggler()
    if not has_begun_to_wait:
        held.version = 9
        sampler.advance(9)
    closing = asyncio.create_task(rows_after_close(sampler))
    await settled()
    assert not closing.done(), "what a rollout holds is still there"
    environment.let_go.set()
    rows = await closing
    lives = by_attempt(events)
    untaken = [key for key in lives if key in keys_of(rows)]
    assert ("0.1", 2, 1) in untaken
    assert len(keys_of(rows)) == len(set(keys_of(rows)))
    assert [life[-1].stage in LAST for life in lives.values()] == [True] * len(lives)
    assert sampler.attempts.num_playing == 0


async def test_an_attempt_takes_no_seat_away_but_its_own() -> None:
    attempts = sampler_over(ScriptedClient(echo), ahead=0).attempts
    async with attempts.running("0.0/0", KEY, attempts.slots, (1,)):
        async with attempts.running("0.0/0", KEY, attempts.slots, (2,)) as second:
            pass
        async with attempts.running("0.0/0", KEY, attempts.slots, (2,)) as second:
            inner = attempts.of_rollout("0.0/0")
        assert inner is second
        assert attempts.of_rollout("0.0/0") is None
    first = attempts.running("0.0/0", KEY, attempts.slots, (1,))
    later = attempts.running("0.0/0", KEY, attempts.slots, (2,))
    await first.__aenter__()
    attempt = await later.__aenter__()
    await first.__aexit__(None, None, None)
    assert attempts.of_rollout("0.0/0") is attempt
    await later.__aexit__(None, None, None)


async def test_attempts_that_wait_for_a_slot_when_the_run_ends_have_rows() -> None:
    held, events = Held(), EventList()
    held.hold("0.")
    sampler = finished(held, events, ahead=0, slots=2)
    sampler.advance(0)
    await until(lambda: len(held.asked) == 2)
    rows = await rows_after_close(sampler)
    lives = by_attempt(events)
    assert len(lives) == GROUPS * GROUP_SIZE, "four of them only waited"
    assert keys_of(rows) == sorted(lives)
    assert {row.status for row in rows} == {RolloutStatus.CANCELLED}
    assert {row.status_reason for row in rows} == {"cancelled"}
    assert {row.example_id for row in rows} == {""}, "the environment was not asked for any yet"


class NoWorkers(Echo):
    """Fails beyond what becomes a failed rollout, as an environment without workers does."""

    async def play(self, episode):
        raise AssertionError("not asked")


@pytest.mark.parametrize("kind", ["no worker is left", "no access", "a defect"])
async def test_attempts_that_end_the_run_have_a_row_and_a_last_event(kind: str) -> None:
    error: Exception = {
        "no worker is left": EnvironmentProcessError("no worker of echo can be kept alive"),
        "no access": EndpointAccessError("the key is wrong"),
        "a defect": ZeroDivisionError("division by zero"),
    }[kind]
    events = EventList()
    reply = error if kind == "no access" else "x"
    sampler = sampler_over(ScriptedClient([reply]), ahead=0, events=events, slots=2)
    if kind != "no access":

        async def play(request, policy) -> Rollout:
            raise error

        client = sampler._player.environments["echo"].client
        client.play = play
    sampler.advance(0)
    with pytest.raises(type(error)):
        await sampler.take(0)
    rows = await rows_after_close(sampler)
    lives = by_attempt(events)
    assert [life[-1].stage in LAST for life in lives.values()] == [True] * len(lives)
    assert keys_of(rows) == sorted(lives)
    failed = [row for row in rows if row.status is RolloutStatus.FAILED]
    assert {row.status_reason for row in failed} == {type(error).__name__}
    assert failed
    assert all(str(error) in str(row.error) for row in failed)
    assert issubclass(EndpointAccessError, TelescopeError)


async def stages_when(
    sampler: RolloutSampler, events: EventList, is_there: Callable[[], bool]
) -> list[list[Stage]]:
    sampler.advance(0)
    await until(is_there)
    await rows_after_close(sampler)
    return [[event.stage for event in life] for life in by_attempt(events).values()]


async def test_an_attempt_that_is_canceled_while_it_is_scored_was_scored() -> None:
    environment, events = SlowToScore(), EventList()
    sampler = sampler_over(
        ScriptedClient(echo), ahead=0, environment=environment, events=events, slots=40
    )
    all_score = GROUPS * GROUP_SIZE
    for life in await stages_when(sampler, events, lambda: environment.num_scoring == all_score):
        assert life == [
            *(Stage.DRAWN, Stage.WAITING, Stage.ENVIRONMENT),
            *(Stage.SCORING, Stage.CANCELLED),
        ]


class Unscorable(Echo):
    """Has a reward that raises."""

    @reward
    def broken(self, rollout: Rollout, example: Example) -> float:
        raise ZeroDivisionError("division by zero")


async def test_an_attempt_whose_reward_fails_was_scored() -> None:
    events = EventList()
    sampler = sampler_over(
        ScriptedClient(echo), ahead=0, environment=Unscorable(), events=events, slots=40
    )
    sampler.advance(0)
    with pytest.raises(TelescopeError, match="rollouts of a batch failed"):
        await sampler.take(0)
    await sampler.close()
    for life in by_attempt(events).values():
        assert [one.stage for one in life[-2:]] == [Stage.SCORING, Stage.FAILED]


async def test_scoring_is_timed_by_who_scores_and_else_by_what_it_took() -> None:
    events = EventList()
    life = AttemptStages(KEY, events.add)
    life.waits_to_begin()
    life.begins()
    life.is_scored()
    # A reward may ask the model, and calls that were withdrawn may end late.
    life.is_sent("a", 1)
    life.is_answered()
    life.ends(ROLLOUT)
    assert [event.stage for event in events][3:] == [
        *(Stage.SCORING, Stage.GENERATING, Stage.SCORING, Stage.DONE)
    ]
    life = AttemptStages(KEY, events.add)
    life.waits_to_begin()
    life.is_cancelled("why")
    life.is_scored()
    assert life.stage is Stage.CANCELLED, "events that come late change nothing"


async def test_what_the_end_of_a_run_leaves_is_no_part_of_a_step_that_was_taken() -> None:
    """The attempts of a taken step are in its file already, and stay when the run is resumed."""
    held = Held()
    held.hold("0.1/2")
    sampler = finished(held)
    sampler.advance(0)
    for step in range(3):
        await take(sampler, held, step)
    await until(lambda: held.asked.count("0.1/2") == 1)
    async with asyncio.timeout(120):
        left = await sampler.close()
    assert ("0.1", 2, 1) in keys_of(row for rows in left.values() for row in rows)
    assert min(left) == 3, "steps 1 to 3 are batches 0 to 2"
