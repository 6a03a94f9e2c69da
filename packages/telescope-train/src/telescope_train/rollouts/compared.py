"""Which rewards of a group are compared with each other, and on which scale.

`has_signal` asks this before a batch is full, and credit computes advantages from the same rewards.
Letter: G rollouts of one group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.solved import reward_slack
from telescope_core.base.types import Rollout
from telescope_train.algorithms.advantages import equal_in_group
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


def scaled_rewards(
    rollouts: Sequence[Rollout], ranges: Mapping[str, RewardRange]
) -> NDArray[np.float64]:
    """Return [G] the rewards of a group, clipped and scaled to 0 to 1 if `ranges` has its range."""
    # All rollouts of a group are of one example, so they share the environment and its range.
    rewards_G = raw_rewards(rollouts)
    if span := ranges.get(rollouts[0].environment):
        rewards_G = np.clip((rewards_G - span.low) / (span.high - span.low), 0.0, 1.0)
    return rewards_G


def is_match(rollouts: Sequence[Rollout]) -> bool:
    """Return whether agents of a group have rewards of their own, such as the seats of a match."""
    return any(rollout.agent_rewards for rollout in rollouts)


def agents_of(rollouts: Sequence[Rollout]) -> set[str]:
    """Return the agents that took part in any of `rollouts`."""
    return {turn.agent for rollout in rollouts for turn in rollout.turns}


def taking_part(rollouts: Sequence[Rollout], agent: str) -> list[Rollout]:
    """Return the rollouts in which `agent` took part, each with the reward of that agent."""
    return [
        replace(rollout, reward=rollout.agent_rewards.get(agent, rollout.reward))
        for rollout in rollouts
        if any(turn.agent == agent for turn in rollout.turns)
    ]


def is_told_apart(rollouts: Sequence[Rollout], ranges: Mapping[str, RewardRange]) -> bool:
    """Return whether any of the rewards that are compared in a group differ, but for rounding."""
    compared = [rollouts]
    if is_match(rollouts):
        compared += [taking_part(rollouts, agent) for agent in agents_of(rollouts)]
    return any(
        not equal_in_group(scaled_rewards(part, ranges), np.zeros(len(part), dtype=np.int64)).all()
        for part in compared
        if part
    )
