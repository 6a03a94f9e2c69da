"""One step as a row of metrics: pure functions over what the step produced."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from telescope_core.types import Group, Rollout, RolloutStatus, StopReason, WeightVersion
from telescope_train.batch import PackedBatch
from telescope_train.credit import Credit
from telescope_train.packing import packing_fill
from telescope_train.sampler import SampledBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the driver's time of one step went, in seconds; they add up to the whole step."""

    generate_s: float
    """Waiting for rollouts that training could not hide."""
    train_s: float
    sync_s: float
    """Publishing weights."""
    wait_s: float
    """Everything else: credit, packing, records."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.generate_s + self.train_s + self.sync_s + self.wait_s


def step_row(
    batch: SampledBatch,
    credit: Credit,
    shards: Sequence[Sequence[PackedBatch]],
    times: StepTimes,
    *,
    version: WeightVersion,
    seq_len: int,
) -> dict[str, float]:
    """Return the metrics of one step, the trainer's own left out.

    `version` is that of the weights the step trained.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    packed = [one for shard in shards for one in shard]
    return {
        **reward_metrics(batch.groups),
        **rollout_metrics(rollouts),
        **credit.metrics,
        **staleness_metrics(credit, version),
        "rollouts/failed_attempts": float(batch.num_failed_attempts),
        "pack/fill": packing_fill(packed, seq_len),
        "pack/batches": float(len(packed)),
        "tokens/trained": float(sum(one.num_trained_tokens for one in packed)),
        "tokens/rollout_per_s": _rate(
            sum(rollout.num_completion_tokens for rollout in rollouts), batch.duration_s
        ),
        "tokens/train_per_s": _rate(sum(one.num_tokens for one in packed), times.train_s),
        "time/step_s": times.total_s,
        "time/generate_s": times.generate_s,
        "time/train_s": times.train_s,
        "time/sync_s": times.sync_s,
        "time/wait_s": times.wait_s,
        "time/batch_s": batch.duration_s,
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return rewards over all scored rollouts: together, per environment and per component."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    components: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for rollout in group.rollouts:
            if rollout.reward is None:
                continue
            rewards[group.environment].append(rollout.reward)
            for name, value in {**rollout.rewards, **rollout.metrics}.items():
                components[f"reward/{group.environment}/{name}"].append(value)
    everything = [reward for values in rewards.values() for reward in values]
    if not everything:
        return {}
    return {
        "reward/mean": float(np.mean(everything)),
        "reward/std": float(np.std(everything)),
        "reward/min": min(everything),
        "reward/max": max(everything),
        **{f"reward/{name}/mean": float(np.mean(values)) for name, values in rewards.items()},
        **{name: float(np.mean(values)) for name, values in components.items()},
    }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return lengths, ends and failures of a step's rollouts."""
    lengths = [rollout.num_completion_tokens for rollout in rollouts if rollout.turns]
    failed = [rollout for rollout in rollouts if rollout.status is RolloutStatus.FAILED]
    timed_out = [rollout for rollout in failed if rollout.stop_reason is StopReason.TIMEOUT]
    truncated = [rollout for rollout in rollouts if rollout.is_truncated]
    row = {
        "rollouts/total": float(len(rollouts)),
        "rollouts/failed": float(len(failed)),
        "rollouts/timed_out": float(len(timed_out)),
        "truncated/fraction": len(truncated) / max(1, len(rollouts)),
    }
    if lengths:
        row |= {
            "completion_len/mean": float(np.mean(lengths)),
            "completion_len/p50": float(np.percentile(lengths, 50)),
            "completion_len/p95": float(np.percentile(lengths, 95)),
            "completion_len/max": float(max(lengths)),
        }
    return row


def staleness_metrics(credit: Credit, version: WeightVersion) -> dict[str, float]:
    """Return how many weight versions old the trained samples' first tokens are."""
    ages = [version - sample.oldest_version for sample in credit.samples]
    if not ages:
        return {}
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))}


def first_and_last(values: Sequence[float], *, window: int = 20) -> Mapping[str, float]:
    """Return the mean of the first and of the last `window` values, and their difference."""
    first = float(np.mean(values[:window]))
    last = float(np.mean(values[-window:]))
    return {"first_20_mean": first, "last_20_mean": last, "delta": last - first}


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
