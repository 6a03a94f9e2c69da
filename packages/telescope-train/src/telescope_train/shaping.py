"""What is added to rewards before advantages are taken: a length penalty and a KL penalty. Pure.

Both are added after rewards were brought to one scale, so `overlong_penalty_factor` and
`kl_penalty_tau` are in units of the reward that advantages are taken from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from telescope_core.types import Rollout, Sampling
from telescope_train.batch import PackedBatch
from telescope_train.config.schema import AlgorithmSection

RolloutKey = tuple[str, int]
"""Group id and index in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is added to the reward of each rollout; 0 where a rollout is not named."""

    overlong: Mapping[RolloutKey, float] = field(default_factory=dict[RolloutKey, float])
    kl: Mapping[RolloutKey, float] = field(default_factory=dict[RolloutKey, float])

    def of(self, rollout: Rollout) -> float:
        """Return the sum for one rollout."""
        key = rollout.group_id, rollout.index
        return self.overlong.get(key, 0.0) + self.kl.get(key, 0.0)

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the rollouts that each part was worked out for."""
        parts = {"overlong": self.overlong, "kl": self.kl}
        return {
            f"reward_shaping/{name}": float(np.mean(list(values.values())))
            for name, values in parts.items()
            if values
        }


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """Return the soft length penalty: 0 up to `max_tokens - buffer`, then falling to -`factor`.

    Paper: arXiv:2503.14476, eq. 13 (with factor 1).
    """
    over = num_tokens - (max_tokens - buffer)
    return -factor * min(max(over / buffer, 0.0), 1.0)


def overlong_penalties(
    rollouts: Sequence[Rollout], section: AlgorithmSection, sampling: Mapping[str, Sampling]
) -> dict[RolloutKey, float]:
    """Return the penalty of each rollout, by its longest turn: `max_tokens` is a limit per turn."""
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


def kl_estimate(
    logprobs_T: NDArray[np.float64],
    reference_T: NDArray[np.float64],
    estimator: Literal["k1", "k2", "k3"],
) -> NDArray[np.float64]:
    """Return k(l, f) of each token, nats; k1 and k3 have the mean KL(policy || reference).

    k1 = l - f. k2 = (l - f)^2 / 2. k3 = exp(f - l) - 1 - (f - l).
    """
    difference_T = logprobs_T - reference_T
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T**2 / 2
    return np.exp(-difference_T) - 1 + difference_T


def kl_per_sequence(
    batch: PackedBatch, reference_T: NDArray[np.float32], estimator: Literal["k1", "k2", "k3"]
) -> NDArray[np.float64]:
    """Return the summed estimate over the trained tokens of each sequence of `batch`."""
    mask_T = batch.mask_T
    estimate_T = kl_estimate(
        batch.behavior_logprobs_T[mask_T].astype(np.float64),
        reference_T[mask_T].astype(np.float64),
        estimator,
    )
    num_sequences = int(batch.sequence_ids_T.max(initial=-1)) + 1
    return np.bincount(batch.sequence_ids_T[mask_T], estimate_T, minlength=num_sequences)
