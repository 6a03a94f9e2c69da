"""Plan which samples share a batch, from lengths alone; time hardly grows with their number.

A bin starts with the largest sample left and is filled with the largest that fit, which gives the
bins of first-fit decreasing. If the tokens need fewer bins than that, `tight_bins` plans again in
two ways. All work by length, not by sample: a bin's pattern (how many of each length) repeats until
one of its lengths runs out. `deal` then gives bins to ranks by cost.
Letters: N samples, L lengths, P patterns, R rows of a plan (in `deal`: ranks).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from telescope_train.batches.tight_bins import (
    FULL_ENOUGH,
    Pattern,
    plan_grouped_bins,
    plan_tight_bins,
)

Bin: TypeAlias = NDArray[np.int64]
"""[samples in the bin] indices of the samples in one batch."""


def spread_over_ranks(lengths_N: NDArray[np.int64], *, seq_len: int, num_ranks: int) -> list[Bin]:
    """Return bins of at most `seq_len` tokens for `num_ranks` ranks: few rounds, evenly filled.

    If the number of bins is not a multiple of the ranks, some rank would idle in the last round.
    The samples are then spread more thinly, over as many bins as the same number of rounds has room
    for.
    """
    counts_L = np.bincount(lengths_N)
    distinct = np.flatnonzero(counts_L)
    lengths, counts = distinct.tolist(), counts_L[distinct].tolist()
    num_tokens = int(lengths_N.sum())
    fewest_rounds = -(-num_tokens // (seq_len * num_ranks))
    patterns = _plan(lengths, counts, capacity=seq_len, num_wanted=fewest_rounds * num_ranks)
    # Ranks wait for each other in every round, so a round with an idle rank costs as much as a full
    # one: bins up to the next multiple of num_ranks are free.
    num_places = -(-_num_bins(patterns) // num_ranks) * num_ranks
    # Bisect, from the mean of tokens per bin up, for the smallest capacity whose plan still fits
    # into num_places bins. First-fit decreasing is not monotonic in the capacity, so this may miss
    # the smallest, but any plan that is kept fits.
    enough, too_small = seq_len, -(-num_tokens // num_places) - 1
    # Capacities that are closer than this would even out next to nothing and cost a plan each.
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
    """Return the first plan if it needs at most `num_wanted` bins, else the best of three.

    A sample longer than `capacity` gets a bin to itself.
    """
    # Only a capacity that the bisection tries can be below a length. Every sample fits into seq_len
    # tokens, so a long one stays alone instead of ruling the smaller capacity out.
    end = bisect_right(lengths, capacity)
    alone = [Pattern([(lengths[i], 1)], counts[i]) for i in range(end, len(lengths))]
    patterns = plan_bins(lengths[:end], counts[:end], capacity=capacity)
    # Each plan costs more time than the one before, so it is made only if it can save bins. The
    # last costs so much that it has to be able to save more than one of a few hundred.
    for plan, few in ((plan_tight_bins, 0.0), (plan_grouped_bins, FULL_ENOUGH)):
        if _num_bins([*alone, *patterns]) <= num_wanted * (1 + few):
            break
        other = plan(lengths[:end], counts[:end], capacity=capacity)
        patterns = min(patterns, other or patterns, key=_num_bins)
    return alone + patterns


def plan_bins(lengths: Sequence[int], counts: Sequence[int], *, capacity: int) -> list[Pattern]:
    """Plan bins for `counts[i]` samples of `lengths[i]` tokens; lengths ascend up to `capacity`."""
    left_lengths, left_counts = list(lengths), list(counts)
    patterns: list[Pattern] = []
    while left_lengths:
        slots: list[tuple[int, int]] = []
        room, end = capacity, len(left_lengths)
        # Slots descend, so each search ends where the last one stopped: what did not fit before
        # does not fit a smaller room.
        while end := bisect_right(left_lengths, room, 0, end):
            end -= 1
            num_taken = min(left_counts[end], room // left_lengths[end])
            room -= num_taken * left_lengths[end]
            slots.append((end, num_taken))
        # First-fit decreasing would fill the next bin in the same way as long as every length of
        # this one has enough samples left, so those bins are planned at once.
        num_bins = min(left_counts[slot] // num_taken for slot, num_taken in slots)
        takes = [(left_lengths[slot], num_taken) for slot, num_taken in slots]
        patterns.append(Pattern(takes, num_bins))
        for slot, num_taken in slots:
            left_counts[slot] -= num_taken * num_bins
            # Descending slots: a deletion moves only places that were handled already.
            if not left_counts[slot]:
                del left_lengths[slot], left_counts[slot]
    return patterns


def deal(
    bins: Sequence[Bin], lengths_N: NDArray[np.int64], *, num_ranks: int, hidden_size: int
) -> list[list[Bin]]:
    """Return `deal_by_costs` for samples without shared tokens."""
    return deal_by_costs(bins, sample_costs(lengths_N, hidden_size), num_ranks=num_ranks)


def deal_by_costs(
    bins: Sequence[Bin], costs_N: NDArray[np.float64], *, num_ranks: int
) -> list[list[Bin]]:
    """Give each rank the same number of bins; empty ones are added if needed.

    Bins are sorted by cost and dealt in rounds, so the bins of one round cost about the same: ranks
    wait for each other in every round. In each, the rank with the least work so far gets the most.
    """
    costs = np.array(
        [costs_N[members].sum() for members in bins] + [0.0] * (-len(bins) % num_ranks)
    )
    # Empty bins cost 0, so the sort puts them into the last round.
    ordered = [*bins, *[np.zeros(0, np.int64)] * (-len(bins) % num_ranks)]
    totals_R = np.zeros(num_ranks)
    ranks: list[list[Bin]] = [[] for _ in range(num_ranks)]
    # Stable sorts: ties must not break differently when a step is taken again after a resume.
    for row in np.argsort(-costs, kind="stable").reshape(-1, num_ranks):
        poorest_first = np.argsort(totals_R, kind="stable")
        totals_R[poorest_first] += costs[row]
        for rank, index in zip(poorest_first.tolist(), row.tolist(), strict=True):
            ranks[rank].append(ordered[index])
    return ranks


def sample_costs(lengths_N: NDArray[np.int64], hidden_size: int) -> NDArray[np.float64]:
    """Return [N] the relative FLOPs of each sample: 1 is a token without attention.

    Forward, a layer of hidden size h takes about 24 h^2 FLOPs per token in its matrices (8 h^2 in
    the projections of attention, 16 h^2 in the MLP) and 2 h length^2 in causal attention, half of
    the 4 h length^2 of full attention. So attention adds length / (12 h) per token.
    """
    return lengths_N * (1.0 + lengths_N / (12.0 * hidden_size))


def _num_bins(patterns: Sequence[Pattern]) -> int:
    return sum(pattern.num_bins for pattern in patterns)


def _fill(lengths_N: NDArray[np.int64], patterns: Sequence[Pattern]) -> list[Bin]:
    """Fill the bins of a plan with samples; the samples of one length keep their order.

    The plan is first unfolded to rows, one per length of a pattern, and then to one entry per
    sample, ordered by length and by the row that takes it.
    """
    per_bin_R = np.array([taken for takes, _ in patterns for _, taken in takes])
    length_R = np.array([length for takes, _ in patterns for length, _ in takes])
    takes_P = np.array([len(takes) for takes, _ in patterns])
    bins_P = np.array([num_bins for _, num_bins in patterns])
    first_bin_R = np.repeat(np.cumsum(bins_P) - bins_P, takes_P)
    size_R = per_bin_R * np.repeat(bins_P, takes_P)
    # Sorted by length, rows and samples run in parallel: a plan takes as many samples of a length
    # as there are. So entry n below is for sample_N[n], and no Python runs per sample.
    by_length_R = np.argsort(length_R, kind="stable")
    size_R, per_bin_R, first_bin_R = (
        column[by_length_R] for column in (size_R, per_bin_R, first_bin_R)
    )
    number_N = np.arange(lengths_N.size) - np.repeat(np.cumsum(size_R) - size_R, size_R)
    bin_N = np.repeat(first_bin_R, size_R) + number_N // np.repeat(per_bin_R, size_R)
    sample_N = np.argsort(lengths_N, kind="stable")
    # lexsort's last key comes first: by bin, and inside a bin the longest sample first.
    by_bin_N = np.lexsort((-lengths_N[sample_N], bin_N))
    return np.split(sample_N[by_bin_N], np.cumsum(np.bincount(bin_N))[:-1])
