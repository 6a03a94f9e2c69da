"""Which rewards of a group are compared with each other, and on which scale.

`has_signal` asks this before a batch is full, and credit computes advantages from the same rewards.
Letter: G rollouts of one group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.solved import reward_slack
from telescope_core.base.types import Rollout
from telescope_train.algorithms.advantages import best_of, centered, equal_in_group
from telescope_train.config.schema import TrainConfig


class RewardRange(NamedTuple):
    """Lowest and highest reward of an environment, in the unit of its rewards."""

    low: float
    high: float

    @property
    def slack(self) -> float:
        """Rounding that environments allow at either end: 0.7 + 0.2 + 0.1 is less than 1."""
        return reward_slack(*self)


def configured_ranges(config: TrainConfig) -> dict[str, RewardRange]:
    """Return the reward range of each environment whose entry in the config gives one, by name."""
    # Only a range in the config rescales rewards. A declared one is for credit's reason alone, so
    # that installing a new version of an environment cannot change a reward's scale.
    return {
        entry.name: RewardRange(entry.reward_min, entry.reward_max)
        for entry in config.environments
        if entry.reward_min is not None and entry.reward_max is not None
    }


def raw_rewards(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """Return [G] the rewards as the environment gave them."""
    # float64 costs nothing for one number per rollout, and means of rewards lose fewer bits.
    return np.array([rollout.reward for rollout in rollouts], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScale:
    """The scale on which rewards of a group are compared."""

    ranges: Mapping[str, RewardRange] = field(default_factory=dict[str, RewardRange])
    """By environment: rewards are clipped to it, and scaled to 0 to 1."""
    weights: Mapping[str, Mapping[str, float]] | None = None
    """By environment: the factor of each part of its reward, by name, to compare rewards part by
    part. A reward without known parts is one part. None = rewards are compared as a whole."""

    pass_at_k: int = 1
    """Each reward stands for the best of this many rollouts, if they are compared as a whole."""

    def of(self, rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
        """Return [G] the rewards of a group on this scale.

        Part by part, each is centered and divided by its deviation within the group before its
        weight multiplies it, so that the weights alone decide how much a part counts, not how much
        it varies. Paper: arXiv:2601.05242 (GDPO); its division over the batch belongs to the
        advantage. Deviation: nothing is added to a divisor, so parts that cancel are 0.
        """
        if self.weights is None:
            return best_of(self._as_a_whole(rollouts), self.pass_at_k)
        if len(rollouts) < 2:
            return np.zeros(len(rollouts))
        # A part that a rollout was not given has added nothing to its reward.
        parts = [
            (weight, np.array([rollout.rewards.get(name, 0.0) for rollout in rollouts]))
            for name, weight in self._weights_of(rollouts).items()
        ] or [(1.0, self._as_a_whole(rollouts))]
        group_G = np.zeros(len(rollouts), dtype=np.int64)
        added_G = np.zeros(len(rollouts))
        for weight, part_G in parts:
            centered_G = centered(part_G, group_G)
            if centered_G.any():
                added_G += weight * centered_G / centered_G.std(ddof=1)
        return added_G

    def range_of(self, rollouts: Sequence[Rollout]) -> RewardRange | None:
        """Return the range to which rewards of a group are clipped; None = they are not."""
        is_whole = not self._weights_of(rollouts)
        return self.ranges.get(rollouts[0].environment) if is_whole else None

    def _weights_of(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        """Return the weights by which a group is compared part by part; {} = as a whole."""
        # All rollouts of a group are of one example, so they share the environment.
        is_known = self.weights is not None and all(rollout.rewards for rollout in rollouts)
        return (self.weights or {}).get(rollouts[0].environment, {}) if is_known else {}

    def _as_a_whole(self, rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
        rewards_G = raw_rewards(rollouts)
        if span := self.range_of(rollouts):
            rewards_G = np.clip((rewards_G - span.low) / (span.high - span.low), 0.0, 1.0)
        return rewards_G


def reward_scale(config: TrainConfig, weights: Mapping[str, Mapping[str, float]]) -> RewardScale:
    """Return the scale that `config` asks for; `weights` are those of each environment's parts."""
    section = config.algorithm
    return RewardScale(
        ranges=configured_ranges(config),
        weights=weights if section.advantage_norm == "parts" else None,
        pass_at_k=section.pass_at_k,
    )


def is_match(rollouts: Sequence[Rollout]) -> bool:
    """Return whether agents of a group have rewards of their own, such as the seats of a match."""
    return any(rollout.agent_rewards for rollout in rollouts)


def agents_of(rollouts: Sequence[Rollout]) -> set[str]:
    """Return the agents that took part in any of `rollouts`."""
    return {turn.agent for rollout in rollouts for turn in rollout.turns}


def taking_part(rollouts: Sequence[Rollout], agent: str) -> list[Rollout]:
    """Return the rollouts in which `agent` took part, each with the reward of that agent.

    One that is the agent's own has no parts.
    """
    return [
        replace(rollout, reward=rollout.agent_rewards[agent], rewards={})
        if agent in rollout.agent_rewards
        else rollout
        for rollout in rollouts
        if any(turn.agent == agent for turn in rollout.turns)
    ]


def any_k_alike(rollouts: Sequence[Rollout], scale: RewardScale) -> bool:
    """Return whether `pass_at_k` alone keeps a group without a signal from having one."""
    return scale.pass_at_k > 1 and is_told_apart(rollouts, replace(scale, pass_at_k=1))


def is_told_apart(rollouts: Sequence[Rollout], scale: RewardScale) -> bool:
    """Return whether any of the rewards that are compared in a group differ, but for rounding."""
    compared = [rollouts]
    if is_match(rollouts):
        compared += [taking_part(rollouts, agent) for agent in agents_of(rollouts)]
    return any(
        not equal_in_group(scale.of(part), np.zeros(len(part), dtype=np.int64)).all()
        for part in compared
        if part
    )
