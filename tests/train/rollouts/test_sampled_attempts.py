"""Limits, attempts and seeds: what is played once, what is recorded, and what is repeated."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.train.rollouts.samplers import GROUP_SIZE, GROUPS, echo, sampler_over

from telescope_core import (
    Example,
    GeneratedSource,
    Message,
    MultiTurnEnvironment,
    Rollout,
    RolloutStatus,
    Sampling,
    Split,
    StopReason,
    TelescopeError,
    reward,
)
from telescope_core.base.retries import MAX_FAILED
from telescope_core.errors import EndpointError, EnvironmentProcessError
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.simulation.virtual_time import run_in_virtual_time


class Walk(MultiTurnEnvironment):
    """Pays 1 at the end of a walk, whose length is in the prompt."""

    max_turns = 1000
    sync_runs_in = "loop"

    def examples(self, split: Split) -> GeneratedSource:
        return GeneratedSource(lambda rng, i: Example(id=f"{i}", prompt="walk"), seed=0)

    def env_response(self, messages, episode):
        return None if messages[-1].content == "there" else "on"

    @reward
    def arrived(self, rollout: Rollout, example: Example) -> float:
        return float(rollout.completion_text == "there")


class Walkers:
    """Policies of rollouts of 1 to 25 turns, of which those beyond 16 turns never come to an end.

    That is 36 % of them. `num_started` counts the rollouts that asked for anything.
    """

    def __init__(self) -> None:
        self.num_started = 0

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> "Walker":
        self.num_started += 1
        return Walker(num_turns=self.num_started % 25 + 1)

    async def close(self) -> None: ...


class Walker:
    endpoint = None

    def __init__(self, num_turns: int) -> None:
        self._left = num_turns
        self._is_endless = num_turns > 16

    def hanging(self) -> "Walker":
        self._left = 1
        return self

    async def complete(self, messages, sampling, *, tools=()) -> Completion:
        if self._left == 1 and self._is_endless:
            await asyncio.Event().wait()
        self._left -= 1
        said = "on" if self._left else "there"
        return Completion(message=Message(role="assistant", content=said), finish_reason="stop")


def test_rollouts_over_the_deadline_are_played_once_and_stay_in_their_groups() -> None:
    walkers = Walkers()

    async def main() -> SampledBatch:
        sampler = sampler_over(
            walkers, ahead=0, environment=Walk(), groups=50, timeout_s=2.0, slots=150
        )
        sampler.advance(0)
        batch = await sampler.take(0)
        await sampler.close()
        return batch

    batch = run_in_virtual_time(main)
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    late = [r for r in rollouts if r.stop_reason is StopReason.TIMEOUT]
    assert (len(late), len(rollouts)) == (54, 150)
    assert walkers.num_started == len(rollouts), "an attempt was played again"
    assert batch.failed_attempts == {}
    assert {r.status for r in rollouts} == {RolloutStatus.KEPT}
    assert {r.reward for r in late} == {0.0}
    # As many turns as were taken, so what is kept is as long as what was played.
    assert sum(len(r.turns) for r in rollouts) == 6 * (sum(range(1, 26)) - 9)


async def test_every_attempt_is_returned_once_with_its_number() -> None:
    asked: dict[str, int] = {}

    def fails_twice(messages: Sequence[Message]) -> Any:
        prompt = messages[-1].content
        asked[prompt] = asked.get(prompt, 0) + 1
        return RuntimeError("hiccup") if asked[prompt] <= 2 else echo(messages)

    sampler = sampler_over(ScriptedClient(fails_twice), ahead=0, batches=1, slots=1)
    sampler.advance(0)
    batch = await sampler.take(0)
    final = [rollout for group in batch.groups for rollout in group.rollouts]
    assert sum(batch.failed_attempts.values()) == len(batch.replaced) == 4
    assert {one.status for one in batch.replaced} == {RolloutStatus.FAILED}
    everything = [(r.group_id, r.index, r.attempt) for r in (*final, *batch.replaced)]
    assert len(set(everything)) == len(everything) == 10
    for rollout in final:
        before = [one for one in batch.replaced if _of(one) == _of(rollout)]
        assert [one.attempt for one in before] == [*range(1, rollout.attempt)]
    assert await sampler.close() == {}


def _of(rollout: Rollout) -> tuple[str, int]:
    return rollout.group_id, rollout.index


async def test_closing_returns_what_the_run_did_not_get_to() -> None:
    class Policies(ScriptedClient):
        """Answers the first example, and never the second."""

        def policy(self, rollout_id, sampling=None):
            inner = super().policy(rollout_id, sampling)
            return inner if rollout_id.startswith("0.0") else Walker(num_turns=17).hanging()

    sampler = sampler_over(Policies(echo), ahead=0, slots=6)
    sampler.advance(0)
    async with asyncio.timeout(120):
        while not sampler._pending[0][0].is_done:  # noqa: ASYNC110
            await asyncio.sleep(0)
    left = await sampler.close()
    states = {(one.index, one.group_id): (one.status, one.status_reason) for one in left[0]}
    assert states == {
        **{(i, "0.0"): (RolloutStatus.DISCARDED, "run_ended") for i in range(GROUP_SIZE)},
        **{(i, "0.1"): (RolloutStatus.CANCELLED, "cancelled") for i in range(GROUP_SIZE)},
    }
    assert await sampler.close() == {}


class Dice:
    """Policies that roll dice: seeded ones where the request has a seed. Some never answer."""

    def __init__(self, hangs: str = "none") -> None:
        self._hangs = hangs

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> "Die":
        assert sampling is not None
        return Die(sampling.seed, hangs=rollout_id.startswith(self._hangs))

    async def close(self) -> None: ...


class Die:
    endpoint = None

    def __init__(self, seed: int | None, *, hangs: bool) -> None:
        self._random = random.Random(seed)
        self._hangs = hangs

    async def complete(self, messages, sampling, *, tools=()) -> Completion:
        if self._hangs:
            await asyncio.Event().wait()
        # Whoever asks first need not be answered first.
        for _ in range(random.randrange(5)):
            await asyncio.sleep(0)
        said = f"{messages[-1].content} {self._random.random()}"
        return Completion(message=Message(role="assistant", content=said), finish_reason="stop")


def said_in(batch: SampledBatch) -> list[list[str]]:
    return [[rollout.completion_text for rollout in group.rollouts] for group in batch.groups]


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_restored_sampler_draws_and_with_seeds_samples_the_same(ahead: int) -> None:
    async def last_batches(seed: int | None, *, is_killed: bool) -> list[list[list[str]]]:
        sampler = sampler_over(Dice(), ahead=ahead, seed=seed)
        sampler.advance(0)
        await sampler.take(0)
        sampler.advance(1)
        state = await sampler.settled(1)
        if is_killed:
            await sampler.close()
            sampler = sampler_over(Dice(), ahead=ahead, seed=seed)
            sampler.restore(state)
            sampler.advance(1)
        batches = [await sampler.take(1)]
        sampler.advance(2)
        batches.append(await sampler.take(2))
        await sampler.close()
        return [said_in(batch) for batch in batches]

    straight = await last_batches(7, is_killed=False)
    assert await last_batches(7, is_killed=True) == straight
    assert await last_batches(8, is_killed=True) != straight
    every = [text for batch in straight for group in batch for text in group]
    assert len(set(every)) == len(every), "two rollouts have one seed"
    unseeded = await last_batches(None, is_killed=True)
    assert unseeded != straight
    drawn = [[[text.split()[0] for text in g] for g in batch] for batch in straight]
    assert [[[text.split()[0] for text in g] for g in batch] for batch in unseeded] == drawn


async def test_another_attempt_has_another_seed() -> None:
    seeds: list[int | None] = []

    class Failing(Dice):
        def policy(self, rollout_id, sampling=None):
            seeds.append(sampling.seed)
            return ScriptedClient([EndpointError("gone")]).policy(rollout_id)

    sampler = sampler_over(Failing(), ahead=0, batches=1, seed=7)
    sampler.advance(0)
    with pytest.raises(TelescopeError):
        await sampler.take(0)
    await sampler.close()
    assert len(set(seeds)) == len(seeds) == GROUPS * GROUP_SIZE * MAX_FAILED


async def test_a_checkpoint_waits_for_the_batch_of_the_next_step_alone() -> None:
    sampler = sampler_over(Dice(hangs="2."), ahead=2)
    sampler.advance(0)
    await sampler.take(0)
    sampler.advance(1)
    async with asyncio.timeout(120):
        state = await sampler.settled(1)
    assert (state.next_batch, [*state.batches]) == (2, [1])
    assert state.draw_position == 2 * GROUPS
    expected = said_in(await sampler.take(1))
    await sampler.close()
    assert said_in(state.batches[1]) == expected
    again = sampler_over(Dice(), ahead=2)
    again.restore(state)
    again.advance(1)
    assert said_in(await again.take(1)) == expected
    later = [said_in(await again.take(number)) for number in (2, 3)]
    drawn = [group[0].split()[0] for batch in later for group in batch]
    assert drawn == ["p8", "p10", "p12", "p14"], "the draws after those of the state"
    await again.close()


@pytest.mark.parametrize(
    ("error", "is_same"),
    [(EnvironmentProcessError("pid 7 is gone"), True), (EndpointError("busy"), False)],
)
async def test_what_was_lost_with_a_process_is_played_again_with_its_seed(
    error: TelescopeError, is_same: bool
) -> None:
    seeds: dict[str, list[int | None]] = {}

    class Failing(ScriptedClient):
        def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Any:
            assert sampling is not None
            seeds.setdefault(rollout_id, []).append(sampling.seed)
            is_first = len(seeds[rollout_id]) == 1
            script = ScriptedClient([error]) if is_first else ScriptedClient(echo)
            return script.policy(rollout_id)

    sampler = sampler_over(Failing([]), ahead=0, batches=1, seed=3)
    sampler.advance(0)
    batch = await sampler.take(0)
    await sampler.close()
    assert all(r.reward is not None for group in batch.groups for r in group.rollouts)
    assert {r.attempt for group in batch.groups for r in group.rollouts} == {2}
    assert {len(ones) for ones in seeds.values()} == {2}
    assert {first == second for first, second in seeds.values()} == {is_same}
    assert len({first for first, _ in seeds.values()}) == len(seeds)
