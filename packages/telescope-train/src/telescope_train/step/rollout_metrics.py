"""Metrics of a step's rollouts: rewards, lengths, stop reasons, failures, ages. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from telescope_core.base.types import Group, Rollout, RolloutStatus, StopReason, WeightVersion
from telescope_train.batches.batch import TrainingSample
from telescope_train.rollouts.failures import Boundary
from telescope_train.rollouts.order import OFF_POLICY
from telescope_train.rollouts.sampled import SampledBatch


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return reward metrics of all scored rollouts: overall, per environment and per component."""
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


def batch_metrics(batch: SampledBatch) -> dict[str, float]:
    """Return metrics of filling a batch: rejected groups, all rewards, failures and queues."""
    by_environment: defaultdict[str, list[float]] = defaultdict(list)
    for group in batch.all_groups:
        found = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        by_environment[group.environment] += found
    every = [reward for rewards in by_environment.values() for reward in rewards]
    reasons = Counter(group.rollouts[0].status_reason for group in batch.rejected)
    num_failed = sum(batch.failed_attempts.values())
    return {
        **({"task_reward/mean": float(np.mean(every))} if every else {}),
        **({"task_reward/std": float(np.std(every))} if every else {}),
        **{
            f"task_reward/{name}/mean": float(np.mean(rewards))
            for name, rewards in by_environment.items()
            if rewards
        },
        "groups/rejected": float(len(batch.rejected)),
        "groups/acceptance": len(batch.groups) / max(1, len(batch.all_groups)),
        **{f"groups/rejected/{reason}": float(count) for reason, count in reasons.items()},
        "rollouts/failed_attempts": float(num_failed),
        "rollouts/off_policy": float(sum(r.status_reason == OFF_POLICY for r in batch.replaced)),
        **({} if batch.length_bias is None else {"length_bias": batch.length_bias}),
        **{f"failures/{edge}": float(batch.failed_attempts.get(edge, 0)) for edge in Boundary},
        **{f"queue/{name}": float(size) for name, size in batch.queues.items()},
        **{f"workers/{name}": value for name, value in batch.workers.items()},
    }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of lengths, endings and failures of a step's rollouts."""
    played = [rollout for rollout in rollouts if rollout.turns]
    failed = [rollout for rollout in rollouts if rollout.status is RolloutStatus.FAILED]
    endings = Counter(rollout.stop_reason for rollout in rollouts)
    truncated = [rollout for rollout in rollouts if rollout.is_truncated]
    endless = [r for r in played if r.turns[-1].completion.finish_reason == "length"]
    return {
        "rollouts/total": float(len(rollouts)),
        "rollouts/failed": float(len(failed)),
        "rollouts/timed_out": float(endings[StopReason.TIMEOUT]),
        "rollouts/out_of_context": float(endings[StopReason.CONTEXT_LENGTH]),
        "requests/sent_again": float(
            sum(turn.completion.num_retries for rollout in rollouts for turn in rollout.turns)
        ),
        "truncated/fraction": len(truncated) / max(1, len(rollouts)),
        "no_eos_ratio": len(endless) / max(1, len(played)),
        **distribution("completion_len", [rollout.num_completion_tokens for rollout in played]),
    }


def sample_metrics(
    samples: Sequence[TrainingSample], version: WeightVersion, *, max_async_rollout: int
) -> dict[str, float]:
    """Return the lengths of samples in tokens, and the ages of tokens, in versions."""
    if not samples:
        return {}
    return {
        **distribution("seq_len", [len(sample) for sample in samples]),
        **_staleness(samples, version, max_async_rollout),
    }


def _staleness(
    samples: Sequence[TrainingSample], version: WeightVersion, max_async_rollout: int
) -> dict[str, float]:
    """Count the sampled tokens by the version that sampled them."""
    num_by_age = Counter[int]()
    num_undelivered = 0
    for sample in samples:
        # The id of a group begins with the batch that it was drawn for, which was admitted once
        # these weights were live.
        live = int(sample.group_id.partition(".")[0]) - max_async_rollout
        for span in sample.version_spans:
            num_by_age[version - span.version] += span.num_tokens
            num_undelivered += span.num_tokens * (span.version < live)
    total = num_by_age.total()
    ages = sorted(age for age, number in num_by_age.items() if number)
    return {
        "staleness/mean": sum(age * num_by_age[age] for age in ages) / total,
        "staleness/max": float(max(ages)),
        "staleness/undelivered": num_undelivered / total,
        **{f"staleness/share_{age}": num_by_age[age] / total for age in ages},
    }


def distribution(name: str, values: Sequence[int]) -> dict[str, float]:
    """Return mean, median, 95th percentile and maximum of `values`; {} if there are none."""
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/p50": float(np.percentile(values, 50)),
        f"{name}/p95": float(np.percentile(values, 95)),
        f"{name}/max": float(max(values)),
    }
