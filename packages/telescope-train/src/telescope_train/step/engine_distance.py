"""`mismatch/*` of a step whose batch cannot show it: engine against trainer, same weights.

With rollouts a step ahead, a batch is mostly of older weights than those that it trains, and the
forward pass of the step compares the two. Rollouts of later batches that have ended by then are of
the present weights: a few of them are scored before the optimizer step.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from telescope_core.base.types import Group, WeightVersion
from telescope_train.algorithms.terms import MAX_LOG_RATIO
from telescope_train.backends.protocol import Ranks
from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.packing import Packing, pack_with
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.step.credit import CreditRules, scored_rollouts

SHARE = 1 / 16
"""Share of the batch's tokens: a forward pass takes a third of the time of both passes."""
LEAST_TOKENS = 256
"""Least number of tokens to score, even in a small batch."""


async def engine_distance(
    trained: Sequence[TrainingSample],
    ended: Iterable[Group],
    rules: CreditRules,
    packing: Packing,
    ranks: Ranks,
    *,
    version: WeightVersion,
) -> dict[str, float]:
    """Return `mismatch/*`, nats, of samples of `ended`; {} if `trained` has tokens of `version`.

    `version` is the version of the weights before the optimizer step. Returns {} too if no sample
    of `ended` was sampled by this version alone.
    """
    if not trained or any(_sampled_by(version, sample) for sample in trained):
        return {}
    room = max(LEAST_TOKENS, int(SHARE * sum(map(len, trained))))
    samples = list(_fresh(ended, rules, version, min(room, packing.seq_len)))
    if not samples:
        return {}
    shards = pack_with(samples, np.ones(len(samples)), packing)
    found = await ranks.logprobs(shards)
    log_ratios_M = np.concatenate(
        [
            (logprobs_T.astype(np.float64) - batch.behavior_logprobs_T)[batch.mask_T]
            for shard, answer in zip(shards, found, strict=True)
            for batch, logprobs_T in zip(shard, answer, strict=True)
        ]
    )
    log_ratios_M = log_ratios_M.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    distances_M = np.abs(log_ratios_M)
    return {
        "mismatch/mean": float(distances_M.mean()),
        "mismatch/min": float(distances_M.min()),
        "mismatch/max": float(distances_M.max()),
        "mismatch/k3": float((np.expm1(log_ratios_M) - log_ratios_M).mean()),
    }


def _sampled_by(version: WeightVersion, sample: TrainingSample) -> bool:
    """Return whether `mismatch/*` of the step covers the sample: all tokens are of `version`."""
    return sample.oldest_version == version


def _fresh(
    ended: Iterable[Group], rules: CreditRules, version: WeightVersion, max_tokens: int
) -> Iterator[TrainingSample]:
    """Yield samples of `version` while they fit into `max_tokens` together; at least one."""
    num_tokens = 0
    for group in ended:
        for rollout in scored_rollouts(group):
            temperature = rules.sampling[rollout.environment].temperature
            for sample in samples_from_rollout(rollout, 0.0, temperature):
                if not _sampled_by(version, sample):
                    continue
                num_tokens += len(sample)
                if len(sample) < num_tokens > max_tokens:
                    return
                yield sample
