"""What may be sampled when, and what becomes of failures."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.asking import ask, lost_rollout
from tests.train.rollouts.samplers import GROUP_SIZE, GROUPS, Echo, echo, sampler_over

from telescope_core import (
    Example,
    Group,
    Message,
    Rollout,
    RolloutStatus,
    Sampling,
    TelescopeError,
    group_reward,
    reward,
)
from telescope_core.base.retries import MAX_FAILED
from telescope_core.environments.held import Watched
from telescope_core.environments.running import CURRENT, Notes, Request
from telescope_core.errors import EndpointAccessError, RolloutCrashError, TemplateLossError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_train.rollouts.failures import MAX_DRAWS_PER_GROUP, Boundary, boundary_of
from telescope_train.rollouts.playing import TrainingEnvironment


async def settle(client: ScriptedClient, expected: int) -> int:
    """Wait until `expected` requests came, then see that no more do while others could run."""
    async with asyncio.timeout(120):
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


async def test_what_the_chat_template_would_lose_stops_the_run_at_once() -> None:
    """Others of the mix would go on for ever beside an environment that cannot be played."""

    def loses(messages: Sequence[Message]) -> Any:
        lost = messages[-1].content == "p0"
        return TemplateLossError("it leaves out results; set X") if lost else echo(messages)

    client = ScriptedClient(loses)
    sampler = sampler_over(client, ahead=0)
    sampler.advance(0)
    with pytest.raises(TemplateLossError, match=r"^environment echo: it leaves out results; set X"):
        await sampler.take(0)
    assert len(client.requests) <= GROUPS * GROUP_SIZE, "no rollout is played again"
    await sampler.close()


async def test_a_batch_in_which_everything_failed_stops_with_the_reason() -> None:
    client = ScriptedClient([RuntimeError("no such model")])
    sampler = sampler_over(client, ahead=0)
    sampler.advance(0)
    with pytest.raises(TelescopeError, match=r"\b6 rollouts.*no such model"):
        await sampler.take(0)
    await sampler.close()
    assert len(client.requests) == GROUPS * GROUP_SIZE * MAX_FAILED, "each had all its attempts"


async def test_closing_cancels_what_is_being_played() -> None:
    client = ScriptedClient(echo, delay_s=3600)
    sampler = sampler_over(client, ahead=1)
    sampler.advance(0)
    await settle(client, 4)
    async with asyncio.timeout(120):
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
    may_end = asyncio.Event()

    class Gated(Echo):
        async def play(self, episode):
            await may_end.wait()
            return await super().play(episode)

    sampler = sampler_over(ScriptedClient(echo), ahead=1, environment=Gated())
    sampler.advance(0)
    async with asyncio.timeout(120):
        while sampler.queues()["rollouts_playing"] < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
    taking = asyncio.create_task(sampler.take(0))
    await asyncio.sleep(0)
    may_end.set()
    batch = await taking
    assert batch.queues == {"groups_ready": 0, "rollouts_playing": 4, "rollouts_waiting": 8}
    await sampler.close()


async def test_a_reward_that_raises_is_told_from_an_environment_that_does() -> None:
    class Bad(Echo):
        @reward
        def said_it(self, rollout: Rollout, example: Example) -> float:
            raise ZeroDivisionError("in the reward")

    request = ask(group_id="0.0", sampling=Sampling(max_tokens=4), deadline_s=300.0)
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
    sampler._player.environments = {
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


async def test_a_watcher_is_told_of_the_function_that_judges_groups() -> None:
    notes, seen = Notes(), []

    def judges(group: Group) -> bool:
        seen.extend(Watched(notes.memory, os.getpid()).running())
        return True

    CURRENT.set(Request(notes, call=0))
    sampler = sampler_over(ScriptedClient(echo), ahead=0, batches=1, accept=judges, timeout_s=60.0)
    sampler.advance(0)
    await sampler.take(0)
    await sampler.close()
    texts = [one.text for one in seen if one.text.startswith("should_accept_fn ")]
    assert len(texts) == GROUPS
    assert "judges (" in texts[0]
    assert "of group 0." in texts[0]
    assert all(one.until_s - time.monotonic() <= 60.0 for one in seen if one.text in texts)
    assert Watched(notes.memory, os.getpid()).running() == []


async def test_a_group_reward_that_fails_costs_its_group_and_not_the_run() -> None:
    seen: list[str] = []

    class Together(Echo):
        @group_reward
        def together(self, rollouts, example):
            seen.append(example.id)
            if example.id == seen[0]:
                raise RolloutCrashError("group_reward together ended the process that ran it")
            return [0.0] * len(rollouts)

    client = ScriptedClient(echo)
    sampler = sampler_over(client, ahead=0, batches=1, environment=Together(), groups=4)
    sampler.advance(0)
    batch = await sampler.take(0)
    await sampler.close()
    unscored = [group for group in batch.groups if group.example_id == seen[0]]
    assert 0 < len(unscored) < len(batch.groups)
    for group in batch.groups:
        for rollout in group.rollouts:
            assert (rollout.status is RolloutStatus.FAILED) is (group in unscored)
            assert (rollout.reward is None) is (group in unscored)
    assert batch.failed_attempts[Boundary.PROCESS] == GROUP_SIZE * len(unscored)
