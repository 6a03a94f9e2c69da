"""Every algorithm learns the same tiny task, from rollouts to the optimizer, in one process.

From random weights a completion holds a digit about once in ten characters; the reward is the share
of its four places that hold one. Real rollouts, credit, packing, loss and FSDP2; only the inference
server is replaced by the model itself.
"""

import random
import statistics
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope_core.environments import SingleTurnEnvironment, reward
from telescope_core.examples import GeneratedSource
from telescope_core.types import Example
from telescope_train.algorithms import known_algorithms, load_algorithm
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


async def rewards_while_training(
    model, algorithm: str, *, group_size: int = GROUP_SIZE, **others
) -> list[float]:
    """Return the mean reward of each step's rollouts."""
    config = learning_config(
        model, algorithm, num_steps=STEPS, group_size=group_size, max_tokens=PLACES, **others
    )
    assert not list(algorithm_problems(config))
    rewards = []

    def look(version, groups, credit):
        found = [rollout.reward for group in groups for rollout in group.rollouts]
        assert None not in found, groups[0].rollouts[0].error
        rewards.append(statistics.fmean(found))
        print(f"{algorithm}: step {version}, reward {rewards[-1]:.2f}")

    policy = InProcessPolicy(model, seed=0)
    num_prompts = PROMPTS * GROUP_SIZE // group_size
    await learn(policy, Digits(), config, num_prompts=num_prompts, look=look)
    return rewards


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory):
    """The model after supervised steps on answers of four digits."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=2e-3), random.Random(0)
    for _ in range(60):
        texts = []
        for _ in range(32):
            asked = [{"role": "user", "content": f"{generator.randrange(1000):03d}="}]
            start = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            texts.append(f"{start}{generator.randrange(10**PLACES):0{PLACES}d}")
        ids = tokenizer(texts, add_special_tokens=False, return_tensors="pt")["input_ids"]
        logits = model(ids, use_cache=False).logits[:, -PLACES - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -PLACES:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("models") / "teacher"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=[] if name == "grpo" else pytest.mark.nightly)
        for name in known_algorithms()
        if not load_algorithm(name).needs_reference
    ],
)
async def test_the_reward_rises(tiny, algorithm):
    rewards = await rewards_while_training(tiny, algorithm)
    assert rewards[0] < 0.2
    assert statistics.fmean(rewards[-3:]) > rewards[0] + 0.3, rewards


async def test_a_student_learns_from_its_teacher_alone(tiny, teacher):
    """From one rollout of each example, and without a look at its reward."""
    found = await rewards_while_training(tiny, "opd", group_size=1, reference_model=str(teacher))
    assert found[0] < 0.2
    assert statistics.fmean(found[-3:]) > found[0] + 0.3, found


@pytest.mark.nightly
async def test_a_teacher_beside_rewards(tiny, teacher):
    beside = {"reference_model": str(teacher), "kl_penalty_tau": 0.5}
    found = await rewards_while_training(tiny, "rloo", **beside)
    assert statistics.fmean(found[-3:]) > found[0] + 0.3, found


def test_all_algorithms_are_among_them():
    all_of_them = "cispo dapo dppo dr_grpo gmpo grpo gspo maxrl opd reinforce_pp rloo sapo"
    assert set(all_of_them.split()) <= set(known_algorithms())
