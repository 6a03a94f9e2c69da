"""Rewards and metrics are given what the names of their parameters stand for."""

from dataclasses import dataclass, field

import pytest
from tests.core.one_rollout import play

from telescope_core import (
    Environment,
    Episode,
    Example,
    RolloutStatus,
    SingleTurnEnvironment,
    group_reward,
    metric,
    reward,
    setup,
)
from telescope_core.environments import runs_in
from telescope_core.errors import EnvironmentLoadError
from telescope_core.open import open_environment
from telescope_core.playing.rollout import score_group
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.types import Group


class Asked(SingleTurnEnvironment):
    """Each method asks for other values."""

    reward_max = 10.0

    def examples(self, split):
        return [Example(id="e", prompt="yes?", answer="yes", info={"worth": 3})]

    @reward
    def correct(self, completion, answer):
        return completion == answer

    @reward
    async def worth(self, info, prompt):
        return info["worth"] if prompt == "yes?" else 0

    @metric
    def in_any_order(self, example, _rollout):
        return len(_rollout.turns) if example.id == "e" else -1

    @metric
    def reads_the_state(self, state, messages):
        return state["n"] + len(messages)

    @setup
    def begin(self, episode):
        episode.state["n"] = 40

    @group_reward
    def distinct(self, completions, answer):
        return [float(completions.count(answer) == 1) for _ in completions]


async def test_values_come_by_name_in_any_order():
    environment = Asked()
    rollout = await play(environment)
    assert rollout.error is None
    assert rollout.rewards == {"correct": 1.0, "worth": 3.0}
    assert rollout.metrics == {"in_any_order": 1.0, "reads_the_state": 42.0}
    group = Group(id="g", environment="it", example_id="e", rollouts=(rollout,))
    example = environment.fetcher.source("train").example(0)
    (scored,) = (await score_group(environment, group, example)).rollouts
    assert (scored.rewards["distinct"], scored.reward) == (1.0, 5.0)


async def test_a_reward_that_takes_the_answer_needs_one():
    class NoAnswer(Asked):
        def examples(self, split):
            return [Example(id="e", prompt="p", info={"worth": 3})]

    rollout = await play(NoAnswer())
    assert rollout.status is RolloutStatus.FAILED
    assert "read by correct" in rollout.error


def define(text):
    names = {"SingleTurnEnvironment": SingleTurnEnvironment, "reward": reward, "metric": metric}
    names |= {"group_reward": group_reward, "runs_in": runs_in}
    exec(f"class Wrong(SingleTurnEnvironment):\n    {text}", names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@reward\n    def r(self, completions): return 1", "did you mean 'completion'?"),
        ("@reward\n    def r(self, parser): return 1", "'parser', which stands for nothing; did"),
        ("@metric\n    def r(self, a, b): return 1", "the names are rollout, example, episode"),
        ("@group_reward\n    def r(self, rollout): return 1", "did you mean 'rollouts'?"),
        ("@group_reward\n    def r(self, rollouts, episode): return 1", "stands for nothing"),
        ("@reward\n    def r(rollout, example): return 1", "must have self as its first parameter"),
        (
            "@reward\n    def r(self, answr=''): return 1",
            "always have its default; did you mean 'a",
        ),
        (
            "@reward\n    def r(self, *, scale=0.5): return 1",
            "'scale', which stands for nothing, so",
        ),
        ("@reward\n    def r(self, answer, *rest): return 1", "a parameter '*rest', which stands"),
        ("@metric\n    def r(self, answer, **info): return 1", "a parameter '**info', which"),
        ("@metric\n    def r(*arguments): return 1", "must have self as its first parameter"),
        ("@group_reward\n    def r(self, rollouts, power=2): return 1", "always have its default"),
        ("@reward\n    def r(self, *, answer): return 1", "'answer' by position; remove the *"),
        (
            "@reward\n    @runs_in('process')\n    def r(self, state): return 1",
            "so it cannot take the state",
        ),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused_where_the_class_is_defined(text, said):
    with pytest.raises(EnvironmentLoadError) as error:
        define(text)
    assert said in str(error.value)


@dataclass
class Found:
    """The state of one rollout."""

    places: list[str] = field(default_factory=list)


async def test_each_rollout_has_a_state_of_the_declared_class():
    class Remembering(Asked):
        State = Found

        @setup
        def begin(self, episode: Episode[Found]):
            episode.state.places.append("start")

        @metric
        def reads_the_state(self, state):
            return len(state.places)

    environment = Remembering()
    rollouts = [await play(environment) for _ in range(2)]
    seen = [one.metrics["reads_the_state"] for one in rollouts]
    assert seen == [1.0, 1.0]


class NoReward(SingleTurnEnvironment):
    data = ("one?", "two?")

    @metric
    def length(self, completion):
        return len(completion)


class Combined(NoReward):
    def compute_reward(self, rollout, example):
        return 1.0


def test_an_environment_without_a_reward_is_refused_when_it_is_opened():
    with pytest.raises(EnvironmentLoadError, match=r"NoReward .* has no reward, so every rollout"):
        open_environment(
            f"{__name__}:NoReward", processes=ProcessSettings(isolation=Isolation.NONE)
        )
    assert isinstance(Combined.from_settings({}), Environment)
