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
from telescope_core.types import Example, Sampling
from telescope_train.algorithms import known_algorithms, load_algorithm
from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.packing import Packing
from telescope_train.config.schema import TrainConfig
from telescope_train.models.tiny import make_tiny_model
from telescope_train.plan.checks.algorithm import algorithm_problems
from telescope_train.step.credit import CreditRules, assign_credit
from telescope_train.step.minibatches import plan_step
from telescope_train.trainer.worker import TrainerWorker

sys.path.insert(0, str(Path(__file__).parent))
from in_process_sampler import InProcessPolicy, play_groups

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


def config_of(model, algorithm: str) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run": {"name": "learn", "number_of_steps": STEPS, "seed": 0},
            "model": {"model": str(model)},
            "environments": [{"name": "toy"}],
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": PLACES},
            "algorithm": {"algorithm": algorithm, "number_of_minibatches": 2},
            "trainer": {"learning_rate": 1e-3, "seq_len": 1024, "gradient_checkpointing": False},
        }
    )


async def rewards_while_training(model, algorithm: str) -> list[float]:
    """Return the mean reward of each step's rollouts."""
    config = config_of(model, algorithm)
    assert not list(algorithm_problems(config))
    sampling = Sampling(max_tokens=PLACES)
    rules = CreditRules(
        algorithm=load_algorithm(algorithm),
        config=config,
        sampling={"toy": sampling},
        vocab_size=103,
    )
    packing = Packing(seq_len=1024, num_ranks=1, hidden_size=128, max_tokens=PLACES)
    policy, environment = InProcessPolicy(model, seed=0), Digits()
    worker = TrainerWorker(BackendSettings.from_config(config, device="cpu"))
    rewards = []
    try:
        for version in range(STEPS):
            groups = await play_groups(
                environment,
                policy,
                examples=range(version * PROMPTS, (version + 1) * PROMPTS),
                group_size=GROUP_SIZE,
                sampling=sampling,
            )
            found = [rollout.reward for group in groups for rollout in group.rollouts]
            assert None not in found, groups[0].rollouts[0].error
            rewards.append(statistics.fmean(found))
            print(f"{algorithm}: step {version}, reward {rewards[-1]:.2f}")
            credit = assign_credit(groups, rules)
            plan = plan_step(credit.samples, rules, packing, version=version)
            if not plan.order:
                continue
            worker.train_minibatches(plan.of_rank(0), plan.order, version=version)
            policy.take_weights(worker.export_weights(), version=version + 1)
    finally:
        worker.close()
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
    nine = "cispo dapo dr_grpo grpo gspo maxrl reinforce_pp rloo sapo"
    assert set(nine.split()) <= set(known_algorithms())
