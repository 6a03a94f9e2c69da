"""The training loop: sample, assign credit, learn, publish; until the step budget is spent.

There is one loop. How far sampling runs ahead is the sampler's business: `advance` admits new
batches as soon as new weights are live, and `take` waits for the groups of this step.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from telescope_core.records import RunFolder, row_of
from telescope_core.types import Group, Rollout, RolloutStatus, WeightVersion
from telescope_train.algorithms import Algorithm
from telescope_train.batch import PackedBatch
from telescope_train.config.schema import TrainConfig
from telescope_train.credit import Credit, RewardRange, assign_credit
from telescope_train.packing import pack
from telescope_train.sampler import RolloutSampler
from telescope_train.step_row import StepTimes, step_row
from telescope_train.weighting import token_weights


class Trainer(Protocol):
    """The trainer ranks, seen from the loop."""

    @property
    def num_ranks(self) -> int:
        """How many shards a step has."""
        ...

    async def train_step(
        self, shards: Sequence[Sequence[PackedBatch]], version: WeightVersion
    ) -> dict[str, float]:
        """Take one optimiser step; returns metrics over all ranks."""
        ...


class Publisher(Protocol):
    """The way of new weights to the servers."""

    async def publish(self, version: WeightVersion) -> None:
        """Return when every server samples from `version`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """Everything one run of the loop touches."""

    config: TrainConfig
    algorithm: Algorithm
    sampler: RolloutSampler
    trainer: Trainer
    publisher: Publisher
    folder: RunFolder
    temperatures: Mapping[str, float]
    """Sampling temperature of each environment."""
    max_tokens: int
    """Longest completion; the divisor of constant weighting."""
    declared: Mapping[str, RewardRange]
    hidden_size: int
    first_version: WeightVersion = 0
    """Version that is live at the start: the steps done before, when a run is resumed."""


async def train(
    parts: LoopParts, *, after_step: Callable[[int, dict[str, float]], Awaitable[None]]
) -> None:
    """Take every step of the config; `after_step` gets the number and the row of each."""
    parts.sampler.advance(parts.first_version)
    for version in range(parts.first_version, parts.config.run.number_of_steps):
        started_s = time.perf_counter()
        batch = await parts.sampler.take(version)
        sampled_s = time.perf_counter()
        credit = assign_credit(
            batch.groups, parts.algorithm, parts.config, parts.temperatures, declared=parts.declared
        )
        shards = pack_step(credit, parts)
        packed_s = time.perf_counter()
        learned = await parts.trainer.train_step(shards, version) if credit.samples else {}
        trained_s = time.perf_counter()
        await parts.publisher.publish(version + 1)
        published_s = time.perf_counter()
        parts.sampler.advance(version + 1)
        record_rollouts(parts.folder, version + 1, batch.groups, credit)
        times = StepTimes(
            generate_s=sampled_s - started_s,
            train_s=trained_s - packed_s,
            sync_s=published_s - trained_s,
            wait_s=packed_s - sampled_s + time.perf_counter() - published_s,
        )
        seq_len = parts.config.trainer.seq_len
        row = step_row(batch, credit, shards, times, version=version, seq_len=seq_len)
        row |= learned | {"step": version + 1, "version": version + 1, "time_s": time.time()}
        parts.folder.log_metrics(row)
        await after_step(version + 1, row)


def pack_step(credit: Credit, parts: LoopParts) -> list[list[PackedBatch]]:
    """Return the step's batches for each rank, every token stamped with its weight."""
    weights_N = token_weights(
        credit.samples, parts.algorithm.weighting, max_tokens=parts.max_tokens
    )
    return pack(
        credit.samples,
        weights_N,
        seq_len=parts.config.trainer.seq_len,
        num_ranks=parts.trainer.num_ranks,
        hidden_size=parts.hidden_size,
    )


def record_rollouts(folder: RunFolder, step: int, groups: Sequence[Group], credit: Credit) -> None:
    """Write all rollouts of a step, those that were not trained on marked so."""
    rows = [
        row_of(
            _marked(rollout, credit, group),
            step=step,
            advantage=credit.advantages.get((group.id, rollout.index)),
            with_tokens=True,
        )
        for group in groups
        for rollout in group.rollouts
    ]
    folder.write_rollouts(step, rows)


def _marked(rollout: Rollout, credit: Credit, group: Group) -> Rollout:
    reason = credit.discarded.get(group.id)
    if reason is None or rollout.status is not RolloutStatus.KEPT:
        return rollout
    return replace(rollout, status=RolloutStatus.DISCARDED, status_reason=str(reason))
