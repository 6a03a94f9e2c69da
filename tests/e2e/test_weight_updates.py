"""Weights go from the trainer to a live vLLM server, in place; nothing of the old ones stays."""

import asyncio
import random
from pathlib import Path

import pytest
from tests.e2e.conftest import backend_settings, connected, local_ranks

from telescope_core.types import Completion, Message, Rollout, Sampling, Turn
from telescope_train.algorithms import load_algorithm
from telescope_train.batches.batch import StepPlan
from telescope_train.batches.packing import pack
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.batches.weighting import token_weights
from telescope_train.chat.renderer import load_renderer
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool

pytestmark = pytest.mark.engine

NUM_UPDATES = 20
TEMPERATURE = 0.8


def rollout_of(completion: Completion, *, index: int) -> Rollout:
    turn = Turn(completion=completion, started_s=0.0, ended_s=1.0)
    return Rollout(
        environment="toy", example_id="x", group_id="g", index=index, turns=(turn,), reward=1.0
    )


async def sample(policies: TokenPolicySource, rng: random.Random) -> list[Completion]:
    prompts = [f"{rng.randint(10, 99)}+{rng.randint(10, 99)}=" for _ in range(8)]
    sampling = Sampling(max_tokens=12, temperature=TEMPERATURE)
    return await asyncio.gather(
        *(
            policies.policy(f"g{i}/0").complete([Message(role="user", content=text)], sampling)
            for i, text in enumerate(prompts)
        )
    )


async def test_engine_and_trainer_agree_over_many_updates(
    tiny_model: Path, fresh_pool: ServerPool
) -> None:
    settings = backend_settings(tiny_model, learning_rate=2e-3)
    ranks = local_ranks(settings)
    try:
        publisher = await connected(fresh_pool, ranks)
        policies = TokenPolicySource(fresh_pool, load_renderer(settings.model), max_model_len=256)
        weighting = load_algorithm("grpo").weighting
        rng = random.Random(0)
        mismatches: list[float] = []
        for version in range(NUM_UPDATES):
            completions = await sample(policies, rng)
            assert {c.oldest_version for c in completions} == {version}
            assert {c.newest_version for c in completions} == {version}
            samples = [
                one
                for index, completion in enumerate(completions)
                for one in samples_from_rollout(
                    rollout_of(completion, index=index), (-1.0) ** index, TEMPERATURE
                )
            ]
            weights_N = token_weights(samples, weighting, max_tokens=12)
            shards = pack(samples, weights_N, seq_len=1024, num_ranks=1)
            row = await ranks.train_step(StepPlan(minibatches=[shards], order=[0]), version)
            mismatches.append(max(abs(row["mismatch/max"]), abs(row["mismatch/min"])))
            await publisher.publish(version + 1)
        assert max(mismatches) <= 1e-3, mismatches
        assert fresh_pool.version == NUM_UPDATES
    finally:
        await ranks.close()
