"""The samples of a step dealt into optimiser steps: whole groups, equal minibatches, epochs.

Every token is stamped with its weight over the minibatch it is in, all ranks together, so each
optimiser step has a denominator of its own and nothing later divides. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from telescope_train.algorithms import weighting_of
from telescope_train.batch import PackedBatch, TrainingSample
from telescope_train.credit import CreditRules
from telescope_train.packing import pack
from telescope_train.weighting import Weighting, token_weights

Shards: TypeAlias = Sequence[Sequence[PackedBatch]]
"""[rank][batch], equally many batches on each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the trainer does with one batch of rollouts."""

    minibatches: Sequence[Shards]
    """[minibatch][rank][batch]; no minibatch is empty."""
    order: Sequence[int]
    """The minibatch of each optimiser step, epoch after epoch."""

    @property
    def packed(self) -> list[PackedBatch]:
        """All batches, each once, whatever the number of epochs."""
        return [batch for shards in self.minibatches for shard in shards for batch in shard]

    def of_rank(self, rank: int) -> list[Sequence[PackedBatch]]:
        """Return the share of `rank` in each minibatch."""
        return [shards[rank] for shards in self.minibatches]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How samples are laid out for the ranks of a run."""

    seq_len: int
    num_ranks: int
    hidden_size: int
    """Sets how much attention costs beside the rest."""
    max_tokens: int
    """Longest completion; the divisor of constant weighting."""


def plan_step(
    samples: Sequence[TrainingSample], rules: CreditRules, packing: Packing, *, version: int
) -> StepPlan:
    """Return the optimiser steps over `samples`; none without samples.

    `version` seeds the deal and the order of each epoch, so a step is the same when it is taken
    again after a resume. The groups of a minibatch stay the same in all epochs.
    """
    section = rules.config.algorithm
    weighting = weighting_of(section, rules.algorithm)
    generator = np.random.default_rng([rules.config.run.seed, version])
    parts = list(deal_groups(samples, section.number_of_minibatches, generator))
    epochs = [generator.permutation(len(parts)).tolist() for _ in range(section.ppo_epochs)]
    return StepPlan(
        minibatches=[pack_weighted(part, weighting, packing) for part in parts],
        order=[index for epoch in epochs for index in epoch],
    )


def deal_groups(
    samples: Sequence[TrainingSample], number_of_minibatches: int, generator: np.random.Generator
) -> Iterator[list[TrainingSample]]:
    """Yield the samples of each minibatch: shuffled groups, whole, dealt in turn.

    Sizes differ by at most one group where discarded groups left a number that does not divide.
    A minibatch without a group is left out.
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
    """Pack one optimiser step for the ranks, every token stamped with its weight in it."""
    return pack(
        samples,
        token_weights(samples, weighting, max_tokens=packing.max_tokens),
        seq_len=packing.seq_len,
        num_ranks=packing.num_ranks,
        hidden_size=packing.hidden_size,
    )
