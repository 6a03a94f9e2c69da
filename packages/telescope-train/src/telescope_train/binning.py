"""Which samples share a batch: a plan on lengths alone, in time that hardly grows with samples.

A bin starts with the largest sample left and is filled with the largest that fit: the result of
first-fit decreasing. Where that leaves more bins than the tokens need, a few other fillings of each
bin are looked at and the fullest is taken. Both work by length, not by sample: a bin's pattern (how
many of each length) repeats until one of its lengths runs out.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bin: TypeAlias = NDArray[np.int64]
"""Indices of the samples in one batch."""

EFFORT = 128
"""Fillings looked at for one bin where the first plan has bins to spare."""
FULL_ENOUGH = 1 / 256
"""Share of a bin that may stay empty: a perfect fit now uses up the short samples that later bins
need."""


class Pattern(NamedTuple):
    """Bins that hold the same lengths."""

    takes: list[tuple[int, int]]
    """(length, samples of that length in each bin), longest first."""
    num_bins: int


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
    patterns = plan_bins(lengths, counts, capacity=seq_len)
    fewest_rounds = -(-num_tokens // (seq_len * num_ranks))
    if _num_bins(patterns) > fewest_rounds * num_ranks:
        harder = plan_bins(lengths, counts, capacity=seq_len, effort=EFFORT)
        patterns = min(patterns, harder, key=_num_bins)
    num_places = -(-_num_bins(patterns) // num_ranks) * num_ranks
    enough = seq_len
    too_small = max(lengths[-1], -(-num_tokens // num_places)) - 1
    while _num_bins(patterns) < num_places and enough - too_small > 1:
        capacity = (enough + too_small) // 2
        trial = plan_bins(lengths, counts, capacity=capacity)
        if _num_bins(trial) <= num_places:
            enough, patterns = capacity, trial
        else:
            too_small = capacity
    return _fill(lengths_N, patterns)


def plan_bins(
    lengths: Sequence[int], counts: Sequence[int], *, capacity: int, effort: int = 1
) -> list[Pattern]:
    """Plan bins for `counts[i]` samples of `lengths[i]`; lengths ascend, none above `capacity`."""
    left_lengths, left_counts = list(lengths), list(counts)
    patterns: list[Pattern] = []
    while left_lengths:
        slots = _fullest(left_lengths, left_counts, capacity, effort)
        num_bins = min(left_counts[slot] // num_taken for slot, num_taken in slots)
        takes = [(left_lengths[slot], num_taken) for slot, num_taken in slots]
        patterns.append(Pattern(takes, num_bins))
        for slot, num_taken in slots:
            left_counts[slot] -= num_taken * num_bins
            if not left_counts[slot]:
                del left_lengths[slot], left_counts[slot]
    return patterns


def _fullest(
    lengths: list[int], counts: list[int], capacity: int, effort: int
) -> list[tuple[int, int]]:
    """Return the fullest of the first `effort` fillings of one bin, as (slot, samples), descending.

    Fillings are enumerated depth first: the last sample taken is put back, and smaller ones are
    tried in its place.
    """
    slots: list[tuple[int, int]] = []
    fullest = slots
    least_room, room, end = capacity, capacity, len(lengths)
    room_to_leave = capacity * FULL_ENOUGH
    for _ in range(effort):
        while end := bisect_right(lengths, room, 0, end):
            end -= 1
            num_taken = min(counts[end], room // lengths[end])
            room -= num_taken * lengths[end]
            slots.append((end, num_taken))
        if room < least_room:
            least_room, fullest = room, slots.copy()
        end, num_taken = slots.pop()
        room += lengths[end]
        if num_taken > 1:
            slots.append((end, num_taken - 1))
        if least_room <= room_to_leave or not slots:
            break
    return fullest


def deal(
    bins: Sequence[Bin], lengths_N: NDArray[np.int64], *, num_ranks: int, hidden_size: int
) -> list[list[Bin]]:
    """Give each rank as many bins as the others, empty ones where they do not divide.

    Bins are sorted by cost and dealt in rounds, so that the bins of one round, which wait for each
    other, cost about the same; the direction alternates, so that totals do too.
    """
    costs_N = sample_costs(lengths_N, hidden_size)
    costs = np.array([costs_N[members].sum() for members in bins])
    ordered = [bins[i] for i in np.argsort(-costs, kind="stable")]
    ordered += [np.zeros(0, np.int64)] * (-len(bins) % num_ranks)
    rounds = [ordered[i : i + num_ranks] for i in range(0, len(ordered), num_ranks)]
    dealt = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rounds)]
    return [[row[rank] for row in dealt] for rank in range(num_ranks)]


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
