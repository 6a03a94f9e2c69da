"""Credit: from the groups of one step to samples with advantages.

Rewards are scaled if the config gives a range, then shaped, then turned into advantages over the
whole batch. Groups without a learning signal and filtered rollouts are left out and counted. A
rollout with several branches hands its advantage on to them by the rule `branch_credit`. Pure.
Letters: N rollouts of the batch, G groups or rollouts of one group, B branches of a rollout.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.types import Group, Rollout, RolloutStatus, Sampling
from telescope_train.algorithms import Algorithm, load_algorithm
from telescope_train.algorithms.record import Weighting
from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.samples import (
    branched_fraction,
    num_cuts_continued,
    samples_from_rollout,
)
from telescope_train.batches.weighting import numerators
from telescope_train.chat.tokenizer import vocabulary_size
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.compared import (
    RewardRange,
    RewardScale,
    agents_of,
    any_k_alike,
    is_match,
    raw_rewards,
    reward_scale,
    taking_part,
)
from telescope_train.rollouts.mix import Mix
from telescope_train.step.filters import Filtered, filter_reason
from telescope_train.step.shaping import KlPenalties, RolloutKey, Shaping, overlong_penalties


class NoCredit(StrEnum):
    """Reason why a group is not learned from."""

    ALL_AT_MAXIMUM = "all_at_maximum"
    """Every rollout got the highest reward."""
    ALL_AT_MINIMUM = "all_at_minimum"
    """Every rollout got the lowest reward."""
    ALL_EQUAL = "all_equal"
    """Every rollout got the same reward, but it is neither bound or the range is not known. With
    `advantage_norm` "parts" also where differences of parts cancel."""
    ANY_K_ALIKE = "any_k_alike"
    """Any `pass_at_k` of its rollouts hold one with its highest reward."""
    TOO_FEW = "too_few"
    """Failures left fewer rollouts than the algorithm needs to compare."""
    ALL_FILTERED = "all_filtered"
    """Filters removed all of its rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRules:
    """Rules of credit, which are the same in all steps of a run."""

    algorithm: Algorithm
    config: TrainConfig
    sampling: Mapping[str, Sampling]
    """Sampling settings of each environment, by name."""
    vocab_size: int
    """Number of tokens in the vocabulary; a filter compares log-probs with a uniform draw from
    it."""
    declared: Mapping[str, RewardRange] = field(default_factory=dict[str, RewardRange])
    """Reward ranges that environments declare, by name. They are used only to report at which end
    of its range a group of equal rewards is."""
    weights: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict[str, Mapping[str, float]]
    )
    """By environment: the factor of each part of its reward, for `advantage_norm` "parts"."""

    @property
    def min_group_size(self) -> int:
        """Fewest rollouts of one example that can be compared."""
        k = self.config.algorithm.pass_at_k
        return max(self.algorithm.min_group_size, k + 1 if k > 1 else 1)

    @property
    def norm(self) -> str:
        """The `advantage_norm` of advantages; "batch" for parts, which the group has divided."""
        norm = self.config.algorithm.advantage_norm
        return "batch" if norm == "parts" else norm


def credit_rules(config: TrainConfig, mix: Mix, *, vocab_size: int | None) -> CreditRules:
    """Return the rules of a run over `mix`; None reads `vocab_size` from the tokenizer."""
    return CreditRules(
        algorithm=load_algorithm(config.algorithm.algorithm),
        config=config,
        sampling={name: one.sampling for name, one in mix.playing.items()},
        vocab_size=vocab_size or vocabulary_size(config.model),
        declared={
            name: RewardRange(one.reward_min, one.reward_max)
            for name, one in mix.descriptions.items()
        },
        weights=mix.reward_weights,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The samples of one step, and the reasons for leaving out the rest."""

    samples: tuple[TrainingSample, ...]
    """One or more per rollout, in the order of the groups."""
    advantages: Mapping[RolloutKey, float]
    """By rollout, including those of discarded groups and filtered rollouts that have one.

    Of a rollout whose agents have advantages of their own, the mean over these agents.
    """
    of_agents: Mapping[RolloutKey, Mapping[str, float]]
    """Advantages of the agents that are compared by themselves, by rollout and agent."""
    discarded: Mapping[str, NoCredit]
    """Reason for leaving out a group, by group id."""
    filtered: Mapping[RolloutKey, Filtered]
    """Reason for filtering out a rollout of the remaining groups, by rollout."""
    metrics: Mapping[str, float]
    """Counts of groups and rollouts by reason, final rewards, mean and deviation of advantages."""


def assign_credit(
    groups: Sequence[Group],
    rules: CreditRules,
    *,
    kl_penalties: KlPenalties | None = None,
    built: Mapping[RolloutKey, Sequence[TrainingSample]] | None = None,
) -> Credit:
    """Return the samples of `groups`, and the outcome of each group.

    `kl_penalties` are added to the rewards (`kl_in_reward`). `built` holds samples of an earlier
    call, which are used again where the advantage is the same. Rollouts that were not kept take no
    part, because a failure is not a reward. Filtered ones stay in the baseline but give no sample.
    """
    config, section = rules.config, rules.config.algorithm
    scored = {group.id: scored_rollouts(group) for group in groups}
    too_few = {
        group_id: NoCredit.TOO_FEW
        for group_id, rollouts in scored.items()
        if len(rollouts) < rules.min_group_size
    }
    usable = {key: rollouts for key, rollouts in scored.items() if key not in too_few}
    everything = [rollout for rollouts in usable.values() for rollout in rollouts]
    shaping = Shaping(
        overlong=overlong_penalties(everything, section, rules.sampling),
        kl=kl_penalties or KlPenalties(),
    )
    scale = reward_scale(config, rules.weights)
    shaped = partial(_shaped, scale=scale, shaping=shaping)
    rewards = {key: shaped(rollouts, None) for key, rollouts in usable.items()}
    advantages = _advantages(rewards, rules.algorithm, rules.norm)
    leaves_out = config.rollout.discard_group_zero_advantage and _divides_by_batch(rules)
    if leaves_out:
        # Zeros would lower the deviation, and the fewer groups teach, the larger would be the step.
        teaching = {key: rewards[key] for key, one in advantages.items() if one.any()}
        advantages |= _advantages(teaching, rules.algorithm, rules.norm)
    by_rollout = {
        (key, rollout.index): advantage
        for key, rollouts in usable.items()
        for rollout, advantage in zip(rollouts, advantages[key].tolist(), strict=True)
    }
    # Shaped rewards decide whether a group teaches: a penalty can tell equal rewards apart. A range
    # in the config overrides the one that the environment declares.
    branches = _BranchCredit(usable, shaped, by_rollout, rules)
    told_apart = branches.told_apart_by_seats
    if leaves_out:
        left_out = {key for key, one in advantages.items() if not one.any()} - told_apart
        branches = _BranchCredit(usable, shaped, by_rollout, rules, left_out)
    needs_no_group = rules.algorithm.min_group_size < 2 and rules.algorithm.compares == "batch"
    if needs_no_group and any(one.any() for one in advantages.values()):
        # Compared with the whole batch, a reward at its mean teaches as much as one beside it.
        told_apart = advantages.keys()
    no_credit = too_few | {
        key: _reason(usable[key], {**rules.declared, **scale.ranges}, scale)
        for key, advantages_G in advantages.items()
        if not advantages_G.any() and key not in told_apart
    }
    # Too small a group has no baseline, so it goes even if groups of equal rewards are kept.
    discarded = no_credit if config.rollout.discard_group_zero_advantage else too_few
    # After advantages: without the filtered rollouts the baseline would favor the others.
    remaining = [r for r in everything if r.group_id not in discarded]
    filtered = _filtered(remaining, rules)
    emptied = {
        key: NoCredit.ALL_FILTERED
        for key, rollouts in usable.items()
        if key not in discarded and all((key, r.index) in filtered for r in rollouts)
    }
    trained = [r for r in remaining if (r.group_id, r.index) not in filtered]
    samples = _samples(trained, branches, rules, built or {})
    of_agents = {(r.group_id, r.index): told for r in everything if (told := branches.told(r))}
    plain = replace(scale, weights=None, pass_at_k=1)
    as_they_are = partial(_shaped, scale=plain, shaping=shaping)
    whole = rewards
    if plain != scale:
        whole = {key: as_they_are(one, None) for key, one in usable.items()}
    told = {key: [one] for key, one in by_rollout.items()} | {
        key: list(agents.values()) for key, agents in of_agents.items()
    }
    return Credit(
        samples=samples,
        advantages={key: float(np.mean(values)) for key, values in told.items()},
        of_agents=of_agents,
        discarded=discarded | emptied,
        filtered=filtered,
        metrics=_count_groups(no_credit | emptied, len(groups), len(discarded | emptied))
        | _count_rollouts(filtered, len(everything))
        | {"rewards/outside_range": float(_num_outside(usable, scale))}
        | {
            "turns/branched": branched_fraction(samples, trained),
            "turns/cut_continued": float(num_cuts_continued(trained)),
        }
        | shaping.metrics
        | _spread("final_reward", [r.reward for r in trained if r.reward is not None])
        | _spread("advantage", [one for r in trained for one in told[r.group_id, r.index]])
        | _correlation(whole, advantages)
        | _signal(groups, samples, rules.algorithm.weighting),
    )


def scored_rollouts(group: Group) -> list[Rollout]:
    """Return the kept rollouts of `group`, each of which has a reward."""
    # A failure of an environment or a server says nothing about the policy. With a reward of 0 it
    # would be learned as a bad answer.
    rollouts = [r for r in group.rollouts if r.status is RolloutStatus.KEPT]
    for rollout in rollouts:
        assert rollout.reward is not None, f"kept rollout {group.id}/{rollout.index} has no reward"
    return rollouts


class _BranchCredit:
    """Computes the credit of each branch of a rollout, by the setting `branch_credit`.

    Agents with rewards of their own, such as the seats of a match, are compared by these rewards,
    whatever the setting is.
    """

    def __init__(
        self,
        usable: Mapping[str, Sequence[Rollout]],
        shaped: Callable[[Sequence[Rollout], str | None], NDArray[np.float64]],
        advantages: Mapping[RolloutKey, float],
        rules: CreditRules,
        without: Set[str] = frozenset(),
    ) -> None:
        """`shaped` returns the rewards of rollouts, or of one agent in them, [G].

        `advantages` are computed from rewards of `usable` ones. `without`: groups not to compare.
        """
        self._rule = rules.config.algorithm.branch_credit
        self._advantages = advantages
        self._of_agents: dict[tuple[RolloutKey, str], float] = {}
        self.told_apart_by_seats: set[str] = set()
        """Groups in which seats have advantages, even if all rollouts have equal rewards: what one
        seat of a match wins another one may lose."""
        self._matches = {key for key, group in usable.items() if is_match(group)}
        compared = {
            key: group
            for key, group in usable.items()
            if key not in without and (self._rule == "per_agent" or key in self._matches)
        }
        agents = set[str]().union(*(agents_of(group) for group in compared.values()))
        for agent in sorted(agents):
            # Whether an agent takes part is decided by another one, so the rollouts without it are
            # no part of its baseline.
            played = {key: taking_part(group, agent) for key, group in compared.items()}
            rewards = {
                # A seat answers for its own length and distance, as it does for its own reward.
                key: shaped(group, agent if key in self._matches else None)
                for key, group in played.items()
                if len(group) >= rules.min_group_size
            }
            for key, advantages_G in _advantages(rewards, rules.algorithm, rules.norm).items():
                for one, advantage in zip(played[key], advantages_G.tolist(), strict=True):
                    self._of_agents[(key, one.index), agent] = advantage
                if key in self._matches and advantages_G.any():
                    self.told_apart_by_seats.add(key)

    def told(self, rollout: Rollout) -> dict[str, float]:
        """Return the advantage of each agent of `rollout`; {} if they share that of the rollout."""
        if self._rule != "per_agent" and rollout.group_id not in self._matches:
            return {}
        # An agent that took part in too few rollouts of the group has nothing to be compared with,
        # and is not trained here.
        key = (rollout.group_id, rollout.index)
        return {agent: self._of_agents.get((key, agent), 0.0) for agent in agents_of([rollout])}

    def of(self, rollout: Rollout, samples: Sequence[TrainingSample]) -> list[float]:
        """Return [B] the advantage of each branch of `rollout`; `samples` are its branches."""
        key = (rollout.group_id, rollout.index)
        if told := self.told(rollout):
            # All turns of a branch have the same system message.
            return [told[rollout.turns[sample.turns[0].turn].agent] for sample in samples]
        if self._rule == "shared":
            trained = [int(np.count_nonzero(sample.mask)) for sample in samples]
            share = sum(trained) / len(samples)
            return [self._advantages[key] * (share / num_tokens) for num_tokens in trained]
        return [self._advantages[key]] * len(samples)


def _samples(
    rollouts: Sequence[Rollout],
    credit: _BranchCredit,
    rules: CreditRules,
    built: Mapping[RolloutKey, Sequence[TrainingSample]],
) -> tuple[TrainingSample, ...]:
    # Checked before any sample is built: a KeyError would not say which names are known.
    for rollout in rollouts:
        if rollout.environment not in rules.sampling:
            raise unknown_name("environment in sampling", rollout.environment, rules.sampling)

    def samples_of(rollout: Rollout) -> list[TrainingSample]:
        known = built.get((rollout.group_id, rollout.index))
        if known is None:
            temperature = rules.sampling[rollout.environment].temperature
            known = samples_from_rollout(rollout, 0.0, temperature)
        return [
            sample if sample.advantage == advantage else replace(sample, advantage=advantage)
            for sample, advantage in zip(known, credit.of(rollout, known), strict=True)
        ]

    return tuple(sample for rollout in rollouts for sample in samples_of(rollout))


def _filtered(rollouts: Sequence[Rollout], rules: CreditRules) -> dict[RolloutKey, Filtered]:
    reasons = {
        (r.group_id, r.index): filter_reason(r, rules.config.algorithm, vocab_size=rules.vocab_size)
        for r in rollouts
    }
    return {key: reason for key, reason in reasons.items() if reason is not None}


def _shaped(
    rollouts: Sequence[Rollout],
    agent: str | None,
    *,
    scale: RewardScale,
    shaping: Shaping,
) -> NDArray[np.float64]:
    """Return the rewards of a group on `scale`, with the penalties of `shaping`.

    `agent`: the one whose rewards `rollouts` have, if they are not those of all agents together.
    """
    # Shaping comes after scaling, so that a penalty means the same in all scaled environments. The
    # sum is not clipped again: rollouts at the lower end would lose their penalty.
    return scale.of(rollouts) + np.array([shaping.of(one, agent) for one in rollouts])


def _advantages(
    rewards: Mapping[str, NDArray[np.float64]], algorithm: Algorithm, norm: str
) -> dict[str, NDArray[np.float64]]:
    """Return the advantages of each group, by group id, computed over the whole batch."""
    if not rewards:
        return {}
    # One call over all groups, because some algorithms normalize by the deviation of the batch.
    sizes_G = [len(group_rewards) for group_rewards in rewards.values()]
    groups_N = np.repeat(np.arange(len(sizes_G)), sizes_G)
    rewards_N = np.concatenate(list(rewards.values()))
    advantages_N = np.asarray(algorithm.advantage(rewards_N, groups_N, norm), dtype=np.float64)
    if advantages_N.shape != rewards_N.shape or not np.isfinite(advantages_N).all():
        num_bad = np.count_nonzero(~np.isfinite(advantages_N))
        raise ConfigError(
            f"the advantage of algorithm {algorithm.name!r} must return a finite number for each "
            f"of {len(rewards_N)} rollouts, shape {rewards_N.shape}; got shape "
            f"{advantages_N.shape} with {num_bad} that are not finite; correct its function"
        )
    return dict(zip(rewards, np.split(advantages_N, np.cumsum(sizes_G)[:-1]), strict=True))


def _divides_by_batch(rules: CreditRules) -> bool:
    """Return whether advantages are rewards less their group's mean over a deviation of the batch.

    A group of equal rewards has no part in them, but for what it adds to that deviation.
    """
    algorithm, norm = rules.algorithm, rules.norm
    norm = norm if "advantage_norm" in algorithm.reads else algorithm.fixed_norm
    return norm == "batch" and algorithm.min_group_size > 1


def _reason(
    rollouts: Sequence[Rollout], ranges: Mapping[str, RewardRange], scale: RewardScale
) -> NoCredit:
    # The raw rewards decide: shaping can move a group that solved everything off the maximum.
    rewards_G, span = raw_rewards(rollouts), ranges.get(rollouts[0].environment)
    if span is not None and (rewards_G >= span.high - span.slack).all():
        return NoCredit.ALL_AT_MAXIMUM
    if span is not None and (rewards_G <= span.low + span.slack).all():
        return NoCredit.ALL_AT_MINIMUM
    return NoCredit.ANY_K_ALIKE if any_k_alike(rollouts, scale) else NoCredit.ALL_EQUAL


def _num_outside(usable: Mapping[str, Sequence[Rollout]], scale: RewardScale) -> int:
    """Count the rewards changed by clipping, but for rounding; above 0, the range is too narrow."""
    num_outside = 0
    for rollouts in usable.values():
        if span := scale.range_of(rollouts):
            rewards_G = raw_rewards(rollouts)
            inside_G = np.clip(rewards_G, span.low, span.high)
            num_outside += int((np.abs(rewards_G - inside_G) > span.slack).sum())
    return num_outside


def _count_groups(
    no_credit: Mapping[str, NoCredit], num_groups: int, num_discarded: int
) -> dict[str, float]:
    # Every reason is reported, 0 included, so that plots of a run have no holes.
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
    """Return mean and standard deviation (ddof 0) of `values`; {} if there are none."""
    if not values:
        return {}
    return {f"{name}/mean": float(np.mean(values)), f"{name}/std": float(np.std(values))}


def _correlation(
    rewards: Mapping[str, NDArray[np.float64]], advantages: Mapping[str, NDArray[np.float64]]
) -> dict[str, float]:
    """Return the correlation of rewards and advantages within groups; {} if it is undefined."""
    if not rewards:
        return {}
    rewards_N, advantages_N = (
        np.concatenate([values_G - values_G.mean() for values_G in part.values()])
        for part in (rewards, advantages)
    )
    scale = float(np.linalg.norm(rewards_N) * np.linalg.norm(advantages_N))
    if not scale:
        return {}
    return {"advantage/reward_correlation": float(rewards_N @ advantages_N) / scale}


def _signal(
    groups: Sequence[Group], samples: Sequence[TrainingSample], weighting: Weighting
) -> dict[str, float]:
    """Return each environment's share of groups and of gradient, if there are several.

    The share in the gradient is computed from sums of |advantage| over trained tokens.
    """
    num_groups = Counter(group.environment for group in groups)
    if len(num_groups) < 2 or not samples:
        return {}
    signal = dict.fromkeys(num_groups, 0.0)
    for sample, weight in zip(samples, numerators(samples, weighting).tolist(), strict=True):
        signal[sample.environment] += abs(sample.advantage) * weight * int(sample.mask.sum())
    total = sum(signal.values())
    return {
        **{f"signal/{name}/groups": number / len(groups) for name, number in num_groups.items()},
        **{f"signal/{name}/share": value / total for name, value in signal.items() if total},
    }
