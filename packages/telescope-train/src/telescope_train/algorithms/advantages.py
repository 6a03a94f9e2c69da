"""Advantages from the rewards of a whole batch: pure functions in float64, one per rollout.

Shapes: rewards_N is [N], the reward of each rollout, and groups_N is [N], its group as an integer.
G is the number of groups.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.solved import REWARD_SLACK

Advantage: TypeAlias = Callable[[NDArray[np.float64], NDArray[np.int64], str], NDArray[np.float64]]
"""(rewards_N, groups_N, advantage_norm) -> advantages_N, over the whole batch."""
STD_FLOOR = 1e-4
"""Added to a standard deviation before dividing by it."""
ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""Difference of rewards, as a share of the largest of their group or of 1, that rounding explains.

0.1 + 0.2 is not 0.3, and sums of the same parts in another order end a few units apart. Of 1 at
least, because 0.1 + 0.2 - 0.3 is not 0 either, and the parts are larger than their sum."""


def without_norm(
    function: Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]],
) -> Advantage:
    """Return `function` for the record of an algorithm that does not read `advantage_norm`."""

    def advantage(
        rewards_N: NDArray[np.float64], groups_N: NDArray[np.int64], norm: str
    ) -> NDArray[np.float64]:
        del norm
        return function(rewards_N, groups_N)

    return advantage


def centered(rewards_N: NDArray[np.float64], groups_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Subtract the mean of the group; exactly 0 where its rewards are equal but for rounding.

    Raises ValueError for a group of one rollout, which has nothing to be compared with.
    """
    _, group_N, sizes_G = np.unique(groups_N, return_inverse=True, return_counts=True)
    if sizes_G.size and sizes_G.min() < 2:
        raise ValueError(f"expected groups of at least 2 rollouts, got one of {sizes_G.min()}")
    means_G = np.bincount(group_N, weights=rewards_N) / sizes_G
    centered_N = rewards_N - means_G[group_N]
    # The mean of equal floats may differ from them in the last bit. Exact zeros matter: credit
    # discards the groups whose advantages are all 0.
    return np.where(equal_in_group(rewards_N, group_N), 0.0, centered_N)


def equal_in_group(
    rewards_N: NDArray[np.float64], groups_N: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return for each rollout whether all rewards of its group are equal but for `ROUNDING`."""
    ids_G, group_N = np.unique(groups_N, return_inverse=True)
    low_G, high_G = np.full(ids_G.size, np.inf), np.full(ids_G.size, -np.inf)
    np.minimum.at(low_G, group_N, rewards_N)
    np.maximum.at(high_G, group_N, rewards_N)
    limit_G = rounding(np.maximum(np.abs(low_G), np.abs(high_G)))
    return (high_G - low_G <= limit_G)[group_N]


def rounding(largest: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the difference that `ROUNDING` explains between rewards of at most `largest`."""
    return ROUNDING * np.maximum(largest, 1.0)


def best_of(rewards_G: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Return [G], for each reward of a group, the mean of the largest of each k that it is among.

    Times k (G - 1) / (G - k): the policy gradient with `leave_one_out` of the result is then that
    of the expected largest reward of k answers, without bias. With k = 1 nothing changes. 0 for a
    group of k or fewer, which has nothing to compare.
    Paper: arXiv:2505.15201 (PKPO, the estimator without a baseline). The factor is for our
    baseline, the mean of the group, of which a reward is itself a part.
    """
    if k == 1:
        return rewards_G
    if rewards_G.size <= k:
        return np.zeros_like(rewards_G)
    values_V, value_G, counts_V = np.unique(rewards_G, return_inverse=True, return_counts=True)
    # In how many choices of the k - 1 others no reward is above this one.
    below = [math.comb(number - 1, k - 1) for number in np.cumsum(counts_V).tolist()]
    means_V, above = np.empty(values_V.size), 0.0
    for index in reversed(range(values_V.size)):
        fewer = below[index - 1] if index else 0
        means_V[index] = values_V[index] * (below[index] / below[-1]) + above
        above += values_V[index] * ((below[index] - fewer) / below[-1])
    return means_V[value_G] * (k * (rewards_G.size - 1) / (rewards_G.size - k))


def normalized(
    rewards_N: NDArray[np.float64], groups_N: NDArray[np.int64], norm: str
) -> NDArray[np.float64]:
    """Center in the group, then divide by the standard deviation (ddof 1).

    With `norm` = "group" it is the deviation of the group's rewards; with "batch", of all centered
    rewards of the batch.
    """
    centered_N = centered(rewards_N, groups_N)
    if norm == "batch":
        return centered_N / (_deviation(centered_N) + STD_FLOOR)
    if norm != "group":
        raise unknown_name("advantage_norm", norm, ("group", "batch"))
    _, group_N, sizes_G = np.unique(groups_N, return_inverse=True, return_counts=True)
    std_G = np.sqrt(np.bincount(group_N, weights=centered_N**2) / (sizes_G - 1))
    return centered_N / (std_G[group_N] + STD_FLOOR)


def whitened(rewards_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shift and scale to mean 0 and standard deviation 1 (ddof 1) over the whole batch."""
    if equal_in_group(rewards_N, np.zeros(rewards_N.size, dtype=np.int64)).all():
        return np.zeros_like(rewards_N)
    centered_N = rewards_N - rewards_N.mean()
    return centered_N / (_deviation(centered_N) + STD_FLOOR)


def leave_one_out(
    rewards_N: NDArray[np.float64], groups_N: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Subtract the mean of the other rollouts of the group."""
    centered_N = centered(rewards_N, groups_N)
    _, group_N, sizes_G = np.unique(groups_N, return_inverse=True, return_counts=True)
    # r - mean of the G - 1 others = (r - mean of all G) * G / (G - 1).
    return centered_N * (sizes_G / (sizes_G - 1))[group_N]


def relative_to_mean(
    rewards_N: NDArray[np.float64], groups_N: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Center in the group, then divide by the group's mean; 0 where that is 0.

    Raises ConfigError for a reward below 0, because the mean is then not a success rate. One that
    an environment whose rewards begin at 0 may give counts as 0.
    """
    if rewards_N.size and rewards_N.min() < -REWARD_SLACK:
        raise ConfigError(
            f"expected rewards of at least 0, got {rewards_N.min():g}: advantages are divided by "
            "the mean reward; give the environment's reward_min and reward_max, or use grpo"
        )
    rewards_N = np.maximum(rewards_N, 0.0)
    centered_N = centered(rewards_N, groups_N)
    _, group_N, sizes_G = np.unique(groups_N, return_inverse=True, return_counts=True)
    means_N = (np.bincount(group_N, weights=rewards_N) / sizes_G)[group_N]
    return np.divide(centered_N, means_N, out=np.zeros_like(centered_N), where=means_N > 0)


def _deviation(centered_N: NDArray[np.float64]) -> float:
    return float(np.sqrt((centered_N**2).sum() / max(centered_N.size - 1, 1)))
