"""Which samples share a batch: a plan on lengths alone, in time that hardly grows with samples.

A bin starts with the largest sample left and is filled with the largest that fit: the result of
first-fit decreasing. Where that leaves more bins than the tokens need, `tight_bins` plans again.
Both work by length, not by sample: a bin's pattern (how many of each length) repeats until one of
its lengths runs out. `deal` then gives bins to ranks by cost.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.tight_bins import FULL_ENOUGH, Pattern, plan_tight_bins

Bin: TypeAlias = NDArray[np.int64]
"""Indices of the samples in one batch."""


def best_fit(lengths_N: NDArray[np.int64], capacity: int) -> list[Bin]:
    """Return bins of at most `capacity` tokens that hold every sample once."""
    return spread_over_ranks(lengths_N, seq_len=capacity, num_ranks=1)


def spread_over_ranks(lengths_N: NDArray[np.int64], *, seq_len: int, num_ranks: int) -> list[Bin]:
    """Return the bins for `num_ranks` ranks that run in step: few rounds, then even ones.

    Where the bins do not divide by the ranks, some rank would idle in the last round: then the
    samples are spread thinner, over as many bins as those rounds have room for.
    """
    counts_L = np.bincount(lengths_N)
    distinct = np.flatnonzero(counts_L)
    lengths, counts = distinct.tolist(), counts_L[distinct].tolist()
    num_tokens = int(lengths_N.sum())
    fewest_rounds = -(-num_tokens // (seq_len * num_ranks))
    patterns = _plan(lengths, counts, capacity=seq_len, num_wanted=fewest_rounds * num_ranks)
    num_places = -(-_num_bins(patterns) // num_ranks) * num_ranks
    enough, too_small = seq_len, -(-num_tokens // num_places) - 1
    worth_trying = max(1, int(seq_len * FULL_ENOUGH))
    while _num_bins(patterns) < num_places and enough - too_small > worth_trying:
        capacity = (enough + too_small) // 2
        trial = _plan(lengths, counts, capacity=capacity, num_wanted=num_places)
        if _num_bins(trial) <= num_places:
            enough, patterns = capacity, trial
        else:
            too_small = capacity
    return _fill(lengths_N, patterns)


def _plan(
    lengths: Sequence[int], counts: Sequence[int], *, capacity: int, num_wanted: int
) -> list[Pattern]:
    """Return the first plan if it needs no more bins than wanted, else the better of both.

    A sample longer than `capacity` has a bin of its own.
    """
    end = bisect_right(lengths, capacity)
    alone = [Pattern([(lengths[i], 1)], counts[i]) for i in range(end, len(lengths))]
    patterns = plan_bins(lengths[:end], counts[:end], capacity=capacity)
    if _num_bins(alone) + _num_bins(patterns) > num_wanted:
        tight = plan_tight_bins(lengths[:end], counts[:end], capacity=capacity)
        patterns = min(patterns, tight, key=_num_bins)
    return alone + patterns


def plan_bins(lengths: Sequence[int], counts: Sequence[int], *, capacity: int) -> list[Pattern]:
    """Plan bins for `counts[i]` samples of `lengths[i]`; lengths ascend, none above `capacity`."""
    left_lengths, left_counts = list(lengths), list(counts)
    patterns: list[Pattern] = []
    while left_lengths:
        slots: list[tuple[int, int]] = []
        room, end = capacity, len(left_lengths)
        while end := bisect_right(left_lengths, room, 0, end):
            end -= 1
            num_taken = min(left_counts[end], room // left_lengths[end])
            room -= num_taken * left_lengths[end]
            slots.append((end, num_taken))
        num_bins = min(left_counts[slot] // num_taken for slot, num_taken in slots)
        takes = [(left_lengths[slot], num_taken) for slot, num_taken in slots]
        patterns.append(Pattern(takes, num_bins))
        for slot, num_taken in slots:
            left_counts[slot] -= num_taken * num_bins
            if not left_counts[slot]:
                del left_lengths[slot], left_counts[slot]
    return patterns


def deal(
    bins: Sequence[Bin], lengths_N: NDArray[np.int64], *, num_ranks: int, hidden_size: int
) -> list[list[Bin]]:
    """Give each rank as many bins as the others, empty ones where they do not divide.

    Bins are sorted by cost and dealt in rounds, so that the bins of one round, which wait for each
    other, cost about the same; in each, the rank with the least so far gets the most.
    """
    costs_N = sample_costs(lengths_N, hidden_size)
    costs = np.array(
        [costs_N[members].sum() for members in bins] + [0.0] * (-len(bins) % num_ranks)
    )
    ordered = [*bins, *[np.zeros(0, np.int64)] * (-len(bins) % num_ranks)]
    totals_R = np.zeros(num_ranks)
    ranks: list[list[Bin]] = [[] for _ in range(num_ranks)]
    for row in np.argsort(-costs, kind="stable").reshape(-1, num_ranks):
        poorest_first = np.argsort(totals_R, kind="stable")
        totals_R[poorest_first] += costs[row]
        for rank, index in zip(poorest_first.tolist(), row.tolist(), strict=True):
            ranks[rank].append(ordered[index])
    return ranks


def sample_costs(lengths_N: NDArray[np.int64], hidden_size: int) -> NDArray[np.float64]:
    """Return the relative FLOPs of each sample.

    A layer costs about 24 h^2 per token in its matrices and 2 h per pair of tokens in causal
    attention, so attention adds length / (12 h) to the 1 of each token.
    """
    return lengths_N * (1.0 + lengths_N / (12.0 * hidden_size))


def _num_bins(patterns: Sequence[Pattern]) -> int:
    return sum(pattern.num_bins for pattern in patterns)


def _fill(lengths_N: NDArray[np.int64], patterns: Sequence[Pattern]) -> list[Bin]:
    """Put samples in the places of a plan; the samples of one length keep their order.

    One row per take of a pattern, then one entry per sample: all samples of a length, in the order
    in which the plan takes them.
    """
    per_bin_R = np.array([taken for takes, _ in patterns for _, taken in takes])
    length_R = np.array([length for takes, _ in patterns for length, _ in takes])
    takes_P = np.array([len(takes) for takes, _ in patterns])
    bins_P = np.array([num_bins for _, num_bins in patterns])
    first_bin_R = np.repeat(np.cumsum(bins_P) - bins_P, takes_P)
    size_R = per_bin_R * np.repeat(bins_P, takes_P)
    by_length_R = np.argsort(length_R, kind="stable")
    size_R, per_bin_R, first_bin_R = (
        column[by_length_R] for column in (size_R, per_bin_R, first_bin_R)
    )
    number_N = np.arange(lengths_N.size) - np.repeat(np.cumsum(size_R) - size_R, size_R)
    bin_N = np.repeat(first_bin_R, size_R) + number_N // np.repeat(per_bin_R, size_R)
    sample_N = np.argsort(lengths_N, kind="stable")
    by_bin_N = np.lexsort((-lengths_N[sample_N], bin_N))
    return np.split(sample_N[by_bin_N], np.cumsum(np.bincount(bin_N))[:-1])
