"""Engine and trainer are compared in steps whose own batch is of older weights."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telescope_core.base.chains import sampled_tokens
from telescope_core.types import Completion, Group, Message, Rollout, RolloutStatus, Sampling, Turn
from telescope_train.algorithms import load_algorithm
from telescope_train.batches.packing import Packing
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.loop import train
from telescope_train.step.credit import CreditRules
from telescope_train.step.distances import LEAST_TOKENS, engine_distance

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_run import NoServers, ToyPolicies, toy_config, toy_parts

NUM_TOKENS = 20
PACKING = Packing(seq_len=512, num_ranks=2, hidden_size=8, max_tokens=NUM_TOKENS)


def rollout(version: int, *, number: int = 0, status=RolloutStatus.KEPT) -> Rollout:
    completion = Completion(
        message=Message(role="assistant", content="x"),
        finish_reason="stop",
        tokens=sampled_tokens([3] * 5, [4] * (NUM_TOKENS - 5), [-1.5] * (NUM_TOKENS - 5)),
        oldest_version=version,
        newest_version=version,
    )
    return Rollout(
        environment="toy",
        example_id="e",
        group_id="2.0",
        index=number,
        turns=(Turn(completion=completion, started_s=0.0, ended_s=1.0),),
        status=status,
        reward=1.0,
    )


class Apart:
    """Ranks whose log-probs are 0.2 nats above those of the engine."""

    num_scored = 0

    async def logprobs(self, shards):
        self.num_scored += sum(batch.num_tokens for shard in shards for batch in shard)
        return [[batch.behavior_logprobs_T + np.float32(0.2) for batch in s] for s in shards]


async def distance(ranks, *, trained: int, ahead: list[Rollout]) -> dict[str, float]:
    """Return it for a step of version 1 that trains on a rollout of the version `trained`."""
    rules = CreditRules(
        algorithm=load_algorithm("grpo"),
        config=toy_config(Path("model")),
        sampling={"toy": Sampling(max_tokens=8)},
        vocab_size=10,
        declared={},
    )
    samples = samples_from_rollout(rollout(trained), 0.5, 1.0)
    groups = [Group(id="2.0", environment="toy", example_id="e", rollouts=tuple(ahead))]
    return await engine_distance(samples, groups, rules, PACKING, ranks, version=1)


async def test_finished_rollouts_of_the_present_weights_are_scored():
    ahead = [rollout(1, number=n) for n in range(4)] + [rollout(0), rollout(2)]
    found = await distance(ranks := Apart(), trained=0, ahead=ahead)
    assert ranks.num_scored == 4 * NUM_TOKENS
    assert found == {
        "mismatch/mean": pytest.approx(0.2),
        "mismatch/min": pytest.approx(0.2),
        "mismatch/max": pytest.approx(0.2),
        "mismatch/k3": pytest.approx(math.expm1(0.2) - 0.2),
    }


@pytest.mark.parametrize(
    ("trained", "ahead"),
    [
        (1, [rollout(1)]),
        (0, []),
        (0, [rollout(0)]),
        (0, [rollout(1, status=RolloutStatus.FAILED)]),
    ],
    ids=["the batch tells it", "nothing ended", "older weights", "a failure"],
)
async def test_nothing_is_scored_where_nothing_is_needed_or_fits(trained, ahead):
    assert await distance(ranks := Apart(), trained=trained, ahead=ahead) == {}
    assert ranks.num_scored == 0


async def test_few_tokens_are_scored():
    await distance(ranks := Apart(), trained=0, ahead=[rollout(1, number=n) for n in range(90)])
    assert LEAST_TOKENS - NUM_TOKENS < ranks.num_scored <= LEAST_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("streams", [True, False])
async def test_each_step_of_a_run_that_samples_ahead_knows_it(tiny, start, tmp_path, streams):
    class Live(NoServers):
        version = 0

        async def publish(self, version):
            self.version = version

    class Stamped(ToyPolicies):
        def _reply(self, generator, messages):
            return replace(
                super()._reply(generator, messages),
                oldest_version=live.version,
                newest_version=live.version,
            )

    live = Live()
    config = toy_config(tiny, steps=4, scheduling={"stream_gradients": streams})
    parts = await toy_parts(config, tmp_path / "run", start, policies=Stamped())
    parts = replace(parts, publisher=live, streams_gradients=streams)

    async def after_step(step, row):
        return None

    await train(parts, after_step=after_step)
    rows = parts.folder.metrics()
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1, 1]
    # No batch follows the last one.
    assert ["mismatch/mean" in row for row in rows] == [True, True, True, False]
