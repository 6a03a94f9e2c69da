"""What may be sampled when, and what becomes of failures."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.asking import ask, lost_rollout

from telescope_core import (
    Environment,
    Example,
    GeneratedSource,
    Group,
    Message,
    MultiTurnEnvironment,
    Rollout,
    RolloutStatus,
    Sampling,
    SingleTurnEnvironment,
    Split,
    StopReason,
    TelescopeError,
    reward,
)
from telescope_core.attempts import MAX_FAILED
from telescope_core.errors import EndpointAccessError, EndpointError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PolicySource
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion
from telescope_train.rollouts.accept import AcceptFn
from telescope_train.rollouts.draw import ExampleDraw, Source
from telescope_train.rollouts.failures import MAX_DRAWS_PER_GROUP, Boundary, boundary_of
from telescope_train.rollouts.held_out import TrainingExamples
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.rollouts.sampler import (
    RolloutSampler,
    SamplerSettings,
    TrainingEnvironment,
)

GROUP_SIZE = 3
GROUPS = 2


class Echo(SingleTurnEnvironment):
    """Pays 1 for saying the prompt."""

    def examples(self, split: Split) -> GeneratedSource:
        return GeneratedSource(lambda rng, i: Example(id=f"{i}", prompt=f"p{i}"), seed=0)

    @reward
    def said_it(self, rollout: Rollout, example: Example) -> float:
        return float(rollout.completion_text == example.prompt)


def sampler_over(
    client: PolicySource,
    *,
    ahead: int,
    batches: int = 4,
    accept: AcceptFn | None = None,
    environment: Environment | None = None,
    groups: int = GROUPS,
    timeout_s: float = 5.0,
    lanes: int = 4,
    seed: int | None = None,
) -> RolloutSampler:
    environment = TrainingEnvironment(
        client=InProcessEnvironment(environment or Echo(), name="echo"),
        group_size=GROUP_SIZE,
        sampling=Sampling(max_tokens=4),
    )
    draw = ExampleDraw([Source(environment="echo", weight=1.0, num_examples=None)], seed=0)
    settings = SamplerSettings(
        num_batches=batches,
        groups_per_batch=groups,
        max_async_rollout=ahead,
        max_concurrent_rollouts=lanes,
        rollout_timeout_s=timeout_s,
        seed=seed,
        accept=accept,
    )
    examples = TrainingExamples(draw, {"echo": environment.client}, {})
    return RolloutSampler({"echo": environment}, examples, client, settings)


def echo(messages: Sequence[Message]) -> str:
    return messages[-1].content


async def settle(client: ScriptedClient, expected: int) -> int:
    """Wait until `expected` requests came, then see that no more do while others could run."""
    async with asyncio.timeout(5):
        while len(client.requests) < expected:  # noqa: ASYNC110
            await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
    return len(client.requests)


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_sampling_runs_ahead_by_exactly_what_is_allowed(ahead: int) -> None:
    client = ScriptedClient(echo)
    sampler = sampler_over(client, ahead=ahead)
    per_batch = GROUPS * GROUP_SIZE
    sampler.advance(0)
    assert await settle(client, per_batch * (1 + ahead)) == per_batch * (1 + ahead)
    batch = await sampler.take(0)
    assert await settle(client, 0) == per_batch * (1 + ahead), "taking admits nothing"
    assert [group.id for group in batch.groups] == ["0.0", "0.1"]
    sampler.advance(1)
    assert await settle(client, per_batch * (2 + ahead)) == per_batch * (2 + ahead)
    await sampler.close()


async def test_nothing_is_sampled_beyond_the_last_step() -> None:
    client = ScriptedClient(echo)
    sampler = sampler_over(client, ahead=5, batches=2)
    sampler.advance(0)
    await sampler.take(0)
    await sampler.take(1)
    sampler.advance(2)
    assert len(client.requests) == 2 * GROUPS * GROUP_SIZE
    await sampler.close()


async def test_a_failure_is_retried_and_counted_and_never_a_reward() -> None:
    calls: list[int] = []

    def sometimes(messages: Sequence[Message]) -> Any:
        calls.append(1)
        return RuntimeError("server hiccup") if len(calls) == 1 else echo(messages)

    sampler = sampler_over(ScriptedClient(sometimes), ahead=0)
    sampler.advance(0)
    batch = await sampler.take(0)
    assert batch.failed_attempts == {Boundary.ENVIRONMENT: 1}
    assert [r.reward for group in batch.groups for r in group.rollouts] == [1.0] * 6
    await sampler.close()


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


async def test_rollouts_over_the_deadline_are_played_once_and_stay_in_their_groups() -> None:
    walkers = Walkers()
    sampler = sampler_over(
        walkers, ahead=0, environment=Walk(), groups=50, timeout_s=2.0, lanes=150
    )
    sampler.advance(0)
    batch = await sampler.take(0)
    await sampler.close()
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    late = [r for r in rollouts if r.stop_reason is StopReason.TIMEOUT]
    assert (len(late), len(rollouts)) == (54, 150)
    assert walkers.num_started == len(rollouts), "an attempt was played again"
    assert batch.failed_attempts == {}
    assert {r.status for r in rollouts} == {RolloutStatus.KEPT}
    assert {r.reward for r in late} == {0.0}
    # As many turns as were taken, so what is kept is as long as what was played.
    assert sum(len(r.turns) for r in rollouts) == 6 * (sum(range(1, 26)) - 9)


async def test_a_rollout_that_keeps_failing_has_no_reward() -> None:
    def fails_on_first_example(messages: Sequence[Message]) -> Any:
        return RuntimeError("broken") if messages[-1].content == "p0" else echo(messages)

    sampler = sampler_over(ScriptedClient(fails_on_first_example), ahead=0)
    sampler.advance(0)
    batch = await sampler.take(0)
    failed = batch.groups[0].rollouts
    assert {r.status for r in failed} == {RolloutStatus.FAILED}
    assert {r.reward for r in failed} == {None}
    assert sum(batch.failed_attempts.values()) == MAX_FAILED * GROUP_SIZE
    await sampler.close()


async def test_an_endpoint_that_refuses_every_request_stops_the_run_at_once() -> None:
    client = ScriptedClient([EndpointAccessError("the judge answered 401: who are you?")])
    sampler = sampler_over(client, ahead=0)
    sampler.advance(0)
    with pytest.raises(EndpointAccessError, match=r"environment echo: .*the judge answered 401"):
        await sampler.take(0)
    assert len(client.requests) <= GROUPS * GROUP_SIZE, "no rollout is played again"
    await sampler.close()


async def test_a_batch_in_which_everything_failed_stops_with_the_reason() -> None:
    sampler = sampler_over(ScriptedClient([RuntimeError("no such model")]), ahead=0)
    sampler.advance(0)
    with pytest.raises(TelescopeError, match=r"all 6 rollouts .* no such model"):
        await sampler.take(0)
    await sampler.close()


async def test_every_attempt_is_returned_once_with_its_number() -> None:
    asked: dict[str, int] = {}

    def fails_twice(messages: Sequence[Message]) -> Any:
        prompt = messages[-1].content
        asked[prompt] = asked.get(prompt, 0) + 1
        return RuntimeError("hiccup") if asked[prompt] <= 2 else echo(messages)

    sampler = sampler_over(ScriptedClient(fails_twice), ahead=0, batches=1, lanes=1)
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

    sampler = sampler_over(Policies(echo), ahead=0, lanes=6)
    sampler.advance(0)
    async with asyncio.timeout(5):
        while len(sampler._ended[0]) < GROUP_SIZE:  # noqa: ASYNC110
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
    async with asyncio.timeout(5):
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


async def test_closing_cancels_what_is_being_played() -> None:
    client = ScriptedClient(echo, delay_s=3600)
    sampler = sampler_over(client, ahead=1)
    sampler.advance(0)
    await settle(client, 4)
    async with asyncio.timeout(5):
        await sampler.close()


def odd(group: Group) -> bool | str:
    return int(group.example_id) % 2 == 1 or "even"


@pytest.mark.parametrize("ahead", [0, 1])
async def test_rejected_groups_are_replaced_in_their_own_place(ahead: int) -> None:
    sampler = sampler_over(ScriptedClient(echo), ahead=ahead, batches=2, accept=odd)
    sampler.advance(0)
    first = await sampler.take(0)
    sampler.advance(1)
    second = await sampler.take(1)
    accepted = [group for batch in (first, second) for group in batch.groups]
    rejected = [group for batch in (first, second) for group in batch.rejected]
    assert len(accepted) == 2 * GROUPS, "every batch is full"
    assert all(int(group.example_id) % 2 for group in accepted)
    assert [group.id.partition("-")[0] for group in accepted] == ["0.0", "0.1", "1.0", "1.1"]
    assert not any(int(group.example_id) % 2 for group in rejected)
    assert {(r.status, r.status_reason) for g in rejected for r in g.rollouts} == {
        (RolloutStatus.DISCARDED, "even")
    }
    in_order = [group for group in accepted + rejected if "-" not in group.id]
    assert sorted(int(group.example_id) for group in in_order) == list(range(0, 4 * GROUPS, 2))
    ids = [group.id for group in accepted + rejected]
    assert len(set(ids)) == len(ids)
    await sampler.close()


@pytest.mark.parametrize("ahead", [0, 1])
async def test_what_replaces_a_group_does_not_depend_on_which_ended_first(ahead: int) -> None:
    async def played(late: str) -> dict[str, str]:
        """The example of each group; groups in the place `late` end last."""

        class Hesitant(Echo):
            @reward
            async def said_it(self, rollout: Rollout, example: Example) -> float:
                for _ in range(50 if rollout.group_id[2] == late else 0):
                    await asyncio.sleep(0)
                return 1.0

        def third(group: Group) -> bool:
            return int(group.example_id) % 3 == 0

        sampler = sampler_over(
            ScriptedClient(echo), ahead=ahead, batches=3, accept=third, environment=Hesitant()
        )
        found = {}
        for number in range(3):
            sampler.advance(number)
            batch = await sampler.take(number)
            found |= {group.id: group.example_id for group in batch.all_groups}
        await sampler.close()
        return found

    first = await played("0")
    assert first == await played("1")
    assert any("-" in group_id for group_id in first)


async def test_a_function_that_accepts_nothing_stops_with_the_rate() -> None:
    sampler = sampler_over(ScriptedClient(echo), ahead=0, accept=lambda group: False)
    sampler.advance(0)
    with pytest.raises(TelescopeError, match=r"rejected 63 groups .* at most 3.1%"):
        await sampler.take(0)
    await sampler.close()
    assert MAX_DRAWS_PER_GROUP == 32


async def test_a_group_that_failed_is_no_matter_of_acceptance() -> None:
    def fails_on_first_example(messages: Sequence[Message]) -> Any:
        return RuntimeError("broken") if messages[-1].content == "p0" else echo(messages)

    asked: list[str] = []

    def accept(group: Group) -> bool:
        asked.append(group.example_id)
        return True

    sampler = sampler_over(ScriptedClient(fails_on_first_example), ahead=0, accept=accept)
    sampler.advance(0)
    batch = await sampler.take(0)
    assert asked == ["2"]
    assert batch.rejected == ()
    await sampler.close()


async def test_queues_are_counted_when_the_trainer_asks() -> None:
    client = ScriptedClient(echo, delay_s=0.02)
    sampler = sampler_over(client, ahead=1)
    sampler.advance(0)
    await settle(client, 4)
    batch = await sampler.take(0)
    assert batch.queues == {"groups_ready": 0, "rollouts_playing": 4, "rollouts_waiting": 8}
    await sampler.close()


async def test_a_reward_that_raises_is_told_from_an_environment_that_does() -> None:
    class Bad(Echo):
        @reward
        def said_it(self, rollout: Rollout, example: Example) -> float:
            raise ZeroDivisionError("in the reward")

    request = ask(group_id="0.0", sampling=Sampling(max_tokens=4), deadline_s=5.0)
    client = InProcessEnvironment(Bad(), name="bad")
    failed = await client.play(request, ScriptedClient(echo).policy("0.0/0"))
    assert failed.error is not None
    assert failed.error.startswith("ZeroDivisionError: in the reward (in reward ")
    assert boundary_of(failed) is Boundary.REWARD
    broken = ScriptedClient([RuntimeError("in the environment")])
    failed = await client.play(request, broken.policy("0.0/0"))
    assert boundary_of(failed) is Boundary.ENVIRONMENT


async def test_rollouts_lost_with_their_process_are_played_again_and_not_counted_as_tries():
    class Dying(InProcessEnvironment):
        lost = 0

        async def play(self, request, policy):
            if request.index == 0 and self.lost < MAX_FAILED + 1:
                self.lost += 1
                return lost_rollout(request)
            return await super().play(request, policy)

        def stats(self):
            return {"restarts": float(self.lost)}

    sampler = sampler_over(ScriptedClient(["p"]), ahead=0)
    client = Dying(Echo(), name="echo")
    sampler._environments = {
        "echo": TrainingEnvironment(
            client=client, group_size=GROUP_SIZE, sampling=Sampling(max_tokens=4)
        )
    }
    sampler.advance(0)
    batch = await sampler.take(0)
    await sampler.close()
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    assert all(rollout.reward is not None for rollout in rollouts)
    assert batch.failed_attempts == {Boundary.PROCESS: MAX_FAILED + 1}
    assert batch.workers == {"echo/restarts": MAX_FAILED + 1}


def test_whose_doing_a_failure_of_a_process_is():
    request = ask(sampling=Sampling(max_tokens=1), deadline_s=1)
    lost = lost_rollout(request)
    assert lost.is_lost
    assert boundary_of(lost) is Boundary.PROCESS
    starved = replace(lost, status_reason="MemoryError", error="MemoryError: ")
    assert not starved.is_lost
    assert boundary_of(starved) is Boundary.PROCESS
