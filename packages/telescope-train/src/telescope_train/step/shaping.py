"""Penalties on rewards before advantages: for length and for KL divergence. Pure.

Both are added after rewards were scaled, so `overlong_penalty_factor` and
`kl_penalty_tau` are in units of the reward that advantages are taken from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from telescope_core.base.types import Rollout, Sampling
from telescope_train.config.schema import AlgorithmSection

RolloutKey = tuple[str, int]
"""Group id and index in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Penalties on the reward of each rollout; 0 for a rollout that is not a key."""

    overlong: Mapping[RolloutKey, float] = field(default_factory=dict[RolloutKey, float])
    """Length penalty, at most 0, in units of the scaled reward."""
    kl: Mapping[RolloutKey, float] = field(default_factory=dict[RolloutKey, float])
    """KL penalty, in units of the scaled reward."""

    def of(self, rollout: Rollout) -> float:
        """Return the sum for one rollout."""
        key = rollout.group_id, rollout.index
        return self.overlong.get(key, 0.0) + self.kl.get(key, 0.0)

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the rollouts for which each part was computed."""
        parts = {"overlong": self.overlong, "kl": self.kl}
        return {
            f"reward_shaping/{name}": float(np.mean(list(values.values())))
            for name, values in parts.items()
            if values
        }


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """Return the soft length penalty: 0 up to `max_tokens - buffer`, then falling to -`factor`.

    `num_tokens`, `max_tokens` and `buffer` are in tokens, `factor` in units of the scaled reward.
    Paper: arXiv:2503.14476, eq. 13 (with factor 1).
    """
    over = num_tokens - (max_tokens - buffer)
    return -factor * min(max(over / buffer, 0.0), 1.0)


def overlong_penalties(
    rollouts: Sequence[Rollout], section: AlgorithmSection, sampling: Mapping[str, Sampling]
) -> dict[RolloutKey, float]:
    """Return each rollout's penalty, by its longest turn: `max_tokens` limits each turn."""
    if not section.overlong_penalty_factor:
        return {}
    return {
        (rollout.group_id, rollout.index): overlong_penalty(
            max((turn.completion.num_completion_tokens for turn in rollout.turns), default=0),
            max_tokens=sampling[rollout.environment].max_tokens,
            buffer=section.overlong_buffer_tokens,
            factor=section.overlong_penalty_factor,
        )
        for rollout in rollouts
    }
