"""Credit: the groups of one step become samples with advantages.

Rewards are brought to one scale where the config gives a range, shaped, and made advantages over
the whole batch. Groups that teach nothing and filtered rollouts are left out and counted. Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telescope_core.errors import unknown_name
from telescope_core.types import Group, Rollout, RolloutStatus, Sampling
from telescope_train.algorithms import Algorithm, load_algorithm
from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.samples import (
    branched_fraction,
    num_cuts_continued,
    samples_from_rollout,
)
from telescope_train.chat.tokenizer import load_tokenizer
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.mix import Mix
from telescope_train.step.filters import Filtered, filter_reason
from telescope_train.step.shaping import RolloutKey, Shaping, overlong_penalties


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
    ALL_FILTERED = "all_filtered"
    """Filters left no rollout of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRules:
    """What stays the same in all steps of a run."""

    algorithm: Algorithm
    config: TrainConfig
    sampling: Mapping[str, Sampling]
    """How each environment's rollouts are sampled."""
    vocab_size: int
    declared: Mapping[str, RewardRange] = field(default_factory=dict[str, RewardRange])
    """Ranges that environments state, read only to say at which end a group of equal rewards
    stands."""


def credit_rules(config: TrainConfig, mix: Mix, *, vocab_size: int | None) -> CreditRules:
    """Return the rules of a run over `mix`; a `vocab_size` of None is read from the tokenizer."""
    return CreditRules(
        algorithm=load_algorithm(config.algorithm.algorithm),
        config=config,
        sampling={name: one.sampling for name, one in mix.playing.items()},
        vocab_size=vocab_size or len(load_tokenizer(config.model.model)),
        declared={
            name: RewardRange(one.reward_min, one.reward_max)
            for name, one in mix.descriptions.items()
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What one step learns from."""

    samples: tuple[TrainingSample, ...]
    """One or more per rollout, in the order of the groups."""
    advantages: Mapping[RolloutKey, float]
    """Those of discarded groups and filtered rollouts too, where they have one."""
    discarded: Mapping[str, NoCredit]
    """The groups left out, by group id."""
    filtered: Mapping[RolloutKey, Filtered]
    """The rollouts left out of groups that have advantages."""
    metrics: Mapping[str, float]
    """Groups and rollouts by reason, final rewards, mean and deviation of the advantages."""


def assign_credit(
    groups: Sequence[Group],
    rules: CreditRules,
    *,
    kl_penalties: Mapping[RolloutKey, float] | None = None,
) -> Credit:
    """Return the samples of `groups` and what became of each group.

    `kl_penalties` is added to the rewards (`kl_in_reward`).
    Rollouts that were not kept have no part in it: a failure is no reward. Filtered ones have: they
    stay in the baseline, and give no sample.
    """
    config, section = rules.config, rules.config.algorithm
    scored = {group.id: scored_rollouts(group) for group in groups}
    too_few = {
        group_id: NoCredit.TOO_FEW
        for group_id, rollouts in scored.items()
        if len(rollouts) < rules.algorithm.min_group_size
    }
    usable = {key: rollouts for key, rollouts in scored.items() if key not in too_few}
    everything = [rollout for rollouts in usable.values() for rollout in rollouts]
    shaping = Shaping(
        overlong=overlong_penalties(everything, section, rules.sampling), kl=kl_penalties or {}
    )
    ranges = _configured_ranges(config)
    rewards = {key: _shaped(rollouts, ranges, shaping) for key, rollouts in usable.items()}
    advantages = _advantages(rewards, rules.algorithm, section.advantage_norm)
    by_rollout = {
        (key, rollout.index): advantage
        for key, rollouts in usable.items()
        for rollout, advantage in zip(rollouts, advantages[key].tolist(), strict=True)
    }
    no_credit = too_few | {
        key: _reason(usable[key], {**rules.declared, **ranges})
        for key, advantages_G in advantages.items()
        if not advantages_G.any()
    }
    discarded = no_credit if config.rollout.discard_group_zero_advantage else too_few
    filtered = _filtered([r for r in everything if r.group_id not in discarded], rules)
    emptied = {
        key: NoCredit.ALL_FILTERED
        for key, rollouts in usable.items()
        if key not in discarded and all((key, r.index) in filtered for r in rollouts)
    }
    trained = [
        rollout
        for rollout in everything
        if rollout.group_id not in discarded and (rollout.group_id, rollout.index) not in filtered
    ]
    samples = _samples(trained, by_rollout, rules.sampling)
    return Credit(
        samples=samples,
        advantages=by_rollout,
        discarded=discarded | emptied,
        filtered=filtered,
        metrics=_count_groups(no_credit | emptied, len(groups), len(discarded | emptied))
        | _count_rollouts(filtered, len(everything))
        | {"rewards/outside_range": float(_num_outside(usable, ranges))}
        | {
            "turns/branched": branched_fraction(samples, trained),
            "turns/cut_continued": float(num_cuts_continued(trained)),
        }
        | shaping.metrics
        | _spread("final_reward", [r.reward for r in trained if r.reward is not None])
        | _spread("advantage", [by_rollout[r.group_id, r.index] for r in trained]),
    )


def scored_rollouts(group: Group) -> list[Rollout]:
    """Return the rollouts of `group` that have a reward to learn from."""
    rollouts = [r for r in group.rollouts if r.status is RolloutStatus.KEPT]
    for rollout in rollouts:
        assert rollout.reward is not None, f"kept rollout {group.id}/{rollout.index} has no reward"
    return rollouts


def _samples(
    rollouts: Sequence[Rollout],
    advantages: Mapping[RolloutKey, float],
    sampling: Mapping[str, Sampling],
) -> tuple[TrainingSample, ...]:
    for rollout in rollouts:
        if rollout.environment not in sampling:
            raise unknown_name("environment in sampling", rollout.environment, sampling)
    return tuple(
        sample
        for rollout in rollouts
        for sample in samples_from_rollout(
            rollout,
            advantages[rollout.group_id, rollout.index],
            sampling[rollout.environment].temperature,
        )
    )


def _filtered(rollouts: Sequence[Rollout], rules: CreditRules) -> dict[RolloutKey, Filtered]:
    reasons = {
        (r.group_id, r.index): filter_reason(r, rules.config.algorithm, vocab_size=rules.vocab_size)
        for r in rollouts
    }
    return {key: reason for key, reason in reasons.items() if reason is not None}


def _configured_ranges(config: TrainConfig) -> dict[str, RewardRange]:
    return {
        entry.name: RewardRange(entry.reward_min, entry.reward_max)
        for entry in config.environments
        if entry.reward_min is not None and entry.reward_max is not None
    }


def _raw(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    return np.array([rollout.reward for rollout in rollouts], dtype=np.float64)


def _shaped(
    rollouts: Sequence[Rollout], ranges: Mapping[str, RewardRange], shaping: Shaping
) -> NDArray[np.float64]:
    """Return the rewards of a group, from 0 to 1 where the config gives the range, and shaped."""
    rewards_G = _raw(rollouts)
    if span := ranges.get(rollouts[0].environment):
        rewards_G = np.clip((rewards_G - span.low) / (span.high - span.low), 0.0, 1.0)
    return rewards_G + np.array([shaping.of(rollout) for rollout in rollouts])


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


def _num_outside(usable: Mapping[str, Sequence[Rollout]], ranges: Mapping[str, RewardRange]) -> int:
    """Count the rewards that clipping moved: the range in the config is too narrow."""
    num_outside = 0
    for rollouts in usable.values():
        if span := ranges.get(rollouts[0].environment):
            rewards_G = _raw(rollouts)
            num_outside += np.count_nonzero((rewards_G < span.low) | (rewards_G > span.high))
    return num_outside


def _count_groups(
    no_credit: Mapping[str, NoCredit], num_groups: int, num_discarded: int
) -> dict[str, float]:
    counts = Counter(no_credit.values())
    by_reason = {f"groups/{reason}": float(counts[reason]) for reason in NoCredit}
    return by_reason | {
        "groups/total": float(num_groups),
        "groups/discarded": float(num_discarded),
    }


def _count_rollouts(filtered: Mapping[RolloutKey, Filtered], num_rollouts: int) -> dict[str, float]:
    counts = Counter(filtered.values())
    return {
        **{f"filtered/{reason}": float(counts[reason]) for reason in Filtered},
        "filtered/fraction": len(filtered) / max(1, num_rollouts),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean and deviation over what is trained on; nothing where nothing is."""
    if not values:
        return {}
    return {f"{name}/mean": float(np.mean(values)), f"{name}/std": float(np.std(values))}
