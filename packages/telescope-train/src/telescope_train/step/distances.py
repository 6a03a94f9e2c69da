"""Distances of a step's tokens from other log-probs: the trainer's own, and the reference model's.

`mismatch/*` is engine against trainer under the same weights. With rollouts a step ahead, a batch
is mostly of older weights than those that it trains, and the forward pass of the step compares the
two. Rollouts of later batches that have ended by then are of the present weights: a few of them are
scored before the optimizer step.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.types import Group, WeightVersion
from telescope_train.algorithms.objective import Estimator, estimator_of, kl_estimate
from telescope_train.algorithms.terms import MAX_LOG_RATIO
from telescope_train.backends.protocol import Ranks
from telescope_train.batches.batch import PackedBatch, TrainingSample
from telescope_train.batches.packing import Packing, pack_with
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.step.credit import CreditRules, scored_rollouts
from telescope_train.step.shaping import KlPenalties

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
        for sample in _samples_of(group, rules):
            if not _sampled_by(version, sample):
                continue
            num_tokens += len(sample)
            if len(sample) < num_tokens > max_tokens:
                return
            yield sample


def _samples_of(group: Group, rules: CreditRules) -> Iterator[TrainingSample]:
    """Yield the samples of the scored rollouts of `group`, without advantages."""
    for rollout in scored_rollouts(group):
        yield from samples_from_rollout(
            rollout, 0.0, rules.sampling[rollout.environment].temperature
        )


async def kl_penalties(
    groups: Sequence[Group],
    rules: CreditRules,
    packing: Packing,
    ranks: Ranks,
) -> KlPenalties:
    """Return -kl_penalty_tau * k summed over each rollout's tokens; none if the setting is off.

    `kl_in_reward` compares the log-probs of the policy before its step with the reference model's,
    both computed by the ranks: those of the sampler differ by the engine's rounding, which would
    tell equal rewards apart, and may be of older weights. A reward multiplies the gradient of a
    log-prob, and the mean of k1 times that gradient is the gradient of KL(policy, reference). With
    k2 or k3 it would be the gradient of something else.
    """
    section = rules.config.algorithm
    if not section.kl_in_reward:
        return KlPenalties()
    rollouts = {
        (group.id, rollout.index): rollout for group in groups for rollout in scored_rollouts(group)
    }
    samples = [sample for group in groups for sample in _samples_of(group, rules)]
    if not samples:
        return KlPenalties()
    # Nothing is trained on this packing, so its advantages are free to carry each sample's number,
    # which float32 holds exactly up to 2^24.
    numbered = [replace(sample, advantage=float(number)) for number, sample in enumerate(samples)]
    shards = pack_with(numbered, np.ones(len(samples)), packing)
    penalties = {key: defaultdict[str, float](float) for key in rollouts}
    k3, num_tokens = 0.0, 0
    # One after the other, because the ranks compute one thing at a time.
    policy, reference = await ranks.logprobs(shards), await ranks.reference_logprobs(shards)
    for shard, *answers in zip(shards, policy, reference, strict=True):
        for batch, policy_T, reference_T in zip(shard, *answers, strict=True):
            gaps_M = policy_T[batch.mask_T].astype(np.float64) - reference_T[batch.mask_T]
            sums_S = kl_per_sequence(batch, gaps_M, estimator_of(section))
            k3 += float(kl_per_sequence(batch, gaps_M, "k3").sum())
            num_tokens += len(gaps_M)
            first_S = np.flatnonzero((batch.positions_T == 0) & (batch.sequence_ids_T >= 0))
            for number, total in zip(batch.advantages_T[first_S], sums_S, strict=True):
                sample = samples[int(number)]
                agent = rollouts[sample.rollout_key].turns[sample.turns[0].turn].agent
                penalties[sample.rollout_key][agent] -= section.kl_penalty_tau * float(total)
    return KlPenalties(of_agents=penalties, k3=k3, num_tokens=num_tokens)


def kl_per_sequence(
    batch: PackedBatch, gaps_M: NDArray[np.float64], estimator: Estimator
) -> NDArray[np.float64]:
    """Return [sequences] the estimate summed over the trained tokens of each, nats.

    `gaps_M` are the log-probs of the policy minus those of the reference, nats, one for each
    trained token of `batch`.
    """
    import torch

    estimate_M = kl_estimate(torch.from_numpy(gaps_M), estimator).numpy()
    num_sequences = int(batch.sequence_ids_T.max(initial=-1)) + 1
    return np.bincount(batch.sequence_ids_T[batch.mask_T], estimate_M, minlength=num_sequences)
