"""Credit: the groups of one step become samples with advantages.

Rewards are brought to one scale where the config gives a range, advantages are taken over the whole
batch, and groups that teach nothing are left out and counted by reason. Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telescope_core.errors import unknown_name
from telescope_core.types import Group, Rollout, RolloutStatus
from telescope_train.algorithms import Algorithm
from telescope_train.batch import TrainingSample
from telescope_train.config.schema import TrainConfig
from telescope_train.samples import samples_from_rollout


class RewardRange(NamedTuple):
    """Lowest and highest reward of an environment."""

    low: float
    high: float


class NoCredit(StrEnum):
    """Why a group teaches nothing."""

    ALL_AT_MAXIMUM = "all_at_maximum"
    """Every rollout got the highest reward."""
    ALL_AT_MINIMUM = "all_at_minimum"
    """Every rollout got the lowest reward."""
    ALL_EQUAL = "all_equal"
    """Every rollout got the same reward, and it is neither, or the range is not known."""
    TOO_FEW = "too_few"
    """Failures left fewer rollouts than the algorithm compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What one step learns from."""

    samples: tuple[TrainingSample, ...]
    """One or more per rollout, in the order of the groups."""
    advantages: Mapping[tuple[str, int], float]
    """By group id and rollout index; those of discarded groups too, where they have one."""
    discarded: Mapping[str, NoCredit]
    """The groups left out, by group id."""
    metrics: Mapping[str, float]
    """Groups by reason, rewards outside their range, mean and deviation of the advantages."""


def assign_credit(
    groups: Sequence[Group],
    algorithm: Algorithm,
    config: TrainConfig,
    temperatures: Mapping[str, float],
    *,
    declared: Mapping[str, RewardRange] | None = None,
) -> Credit:
    """Return the samples of `groups` and what became of each group.

    `temperatures` by environment: what its rollouts were sampled with. `declared`: the ranges that
    environments state, read only to say at which end a group of equal rewards stands.
    Rollouts that were not kept have no part in it: a failure is no reward.
    """
    scored = {group.id: _scored(group) for group in groups}
    too_few = {
        group_id: NoCredit.TOO_FEW
        for group_id, rollouts in scored.items()
        if len(rollouts) < algorithm.min_group_size
    }
    usable = {key: rollouts for key, rollouts in scored.items() if key not in too_few}
    ranges = _configured_ranges(config)
    rewards = {key: _scaled(rollouts, ranges) for key, rollouts in usable.items()}
    advantages = _advantages(rewards, algorithm, config.algorithm.advantage_norm)
    no_credit = too_few | {
        key: _reason(usable[key], {**(declared or {}), **ranges})
        for key, advantages_G in advantages.items()
        if not advantages_G.any()
    }
    discarded = no_credit if config.rollout.discard_group_zero_advantage else too_few
    samples = tuple(
        sample
        for key, rollouts in usable.items()
        if key not in discarded
        for rollout, advantage in zip(rollouts, advantages[key].tolist(), strict=True)
        for sample in samples_from_rollout(
            rollout, advantage, _setting(temperatures, rollout.environment)
        )
    )
    return Credit(
        samples=samples,
        advantages={
            (key, rollout.index): advantage
            for key, rollouts in usable.items()
            for rollout, advantage in zip(rollouts, advantages[key].tolist(), strict=True)
        },
        discarded=discarded,
        metrics=_count(no_credit, num_groups=len(groups), num_discarded=len(discarded))
        | {"rewards/outside_range": float(_num_outside(usable, ranges))}
        | _spread([advantages[key] for key in usable if key not in discarded]),
    )


def _scored(group: Group) -> list[Rollout]:
    rollouts = [r for r in group.rollouts if r.status is RolloutStatus.KEPT]
    for rollout in rollouts:
        assert rollout.reward is not None, f"kept rollout {group.id}/{rollout.index} has no reward"
    return rollouts


def _configured_ranges(config: TrainConfig) -> dict[str, RewardRange]:
    return {
        entry.name: RewardRange(entry.reward_min, entry.reward_max)
        for entry in config.environments
        if entry.reward_min is not None and entry.reward_max is not None
    }


def _raw(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    return np.array([rollout.reward for rollout in rollouts], dtype=np.float64)


def _scaled(rollouts: Sequence[Rollout], ranges: Mapping[str, RewardRange]) -> NDArray[np.float64]:
    """Return the rewards of a group, from 0 to 1 where the config gives the range."""
    span = ranges.get(rollouts[0].environment)
    if span is None:
        return _raw(rollouts)
    return np.clip((_raw(rollouts) - span.low) / (span.high - span.low), 0.0, 1.0)


def _advantages(
    rewards: Mapping[str, NDArray[np.float64]], algorithm: Algorithm, norm: str
) -> dict[str, NDArray[np.float64]]:
    """Return the advantages of each group, taken over the whole batch at once."""
    if not rewards:
        return {}
    sizes_G = [len(group_rewards) for group_rewards in rewards.values()]
    groups_N = np.repeat(np.arange(len(sizes_G)), sizes_G)
    advantages_N = algorithm.advantage(np.concatenate(list(rewards.values())), groups_N, norm)
    return dict(zip(rewards, np.split(advantages_N, np.cumsum(sizes_G)[:-1]), strict=True))


def _reason(rollouts: Sequence[Rollout], ranges: Mapping[str, RewardRange]) -> NoCredit:
    rewards_G, span = _raw(rollouts), ranges.get(rollouts[0].environment)
    if span is not None and (rewards_G >= span.high).all():
        return NoCredit.ALL_AT_MAXIMUM
    if span is not None and (rewards_G <= span.low).all():
        return NoCredit.ALL_AT_MINIMUM
    return NoCredit.ALL_EQUAL


def _setting(temperatures: Mapping[str, float], environment: str) -> float:
    if environment not in temperatures:
        raise unknown_name("environment in temperatures", environment, temperatures)
    return temperatures[environment]


def _num_outside(usable: Mapping[str, Sequence[Rollout]], ranges: Mapping[str, RewardRange]) -> int:
    """Count the rewards that clipping moved: the range in the config is too narrow."""
    num_outside = 0
    for rollouts in usable.values():
        if span := ranges.get(rollouts[0].environment):
            rewards_G = _raw(rollouts)
            num_outside += np.count_nonzero((rewards_G < span.low) | (rewards_G > span.high))
    return num_outside


def _count(
    no_credit: Mapping[str, NoCredit], *, num_groups: int, num_discarded: int
) -> dict[str, float]:
    counts = Counter(no_credit.values())
    by_reason = {f"groups/{reason}": float(counts[reason]) for reason in NoCredit}
    return by_reason | {
        "groups/total": float(num_groups),
        "groups/discarded": float(num_discarded),
    }


def _spread(advantages: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Return mean and deviation of what is trained on; nothing where nothing is."""
    if not advantages:
        return {}
    advantages_N = np.concatenate(advantages)
    return {
        "advantage/mean": float(advantages_N.mean()),
        "advantage/std": float(advantages_N.std()),
    }
