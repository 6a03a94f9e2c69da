"""`examples/rl_loop.py`: the loop in one file really learns, on the engine that it publishes to."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


@pytest.fixture(scope="module")
def rl_loop():
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_loop"] = module
    spec.loader.exec_module(module)
    return module


def test_it_is_short_enough_to_read_from_top_to_bottom():
    assert EXAMPLE.read_text().count("\n") <= 250


def test_the_loss_has_the_gradient_of_reinforce_where_the_server_has_the_same_weights(rl_loop):
    behavior = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    logprobs = behavior.clone().requires_grad_()
    rl_loop.token_loss(logprobs, behavior, advantages).sum().backward()
    assert torch.allclose(logprobs.grad, -advantages)


def test_advantages_do_not_depend_on_shift_or_scale_of_the_rewards(rl_loop):
    rewards_G = np.array([0.0, 0.25, 1.0, 0.5])
    expected = rl_loop.advantages_of(rewards_G)
    assert abs(expected.mean()) < 1e-12
    assert np.allclose(rl_loop.advantages_of(3 * rewards_G + 7), expected, atol=1e-4)


@pytest.mark.engine
async def test_the_reward_rises(rl_loop, tiny_model, first_weights):
    lines: list[str] = []
    rewards = await rl_loop.train(tiny_model, first_weights, steps=8, show=lines.append)
    assert len(rewards) == len(lines) == 8
    assert rewards[0] < 0.3
    assert np.mean(rewards[-2:]) > rewards[0] + 0.3, rewards
    gaps = [float(re.search(r"trainer (\S+) apart", line)[1]) for line in lines]
    assert max(gaps) < 1e-3, "the server does not sample from the weights that were published"
