"""Penalties on rewards before advantages: for length and for KL divergence. Pure.

Both are added after rewards were scaled, so `overlong_penalty_factor` and
`kl_penalty_tau` are in units of the reward that advantages are taken from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from telescope_core.base.types import Rollout, Sampling
from telescope_train.config.schema import AlgorithmSection

RolloutKey = tuple[str, int]
"""Group id and index in the group."""


OfAgents = Mapping[RolloutKey, Mapping[str, float]]
"""A penalty for each agent of each rollout, in units of the scaled reward; "" without agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalties:
    """KL penalties of rollouts, and the distance of policy and reference in them."""

    of_agents: OfAgents = field(default_factory=dict[RolloutKey, Mapping[str, float]])
    """Each the sum over the tokens of an agent."""
    k3: float = 0.0
    """Sum of the estimate k3 over all tokens, nats."""
    num_tokens: int = 0

    def __or__(self, other: "KlPenalties") -> "KlPenalties":
        """Return the penalties of the rollouts of both."""
        return KlPenalties(
            of_agents={**self.of_agents, **other.of_agents},
            k3=self.k3 + other.k3,
            num_tokens=self.num_tokens + other.num_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Penalties on the reward of each rollout; 0 for a rollout that is not a key."""

    overlong: OfAgents = field(default_factory=dict[RolloutKey, Mapping[str, float]])
    """Length penalties, at most 0."""
    kl: KlPenalties = field(default_factory=KlPenalties)

    def of(self, rollout: Rollout, agent: str | None = None) -> float:
        """Return the sum for one rollout, or for one agent of it that has a reward of its own."""
        key = rollout.group_id, rollout.index
        overlong, kl = self.overlong.get(key, {}), self.kl.of_agents.get(key, {})
        if agent is not None:
            return overlong.get(agent, 0.0) + kl.get(agent, 0.0)
        return min(overlong.values(), default=0.0) + math.fsum(kl.values())

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the rollouts for which each part was computed, and over tokens."""
        parts = {
            "overlong": [min(one.values(), default=0.0) for one in self.overlong.values()],
            "kl": [math.fsum(one.values()) for one in self.kl.of_agents.values()],
        }
        row = {
            f"reward_shaping/{k}": float(np.mean(values)) for k, values in parts.items() if values
        }
        if self.kl.num_tokens:
            row["kl/reference"] = self.kl.k3 / self.kl.num_tokens
        return row


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """Return the soft length penalty: 0 up to `max_tokens - buffer`, then falling to -`factor`.

    `num_tokens`, `max_tokens` and `buffer` are in tokens, `factor` in units of the scaled reward.
    Paper: arXiv:2503.14476, eq. 13 (with factor 1).
    """
    over = num_tokens - (max_tokens - buffer)
    return -factor * min(max(over / buffer, 0.0), 1.0)


def overlong_penalties(
    rollouts: Sequence[Rollout], section: AlgorithmSection, sampling: Mapping[str, Sampling]
) -> OfAgents:
    """Return each agent's penalty, by its longest turn: `max_tokens` limits each turn."""
    if not section.overlong_penalty_factor:
        return {}
    penalties: dict[RolloutKey, dict[str, float]] = {}
    for rollout in rollouts:
        lengths: dict[str, int] = {}
        for turn in rollout.turns:
            num_tokens = turn.completion.num_completion_tokens
            lengths[turn.agent] = max(lengths.get(turn.agent, 0), num_tokens)
        penalties[rollout.group_id, rollout.index] = {
            agent: overlong_penalty(
                num_tokens,
                max_tokens=sampling[rollout.environment].max_tokens,
                buffer=section.overlong_buffer_tokens,
                factor=section.overlong_penalty_factor,
            )
            for agent, num_tokens in lengths.items()
        }
    return penalties
