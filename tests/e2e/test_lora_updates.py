"""With LoRA a live vLLM server is sent only the adapted blocks, merged, and agrees afterwards."""

import random
from pathlib import Path

import pytest
from tests.e2e.conftest import backend_settings, connected, local_ranks
from tests.e2e.test_weight_updates import TEMPERATURE, rollout_of, sample

from telescope_train.batches.batch import StepPlan
from telescope_train.batches.packing import pack
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.batches.weighting import token_weights
from telescope_train.chat.renderer import load_renderer
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool

pytestmark = pytest.mark.engine

NUM_UPDATES = 4


async def test_engine_and_trainer_agree_with_lora(tiny_model: Path, fresh_pool: ServerPool) -> None:
    settings = backend_settings(
        tiny_model, learning_rate=0.02, use_lora=True, lora_target_modules=("q_proj", "down_proj")
    )
    ranks = local_ranks(settings)
    try:
        publisher = await connected(fresh_pool, ranks)
        names = [header.name for header in await ranks.weight_headers()]
        assert len(names) == 3 * 7
        assert not any("norm" in name or "embed" in name or "lora" in name for name in names)
        policies = TokenPolicySource(fresh_pool, load_renderer(settings.model), max_model_len=256)
        rng = random.Random(0)
        rows = []
        for version in range(NUM_UPDATES):
            completions = await sample(policies, rng)
            assert {completion.oldest_version for completion in completions} == {version}
            samples = [
                one
                for index, completion in enumerate(completions)
                for one in samples_from_rollout(
                    rollout_of(completion, index=index), (-1.0) ** index, TEMPERATURE
                )
            ]
            weights_N = token_weights(samples, "token", max_tokens=12)
            shards = pack(samples, weights_N, seq_len=1024, num_ranks=1)
            plan = StepPlan(minibatches=[shards], order=[0])
            rows.append(await ranks.train_step(plan, version))
            await publisher.publish(version + 1)
        assert max(row["mismatch/max"] for row in rows) <= 1e-3
        moved = abs(rows[-1]["loss/total"] - rows[0]["loss/total"])
        assert moved > 1e-3
    finally:
        await ranks.close()
