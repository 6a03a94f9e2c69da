"""`has_signal` in a run compares rewards on the scale of credit."""

import itertools
import json
from contextlib import nullcontext

import pytest
from tests.train.rollouts.samplers import EventList

from telescope_core import (
    ConfigError,
    Example,
    ListSource,
    SingleTurnEnvironment,
    TelescopeError,
    reward,
)
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_train.plan.load import load_train_config
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.compared import RewardScale, is_told_apart
from telescope_train.rollouts.mix import make_sampler, refuse_rewards, training_environments
from telescope_train.step.credit import credit_rules


class Counting(SingleTurnEnvironment):
    """Rewards are 2, 3, 4 and so on."""

    reward_max = 1000.0

    def __init__(self):
        super().__init__()
        self.rewards = itertools.count(2)

    def examples(self, split):
        return ListSource([Example(id="e", prompt="p")])

    @reward
    def paid(self, rollout, example):
        return float(next(self.rewards))


@pytest.mark.parametrize(("highest", "is_rejected"), [(1.0, True), (1000.0, False)])
async def test_rewards_that_differ_beyond_the_configured_range_are_rejected(highest, is_rejected):
    entry = f'[{{"name": "toy", "reward_min": 0.0, "reward_max": {highest}, "group_size": 2}}]'
    flags = ["--name", "toy", "--number_of_steps", "1", "--model", "a/b", "--environments", entry]
    more = ["--prompts_batch_size_for_trainer", "1", "--should_accept_fn", "has_signal"]
    config = load_train_config([], [*flags, *more])
    clients = {"toy": InProcessEnvironment(Counting(), name="toy")}
    mix = await training_environments(config, clients, {}, {})
    attempts = Attempts.from_config(config, EventList(), num_servers=1)
    sampler = make_sampler(config, mix, ScriptedClient(["yes"]), attempts)
    sampler.advance(0)
    if is_rejected:
        with pytest.raises(TelescopeError, match="all_equal 32"):
            await sampler.take(0)
    else:
        assert len((await sampler.take(0)).groups) == 1
    await sampler.close()


def test_a_group_without_any_reward_has_no_signal():
    assert not is_told_apart([], RewardScale())


class Penalized(Counting):
    reward_min, reward_max = -1.0, 1.0


@pytest.mark.parametrize(
    ("algorithm", "entry", "is_refused"),
    [
        ("maxrl", {}, True),
        ("grpo", {}, False),
        ("maxrl", {"reward_min": -1.0, "reward_max": 1.0}, False),
    ],
)
async def test_rewards_that_the_algorithm_cannot_take_are_refused_before_any_is_given(
    algorithm, entry, is_refused
):
    entries = json.dumps([{"name": "toy", **entry}])
    flags = ["--name", "toy", "--number_of_steps", "1", "--model", "a/b", "--environments", entries]
    config = load_train_config([], [*flags, "--algorithm", algorithm])
    toy = InProcessEnvironment(Penalized(), name="toy")
    refused = pytest.raises(ConfigError, match="toy may be as low as -1, and maxrl")
    with refused if is_refused else nullcontext():
        refuse_rewards(config, {"toy": await toy.describe()})


@pytest.mark.parametrize("norm", ["parts", "group"])
async def test_rewards_that_are_no_sums_cannot_be_taken_apart(norm):
    flags = ["--name", "toy", "--number_of_steps", "1", "--model", "a/b", "--advantage_norm", norm]
    config = load_train_config([], [*flags, "--environments", '[{"name": "toy"}]'])
    toy = InProcessEnvironment(Counting(), name="toy")
    refused = pytest.raises(ConfigError, match="toy has no reward that is a sum of parts")
    with refused if norm == "parts" else nullcontext():
        refuse_rewards(config, {"toy": await toy.describe()})


async def test_credit_and_acceptance_know_the_weights_of_the_parts():
    """A group whose totals are equal is accepted if its parts tell it apart."""
    entry = '[{"name": "toy", "group_size": 2}]'
    flags = ["--name", "toy", "--number_of_steps", "1", "--model", "a/b", "--environments", entry]
    more = ["--prompts_batch_size_for_trainer", "1", "--should_accept_fn", "has_signal"]
    config = load_train_config([], [*flags, *more, "--advantage_norm", "parts"])
    clients = {"toy": InProcessEnvironment(Traded(), name="toy")}
    mix = await training_environments(config, clients, {}, {})
    attempts = Attempts.from_config(config, EventList(), num_servers=1)
    sampler = make_sampler(config, mix, ScriptedClient(["yes"]), attempts)
    sampler.advance(0)
    (group,) = (await sampler.take(0)).groups
    await sampler.close()
    assert len({rollout.reward for rollout in group.rollouts}) == 1
    assert credit_rules(config, mix, vocab_size=100).weights == {"toy": {"paid": 1.0, "other": 0.5}}


class Traded(Counting):
    """One part of each rollout is 1, in turn; the second counts for half, and pays twice."""

    @reward
    def paid(self, rollout, example):
        self.turn = next(self.rewards) % 2
        return float(self.turn)

    @reward(weight=0.5)
    def other(self, rollout, example):
        return 2.0 * (1 - self.turn)
