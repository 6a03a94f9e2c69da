"""What `kl_in_reward` subtracts from rewards, against sums over tokens one at a time."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telescope_core.base.chains import sampled_tokens
from telescope_train.batches.packing import Packing
from telescope_train.step.distances import kl_penalties

sys.path.insert(0, str(Path(__file__).parent))
from test_credit import branched, rules_of

PACKING = Packing(seq_len=16, num_ranks=2, hidden_size=8, max_tokens=10)


class Scored:
    """Ranks whose log-probs depend on the token and its place alone."""

    async def logprobs(self, shards):
        return self._each(shards, -0.3)

    async def reference_logprobs(self, shards):
        return self._each(shards, -0.7)

    def _each(self, shards, slope):
        return [
            [
                np.where(batch.mask_T, logprob(slope, batch.positions_T), 0).astype("f4")
                for batch in s
            ]
            for s in shards
        ]


def scored(batch, slope):
    return np.where(batch.mask_T, logprob(slope, batch.positions_T), 0).astype("f4")


def logprob(slope, position):
    return slope * (1.0 + 0.1 * position)


@pytest.mark.parametrize("sampled", [-0.5, -4.0])
async def test_each_agent_bears_the_distance_of_policy_and_reference_on_its_own_tokens(sampled):
    played = branched((1.0, "x3 y2 x1"), (0.0, "y4"))
    rollouts = [
        replace(one, turns=tuple(with_logprobs(turn, sampled) for turn in one.turns))
        for one in played.rollouts
    ]
    rules = rules_of(kl_penalty_tau=0.5, kl_in_reward=True)
    found = await kl_penalties(
        [replace(played, rollouts=tuple(rollouts))], rules, PACKING, Scored()
    )
    # A branch begins with a prompt of two tokens.
    gaps = {n: [logprob(-0.3, 2 + i) - logprob(-0.7, 2 + i) for i in range(n)] for n in range(5)}
    assert found.of_agents == {
        ("g", 0): pytest.approx({"x": -0.5 * sum(gaps[3] + gaps[1]), "y": -0.5 * sum(gaps[2])}),
        ("g", 1): pytest.approx({"y": -0.5 * sum(gaps[4])}),
    }
    every = gaps[3] + gaps[2] + gaps[1] + gaps[4]
    assert found.num_tokens == len(every)
    assert found.k3 == pytest.approx(sum(math.exp(-gap) - 1 + gap for gap in every))


async def test_without_the_setting_nothing_is_computed():
    found = await kl_penalties([branched((1.0, "x3"))], rules_of(), PACKING, ranks=None)
    assert (dict(found.of_agents), found.num_tokens) == ({}, 0)


def with_logprobs(turn, sampled):
    ids = turn.completion.tokens.completion_ids
    tokens = sampled_tokens(turn.completion.tokens.prompt_ids, ids, (sampled,) * len(ids))
    return replace(turn, completion=replace(turn.completion, tokens=tokens))
