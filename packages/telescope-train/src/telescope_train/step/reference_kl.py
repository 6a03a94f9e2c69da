"""`kl_in_reward`: a penalty on each reward for its rollout's distance from the reference model.

The ranks compute the reference log-probs. They are compared with the sampler's log-probs. A reward
multiplies the gradient of a log-prob, and the mean of k1 times that gradient is the gradient of
KL(policy, reference). With k2 or k3 it would be the gradient of something else.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.types import Group
from telescope_train.algorithms.objective import Estimator, estimator_of, kl_estimate
from telescope_train.batches.batch import PackedBatch, Shards
from telescope_train.batches.packing import Packing, pack_with
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.step.credit import CreditRules, scored_rollouts
from telescope_train.step.shaping import RolloutKey


async def kl_penalties(
    groups: Sequence[Group],
    rules: CreditRules,
    packing: Packing,
    reference_logprobs: Callable[[Shards], Awaitable[list[list[NDArray[np.float32]]]]],
) -> dict[RolloutKey, float]:
    """Return -kl_penalty_tau * k summed over each rollout's tokens; {} if the setting is off."""
    section = rules.config.algorithm
    if not section.kl_in_reward:
        return {}
    samples = [
        sample
        for group in groups
        for rollout in scored_rollouts(group)
        for sample in samples_from_rollout(
            rollout, 0.0, rules.sampling[rollout.environment].temperature
        )
    ]
    if not samples:
        return {}
    # Nothing is trained on this packing, so its advantages are free to carry each sample's number,
    # which float32 holds exactly up to 2^24.
    numbered = [replace(sample, advantage=float(number)) for number, sample in enumerate(samples)]
    shards = pack_with(numbered, np.ones(len(samples)), packing)
    penalties: defaultdict[RolloutKey, float] = defaultdict(float)
    for shard, answer in zip(shards, await reference_logprobs(shards), strict=True):
        for batch, reference_T in zip(shard, answer, strict=True):
            sums_S = kl_per_sequence(batch, reference_T, estimator_of(section))
            first_S = np.flatnonzero((batch.positions_T == 0) & (batch.sequence_ids_T >= 0))
            for number, total in zip(batch.advantages_T[first_S], sums_S, strict=True):
                key = samples[int(number)].rollout_key
                penalties[key] -= section.kl_penalty_tau * float(total)
    return dict(penalties)


def kl_per_sequence(
    batch: PackedBatch, reference_T: NDArray[np.float32], estimator: Estimator
) -> NDArray[np.float64]:
    """Return [sequences] the estimate summed over the trained tokens of each, nats.

    `reference_T` is [T], nats, aligned with `batch`.
    """
    import torch

    mask_T = batch.mask_T
    difference_M = batch.behavior_logprobs_T[mask_T].astype(np.float64) - reference_T[mask_T]
    estimate_M = kl_estimate(torch.from_numpy(difference_M), estimator).numpy()
    num_sequences = int(batch.sequence_ids_T.max(initial=-1)) + 1
    return np.bincount(batch.sequence_ids_T[mask_T], estimate_M, minlength=num_sequences)
