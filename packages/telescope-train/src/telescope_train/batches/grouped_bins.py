"""A plan for samples of medium length, of which a bin holds two, three or four.

With such lengths, first-fit decreasing uses up the short samples behind long ones, and many bins
end with a hole. Here the shortest samples are put together, as many to a bin as can fit and in as
many bins as their tokens allow. The same is then done with the remaining samples, one fewer to a
bin. Letters: N samples, G groups, K samples in each.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.tight_bins import Pattern

MOST_IN_A_BIN = 6
"""Samples in a bin above which other plans leave hardly any gap."""
_PASSES = 60


def plan_grouped_bins(
    lengths: Sequence[int], counts: Sequence[int], *, capacity: int
) -> list[Pattern] | None:
    """Plan bins for `counts[i]` samples of `lengths[i]` tokens; lengths ascend up to `capacity`.

    None if samples are so short that no such plan is worth trying.
    """
    lengths_N = np.repeat(np.array(lengths, np.int64), counts)
    if not len(lengths_N) or len(lengths_N) * capacity > MOST_IN_A_BIN * lengths_N.sum():
        return None
    most = _most_that_fit(lengths_N, capacity)
    plans = [list(_groups(lengths_N, capacity, limit)) for limit in range(most, 1, -1)]
    best = min(plans, key=lambda plan: sum(map(len, plan)), default=[lengths_N[:, None]])
    bins = (sorted(filter(None, row), reverse=True) for part in best for row in part.tolist())
    return [Pattern(list(Counter(one).items()), 1) for one in bins]


def _groups(lengths_N: NDArray[np.int64], capacity: int, most: int) -> Iterator[NDArray[np.int64]]:
    """Yield [G, K] lengths for bins that hold all samples; 0 = no sample.

    `lengths_N` ascend. No bin holds more than `most` samples.
    """
    left_N = lengths_N
    while left_N.size:
        size = min(most, _most_that_fit(left_N, capacity))
        groups = _whole_groups(left_N, capacity, size)
        # Fewer than one group is left: they go into one bin.
        found = groups if groups is not None else left_N[None, :size]
        yield found
        left_N = left_N[found.size :]


def _most_that_fit(lengths_N: NDArray[np.int64], capacity: int) -> int:
    return int(np.searchsorted(np.cumsum(lengths_N), capacity, side="right"))


def _whole_groups(
    lengths_N: NDArray[np.int64], capacity: int, size: int
) -> NDArray[np.int64] | None:
    """Return [G, `size`] the shortest samples, in the bins that they fill; None = not even one."""
    numbers_G = np.arange(1, len(lengths_N) // size + 1)
    ends_G = np.cumsum(lengths_N)[size * numbers_G - 1]
    num_groups = int(np.count_nonzero(ends_G <= numbers_G * capacity))
    while num_groups:
        groups = _balanced(_layered(lengths_N[: size * num_groups], size), capacity)
        num_over = int(np.count_nonzero(groups.sum(axis=1) > capacity))
        if not num_over:
            return groups
        num_groups -= max(1, min(num_over // 2, num_groups // 50))
    return None


def _layered(lengths_N: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return [G, K] groups; each layer of lengths goes to the groups with the least so far."""
    layers = lengths_N.reshape(size, -1)[::-1]
    groups = layers[0][:, None]
    for layer in layers[1:]:
        emptiest_last = np.argsort(-groups.sum(axis=1), kind="stable")
        groups = np.concatenate([groups[emptiest_last], layer[:, None]], axis=1)
    return groups.copy()


def _balanced(groups: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Exchange samples between full and empty groups until none is too full, or none helps.

    In each pass, the fullest exchanges with the emptiest, the second fullest with the second
    emptiest, and so on. Every third pass pairs them differently, so that the same two do not meet
    every time.
    """
    half = len(groups) // 2
    for number in range(_PASSES if half else 0):
        sums_G = groups.sum(axis=1)
        if sums_G.max() <= capacity:
            break
        order = np.argsort(-sums_G, kind="stable")
        full, empty = order[:half], order[len(order) - half :][::-1]
        if number % 3 == 1:
            empty = np.roll(empty, number)
        gaps = (sums_G[full] - sums_G[empty])[:, None, None]
        moved = groups[full][:, :, None] - groups[empty][:, None, :]
        helps = (moved > 0) & (moved < gaps)
        distance = np.where(helps, np.abs(2 * moved - gaps), 4 * capacity).reshape(half, -1)
        best = distance.argmin(axis=1)
        helped = np.flatnonzero(distance[np.arange(half), best] < 4 * capacity)
        one, other = np.divmod(best[helped], groups.shape[1])
        given = groups[full[helped], one].copy()
        groups[full[helped], one] = groups[empty[helped], other]
        groups[empty[helped], other] = given
    return groups
