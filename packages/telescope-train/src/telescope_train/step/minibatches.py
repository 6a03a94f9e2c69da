"""Distribute the samples of a step over optimizer steps: whole groups, equal minibatches, epochs.

Every token gets its weight in its minibatch, computed over all ranks together, so each optimizer
step has its own denominator and later code divides by nothing. Pure.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from telescope_train.algorithms.record import Weighting
from telescope_train.batches.batch import PackedBatch, StepPlan, TrainingSample
from telescope_train.batches.packing import Packing, pack_with
from telescope_train.batches.weighting import token_weights
from telescope_train.step.credit import CreditRules


def plan_step(
    samples: Sequence[TrainingSample], rules: CreditRules, packing: Packing, *, version: int
) -> StepPlan:
    """Return the optimizer steps over `samples`; none without samples.

    `version` seeds the minibatches and the order of each epoch, so a step that is repeated after a
    resume is the same. The groups of a minibatch stay the same in all epochs.
    """
    section = rules.config.algorithm
    generator = np.random.default_rng([rules.config.run.seed, version])
    parts = list(deal_groups(samples, section.number_of_minibatches, generator))
    epochs = [generator.permutation(len(parts)).tolist() for _ in range(section.ppo_epochs)]
    return StepPlan(
        minibatches=[pack_weighted(part, rules.algorithm.weighting, packing) for part in parts],
        order=[index for epoch in epochs for index in epoch],
    )


def deal_groups(
    samples: Sequence[TrainingSample], number_of_minibatches: int, generator: np.random.Generator
) -> Iterator[list[TrainingSample]]:
    """Yield the samples of each minibatch: whole groups, shuffled and dealt in turn.

    Sizes differ by at most one group if discarded groups left a number that does not divide. A
    minibatch without a group is left out.
    """
    group_ids = list(dict.fromkeys(sample.group_id for sample in samples))
    if number_of_minibatches > 1:
        group_ids = [group_ids[index] for index in generator.permutation(len(group_ids))]
    for number in range(min(number_of_minibatches, len(group_ids))):
        dealt = set(group_ids[number::number_of_minibatches])
        yield [sample for sample in samples if sample.group_id in dealt]


def pack_weighted(
    samples: Sequence[TrainingSample], weighting: Weighting, packing: Packing
) -> list[list[PackedBatch]]:
    """Pack one optimizer step for the ranks, with every token stamped with its weight."""
    weights_N = token_weights(samples, weighting, max_tokens=packing.max_tokens)
    return pack_with(samples, weights_N, packing)
