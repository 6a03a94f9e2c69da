"""Every algorithm learns the same tiny task, from rollouts to the optimizer, in one process.

From random weights a completion holds a digit about once in ten characters; the reward is the share
of its four places that hold one. Real rollouts, credit, packing, loss and FSDP2; only the inference
server is replaced by the model itself.
"""

import statistics
import sys
from pathlib import Path

import pytest

from telescope_core.environments import SingleTurnEnvironment, reward
from telescope_core.examples import GeneratedSource
from telescope_core.types import Example
from telescope_train.algorithms import known_algorithms
from telescope_train.models.tiny import make_tiny_model
from telescope_train.plan.checks.algorithm import algorithm_problems

sys.path.insert(0, str(Path(__file__).parent))
from in_process_sampler import InProcessPolicy, learn, learning_config

pytestmark = pytest.mark.engine

STEPS, PROMPTS, GROUP_SIZE, PLACES = 12, 12, 12, 4


class Digits(SingleTurnEnvironment):
    """Write four digits."""

    def examples(self, split):
        def make(random, index):
            text = f"{random.randrange(1000):03d}"
            return Example(id=f"{split}-{index}", prompt=f"{text}=")

        return GeneratedSource(make, seed=f"digits/{split}")

    def gold_answer(self, example):
        return "0000"

    @reward
    def digits(self, rollout, example):
        return sum(map(str.isdigit, rollout.completion_text[:PLACES])) / PLACES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3)


async def rewards_while_training(model, algorithm: str) -> list[float]:
    """Return the mean reward of each step's rollouts."""
    config = learning_config(
        model, algorithm, num_steps=STEPS, group_size=GROUP_SIZE, max_tokens=PLACES
    )
    assert not list(algorithm_problems(config))
    rewards = []

    def look(version, groups, credit):
        found = [rollout.reward for group in groups for rollout in group.rollouts]
        assert None not in found, groups[0].rollouts[0].error
        rewards.append(statistics.fmean(found))
        print(f"{algorithm}: step {version}, reward {rewards[-1]:.2f}")

    policy = InProcessPolicy(model, seed=0)
    await learn(policy, Digits(), config, num_prompts=PROMPTS, look=look)
    return rewards


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=[] if name == "grpo" else pytest.mark.nightly)
        for name in known_algorithms()
    ],
)
async def test_the_reward_rises(tiny, algorithm):
    rewards = await rewards_while_training(tiny, algorithm)
    assert rewards[0] < 0.2
    assert statistics.fmean(rewards[-3:]) > rewards[0] + 0.3, rewards


def test_all_algorithms_are_among_them():
    all_of_them = "cispo dapo dppo dr_grpo gmpo grpo gspo maxrl reinforce_pp rloo sapo"
    assert set(all_of_them.split()) <= set(known_algorithms())
