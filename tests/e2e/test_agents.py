"""An unmodified agent program is trained through the gateway, on tokens that vLLM sampled."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.conftest import LocalRanks, backend_settings, connected

from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.types import Group, Rollout, RolloutStatus, Sampling, Split
from telescope_train.algorithms import load_algorithm
from telescope_train.batch import TrainingSample
from telescope_train.config.schema import TrainConfig
from telescope_train.credit import CreditRules, assign_credit
from telescope_train.gateway import Gateway
from telescope_train.inference.client import Generation
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.renderer import load_renderer
from telescope_train.minibatches import Packing, plan_step
from telescope_train.recorded import RecordedEnvironment

sys.path.insert(0, str(Path(__file__).parent))
from agent_environment import AskedTwice

pytestmark = pytest.mark.engine

STEPS, GROUPS, GROUP_SIZE = 3, 4, 4
SAMPLING = Sampling(max_tokens=12, temperature=1.0)
DEADLINE_S = 60.0


class RecordingPool(ServerPool):
    """The real pool, which keeps what the server was asked and what it answered."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        super().__init__(base_urls)
        self.record: list[tuple[tuple[int, ...], Generation]] = []

    async def generate(self, prompt_ids, sampling, **options):
        generation = await super().generate(prompt_ids, sampling, **options)
        self.record.append((tuple(prompt_ids), generation))
        return generation


@pytest.fixture
async def recording_pool(vllm_server: str):
    pool = RecordingPool([vllm_server])
    yield pool
    await pool.close()


def rules_of(model: Path) -> CreditRules:
    config = TrainConfig.model_validate(
        {
            "run": {"name": "agents", "number_of_steps": STEPS, "seed": 0},
            "model": {"model": str(model)},
            "environments": [{"name": "agent"}],
        }
    )
    return CreditRules(
        algorithm=load_algorithm("grpo"),
        config=config,
        sampling={"agent": SAMPLING},
        vocab_size=103,
    )


async def play_step(client, policies, step: int) -> list[Group]:
    async def play(group: int, index: int) -> Rollout:
        request = PlayRequest(
            split=Split.TRAIN,
            example_index=step * GROUPS + group,
            group_id=f"{step}.{group}",
            index=index,
            sampling=SAMPLING,
            deadline_s=DEADLINE_S,
        )
        return await client.play(request, policies.policy(request.rollout_id, SAMPLING))

    async def play_group(group: int) -> Group:
        rollouts = await asyncio.gather(*(play(group, index) for index in range(GROUP_SIZE)))
        return Group(
            id=f"{step}.{group}",
            environment="agent",
            example_id=rollouts[0].example_id,
            rollouts=tuple(rollouts),
        )

    return await asyncio.gather(*map(play_group, range(GROUPS)))


def require_as_sampled(
    samples: Sequence[TrainingSample], record: Sequence[tuple[tuple[int, ...], Generation]]
) -> None:
    """Every trained token stands where the server sampled it, behind the prompt it had."""
    places = 0
    for prompt, generation in record:
        whole = [*prompt, *generation.token_ids]
        logprobs = np.array(generation.logprobs, np.float32)
        fits = [
            sample
            for sample in samples
            if sample.token_ids[: len(whole)].tolist() == whole
            and np.array_equal(sample.behavior_logprobs[len(prompt) : len(whole)], logprobs)
        ]
        assert len(fits) == 1
        places += len(logprobs)
    assert sum(int(sample.mask.sum()) for sample in samples) == places


async def test_an_agent_library_is_trained_on_exactly_what_was_sampled(
    tiny_model: Path, recording_pool: RecordingPool
) -> None:
    pool, rules = recording_pool, rules_of(tiny_model)
    ranks = LocalRanks(backend_settings(tiny_model, learning_rate=1e-3))
    gateway = Gateway(model="policy")
    await gateway.start()
    try:
        publisher = await connected(pool, ranks)
        renderer = load_renderer(rules.config.model)
        policies = TokenPolicySource(pool, renderer, max_model_len=256, gateway=gateway)
        client = RecordedEnvironment(InProcessEnvironment(AskedTwice(), name="agent", version="0"))
        packing = Packing(seq_len=1024, num_ranks=1, hidden_size=128, max_tokens=12)
        for step in range(STEPS):
            pool.record.clear()
            groups = await play_step(client, policies, step)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            assert {r.status for r in rollouts} == {RolloutStatus.KEPT}, [r.error for r in rollouts]
            assert {v.completion.newest_version for r in rollouts for v in r.turns} == {step}
            credit = assign_credit(groups, rules)
            assert not credit.discarded
            require_as_sampled(credit.samples, pool.record)
            assert {sample.temperature for sample in credit.samples} == {1.0, 0.7}
            # Random weights write special tokens too, which no template shows: those turns branch.
            branched = credit.metrics["turns/branched"]
            assert 1 / 2 <= branched < 0.9, "of the two later turns the helper's is its own"
            plan = plan_step(credit.samples, rules, packing, version=step)
            row = await ranks.train_step(plan, step)
            assert max(abs(row["mismatch/max"]), abs(row["mismatch/min"])) <= 1e-3
            await publisher.publish(step + 1)
    finally:
        await gateway.close()
        ranks.close()
