"""What rewards and metrics may return, and how it is said when they return something else."""

import asyncio

import pytest
from tests.core.one_rollout import One, play

from telescope_core import (
    Example,
    ListSource,
    MultiTurnEnvironment,
    RolloutStatus,
    Split,
    group_reward,
    metric,
    reward,
)
from telescope_core.base.retries import ends_all
from telescope_core.in_process import InProcessEnvironment
from telescope_core.types import Group


class Talk(MultiTurnEnvironment):
    def examples(self, split):
        return ListSource([Example(id="talk", prompt="go")])


class Bad(One):
    """Returns what it was told to."""

    value: object = 1.0

    @reward
    def paid(self, rollout, example):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.5", "RewardError: reward Bad.paid ("),
        ("0.5", "must return a finite number, got '0.5' (str); return a float"),
        (None, "got None (NoneType)"),
        (float("nan"), "got nan (float)"),
        (2.0, "outside its declared range [0, 1]"),
        (ValueError("no box"), "ValueError: no box (in reward Bad.paid ("),
        (ValueError("no box"), "test_rewards.py:"),
    ],
)
async def test_a_reward_that_is_no_number_fails_with_its_place_and_never_pays_0(value, message):
    environment = Bad()
    environment.value = value
    rollout = await play(environment)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reward is None
    assert rollout.error is not None
    assert message in rollout.error
    assert rollout.tags["failed_in"] == "reward"


async def test_a_total_outside_the_range_ends_all_and_names_the_weights():
    class Twice(One):
        @reward
        def formed(self, rollout, example):
            return 1.0

        @reward(weight=0.5)
        def right(self, rollout, example):
            return 1.0

    rollout = await play(Twice())
    assert ends_all(rollout)
    assert "returned reward 1.5" in rollout.error
    assert "correct the reward (weights: formed 1, right 0.5)" in rollout.error


@pytest.mark.parametrize("value", [1, True, 0.25])
async def test_numbers_of_all_kinds_are_rewards(value):
    environment = Bad()
    environment.value = value
    assert (await play(environment)).reward == float(value)


async def test_a_metric_outside_its_range_is_a_failure():
    class Narrow(One):
        @metric(low=0, high=1)
        def share(self, rollout, example):
            return 1.5

    rollout = await play(Narrow())
    assert rollout.error is not None
    assert "returned 1.5, outside its declared range 0 to 1" in rollout.error


async def test_a_missing_answer_is_said_where_a_reward_reads_it():
    class Forgot(One):
        def examples(self, split):
            return ListSource([Example(id="train-3", prompt="yes?")])

        @reward
        def right(self, rollout, example):
            return rollout.completion_text == example.answer

    rollout = await play(Forgot())
    assert rollout.error is not None
    assert (
        "test_rewards.py): example 'train-3' has no answer, but it is read by right"
        in rollout.error
    )
    Forgot.needs_answer = False
    assert (await play(Forgot())).reward == 0.0


async def test_what_env_response_and_format_prompt_return_is_checked():
    class Wrong(Talk):
        def env_response(self, messages, episode):
            return {"content": "hi"}

    class Empty(One):
        def format_prompt(self, example):
            return []

    error = (await play(Wrong())).error
    assert error is not None
    assert "Wrong.env_response (" in error
    assert "must return text, a list of Message or None, got {'content'" in error
    error = (await play(Empty())).error
    assert error is not None
    assert "format_prompt must return text or a list of Message, got []" in error


async def test_async_methods_everywhere():
    class Async(One):
        async def format_prompt(self, example):
            return example.prompt + "!"

        async def gold_answer(self, example):
            return "yes"

        @reward
        async def right(self, rollout, example):
            await asyncio.sleep(0)
            return rollout.completion_text == example.answer

        async def compute_reward(self, rollout, example):
            return rollout.rewards["right"] / 2

        @group_reward
        async def first(self, rollouts, example):
            return [0.5 for _ in rollouts]

    client = InProcessEnvironment(Async(), name="it")
    gold = await client.gold(Split.TRAIN, 0)
    assert gold is not None
    assert gold.reward == 0.5
    assert gold.messages[0].content == "yes?!"
    group = Group(id="g", environment="it", example_id="one", rollouts=(gold,))
    scored = await client.score_group(Split.TRAIN, 0, group)
    assert scored.rollouts[0].reward == 1.0
    await client.close()


async def test_the_gold_of_several_turns_is_played():
    class Guess(Talk):
        def gold_answer(self, example):
            return ["first", "second"]

        def env_response(self, messages, episode):
            return None if messages[-1].content == "second" else "go on"

        @reward
        def found(self, rollout, example):
            return float(rollout.completion_text == "second")

    client = InProcessEnvironment(Guess(), name="it")
    gold = await client.gold(Split.TRAIN, 0)
    await client.close()
    assert gold is not None
    assert gold.reward == 1.0
    assert [message.content for message in gold.messages] == ["go", "first", "go on", "second"]


async def test_the_weights_of_the_parts_of_a_reward_are_described():
    class Weighted(Talk):
        @reward(weight=0.9)
        def correct(self, rollout, example):
            return 1.0

        @metric
        def length(self, rollout):
            return 3.0

        @group_reward(weight=0.1)
        def unlike(self, rollouts):
            return [0.0 for _ in rollouts]

    class Own(Weighted):
        def compute_reward(self, rollout, example):
            return max(rollout.rewards.values())

    found = [await InProcessEnvironment(one(), name="t").describe() for one in (Weighted, Own)]
    assert found[0].reward_weights == {"correct": 0.9, "unlike": 0.1}
    # A total of another kind has no weights.
    assert found[1].reward_weights == {}
