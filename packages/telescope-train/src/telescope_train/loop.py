"""The training loop: sample, assign credit, learn, publish; until the step budget is spent.

    sampler.take(v)     waits for every group of batch v; other batches go on being sampled
         | groups
    assign_credit       in a thread, because this event loop also serves the rollouts
         | samples
    plan_step           minibatches packed for the ranks, token weights stamped on
         | StepPlan                                      record_rollouts -> run folder, meanwhile
    trainer.train_step  waits for all ranks
         | version v + 1
    publisher.publish   waits until every server samples from the new weights
         |
    sampler.advance     admits the batches that were waiting for this version

There is one loop. The sampler decides how far sampling runs ahead, by `max_async_rollout`.
With `streams_gradients`, the ranks train on finished groups while the rest of the batch is still
being sampled (`step.streaming`); the optimizer step is still one, at the end of the batch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from telescope_core.base.clock import now_s
from telescope_core.base.types import WeightVersion
from telescope_train.backends.protocol import Ranks
from telescope_train.batches.batch import StepPlan
from telescope_train.batches.packing import Packing
from telescope_train.cluster.colocation import GpuSharing
from telescope_train.config.schema import TrainConfig
from telescope_train.observability.timeline import UNRECORDED, Timeline
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.rollouts.sampler import RolloutSampler
from telescope_train.step.credit import Credit, CreditRules, assign_credit
from telescope_train.step.distances import engine_distance, kl_penalties
from telescope_train.step.losses import Losses
from telescope_train.step.metrics import StepClock, StepResult, step_row
from telescope_train.step.minibatches import plan_step
from telescope_train.step.records import StepRecords, TokenRecords, record_attempts, record_rollouts
from telescope_train.step.streaming import GradientStream
from telescope_train.step.throughput import Machine


class Publisher(Protocol):
    """The path of new weights to the servers."""

    async def weights_change(self) -> None:
        """Announce that the trainer's weights are about to differ from the live ones."""
        ...

    async def publish(self, version: WeightVersion) -> None:
        """Return when every server samples with `version`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """All parts that the loop uses."""

    config: TrainConfig
    rules: CreditRules
    packing: Packing
    sampler: RolloutSampler
    trainer: Ranks
    publisher: Publisher
    folder: StepRecords
    machine: Machine
    first_version: WeightVersion = 0
    """Version that is live at the start: the number of earlier steps when a run is resumed."""
    streams_gradients: bool = False
    """Whether to train on finished groups before their batch is complete."""
    gpu_sharing: GpuSharing = field(default_factory=GpuSharing)
    """Turns of trainer and servers on a shared GPU."""
    timeline: Timeline = UNRECORDED
    """Records how the driver spends its time."""
    losses: Losses = field(default_factory=lambda: Losses(lambda text: None))
    """Reports what steps lose of their batches."""
    take_counts: Callable[[], Mapping[str, float]] = dict[str, float]
    """Returns what was counted beside the loop since the last step, as metrics of the step."""
    take_known: Callable[[], Mapping[str, float]] = dict[str, float]
    """Returns results of evals since the last step. They go into its row of metrics only: to others
    they are told by themselves, at the step of their weights."""
    held_out: Set[int] = frozenset()
    """`question_of` of the examples that evals have played so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A batch on which the ranks have trained."""

    batch: SampledBatch
    credit: Credit
    plan: StepPlan
    learned: dict[str, float]
    """Metrics of the ranks."""
    weight_scale: float = 1.0
    """Factor by which the weights of tokens in the plan were multiplied."""


async def train(
    parts: LoopParts, *, after_step: Callable[[int, dict[str, float]], Awaitable[None]]
) -> None:
    """Take every step in the config; `after_step` gets the number and the row of each."""
    trainer = parts.trainer
    learn = _as_groups_end if parts.streams_gradients else _whole_batch
    is_on = parts.config.observability.record_token_facts
    parts.sampler.advance(parts.first_version)
    async with TokenRecords(trainer, parts.folder, is_on=is_on) as tokens:
        for version in range(parts.first_version, parts.config.run.number_of_steps):
            step = version + 1
            clock = StepClock(partial(parts.timeline.note, step=step))
            trained = await learn(parts, version, clock)
            if reference_is_due(step, parts.config):
                await trainer.update_reference()
            clock.lap("train")
            await parts.gpu_sharing.servers_work()
            await parts.publisher.publish(step)
            clock.lap("sync")
            # Before metrics are written: the servers would idle in the meantime.
            parts.sampler.advance(step)
            result = StepResult(
                batch=trained.batch, credit=trained.credit, plan=trained.plan, times=clock.times
            )
            row = step_row(
                result,
                parts.machine,
                version=version,
                max_async_rollout=parts.config.scheduling.max_async_rollout,
                held_out=parts.held_out,
            )
            row |= trained.learned | {"step": step, "version": step}
            row["time_s"] = now_s()
            parts.losses.note(step, trained.batch, row)
            with parts.timeline.span("after the step", step=step):
                await tokens.record(
                    step, trained.plan, trained.credit.samples, scale=trained.weight_scale
                )
                row |= parts.take_counts()
                await asyncio.to_thread(parts.folder.log_metrics, row | parts.take_known())
                await after_step(step, row)


async def _whole_batch(parts: LoopParts, version: WeightVersion, clock: StepClock) -> _Trained:
    """Wait for the batch, then train on it; leaves the last lap of the clock to the caller."""
    rules, trainer = parts.rules, parts.trainer
    batch = await parts.sampler.take(version)
    clock.lap("generate")
    await parts.gpu_sharing.trainer_works()
    kl = await kl_penalties(batch.groups, rules, parts.packing, trainer)
    clock.lap("train")
    # In threads, because rollouts of the next batch may be going on in this event loop.
    credit = await asyncio.to_thread(assign_credit, batch.groups, rules, kl_penalties=kl)
    plan = await asyncio.to_thread(plan_step, credit.samples, rules, parts.packing, version=version)
    clock.lap("wait")
    distance = await _distance(parts, version, credit)
    await parts.publisher.weights_change()
    # Writing parquet takes about as long as a short step, so it runs beside the ranks.
    learned, _ = await asyncio.gather(
        take_steps(trainer, plan, version), _record(parts, version, batch, credit)
    )
    return _Trained(batch=batch, credit=credit, plan=plan, learned=learned | distance)


async def _as_groups_end(parts: LoopParts, version: WeightVersion, clock: StepClock) -> _Trained:
    """Train on groups of the batch as they finish; leaves the last lap to the caller."""
    rules = parts.rules
    stream = GradientStream(rules, parts.packing, parts.trainer, version, clock)
    async for groups in parts.sampler.finished(version):
        clock.lap("generate")
        await stream.add(groups)
    batch = await parts.sampler.take(version)
    clock.lap("generate")
    credit, _ = await asyncio.gather(
        asyncio.to_thread(
            assign_credit,
            batch.groups,
            rules,
            kl_penalties=stream.kl_penalties,
            built=stream.built,
        ),
        stream.rest(),
    )
    distance = await _distance(parts, version, credit)
    await parts.publisher.weights_change()
    learned, _ = await asyncio.gather(stream.apply(credit), _record(parts, version, batch, credit))
    return _Trained(
        batch=batch,
        credit=credit,
        plan=stream.plan,
        learned=learned | distance,
        weight_scale=stream.weight_scale,
    )


async def _distance(parts: LoopParts, version: WeightVersion, credit: Credit) -> dict[str, float]:
    """Return `mismatch/*` before the optimizer step, if the batch cannot show it."""
    ended = parts.sampler.ended_ahead()
    return await engine_distance(
        credit.samples, ended, parts.rules, parts.packing, parts.trainer, version=version
    )


async def _record(
    parts: LoopParts, version: WeightVersion, batch: SampledBatch, credit: Credit
) -> None:
    step = version + 1
    await asyncio.to_thread(record_rollouts, parts.folder, step, batch.all_groups, credit)
    await asyncio.to_thread(record_attempts, parts.folder, step, batch.replaced)
    for ended in batch.ended_steps:
        await asyncio.to_thread(parts.sampler.attempts.log.pack, ended)


async def take_steps(trainer: Ranks, plan: StepPlan, version: WeightVersion) -> dict[str, float]:
    """Train on `plan`; a plan without batches changes nothing."""
    return await trainer.train_step(plan, version) if plan.order else {}


def reference_is_due(step: int, config: TrainConfig) -> bool:
    """Return whether the reference model takes over the weights of this step."""
    every = config.algorithm.reference_update_every
    return every > 0 and step % every == 0
