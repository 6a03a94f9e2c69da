"""Two plans for lengths for which first-fit decreasing leaves gaps: tight bins, and grouped ones.

Taking the largest sample that fits uses up the short samples, and the last bins hold a few long
samples and a hole that no other fits. Letters: N samples, G groups, K samples in each.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FULL_ENOUGH = 1 / 256
"""Share of a bin that may stay empty."""
ROOM_FOR_A_PAIR = 2.6
"""A bin is closed with a pair once its room is at most this many samples of average length."""
SUMS = 16
"""Sums tried for a pair, in tokens: the room of the bin, one less, and so on."""
MOST_IN_A_BIN = 6
"""Samples in a bin above which other plans leave hardly any gap."""
_PASSES = 60


class Pattern(NamedTuple):
    """Bins that hold the same lengths."""

    takes: list[tuple[int, int]]
    """(length in tokens, samples of that length in each bin), longest first."""
    num_bins: int


def plan_tight_bins(
    lengths: Sequence[int], counts: Sequence[int], *, capacity: int
) -> list[Pattern]:
    """Plan bins for `counts[i]` samples of `lengths[i]` tokens; lengths ascend up to `capacity`.

    A bin ends with a pair that fills it exactly. Among such pairs it takes the one whose lengths
    are least used up, so the samples left keep their mix of lengths, and the last bins are as full
    as the first.
    """
    left = _Left(lengths, counts, capacity)
    patterns: list[Pattern] = []
    while left.lengths:
        takes = Counter(_one_bin(left, capacity))
        # Repeat the bin while its lengths last. That makes the time nearly independent of the
        # number of samples; the price is that shares are updated per pattern, not per bin.
        num_more = min(left.counts[length] // taken for length, taken in takes.items())
        for length, taken in takes.items():
            left.take(length, num_more * taken)
        patterns.append(Pattern(sorted(takes.items(), reverse=True), 1 + num_more))
    return patterns


class _Left:
    """The samples that no bin holds yet, counted by length."""

    def __init__(self, lengths: Sequence[int], counts: Sequence[int], capacity: int) -> None:
        self.lengths = list(lengths)
        """Lengths in tokens of the samples that are left, ascending."""
        self.counts = dict(zip(lengths, counts, strict=True))
        self.num_samples = sum(counts)
        self.num_tokens = sum(length * count for length, count in zip(lengths, counts, strict=True))
        self._first_counts = dict(self.counts)
        self._shares = np.zeros(capacity + 1, np.float32)
        """[capacity + 1] by length: the share of its samples that is left; 0 if none."""
        self._shares[self.lengths] = 1.0

    def take(self, length: int, times: int = 1) -> None:
        self.counts[length] -= times
        self.num_samples -= times
        self.num_tokens -= times * length
        self._shares[length] = self.counts[length] / self._first_counts[length]
        if not self.counts[length]:
            # It may be gone already: a pattern that cannot repeat takes 0 more of each length.
            place = bisect_left(self.lengths, length)
            if place < len(self.lengths) and self.lengths[place] == length:
                del self.lengths[place]

    def largest(self, room: int) -> int | None:
        """Return the largest length left that fits into `room` tokens; None = none does."""
        end = bisect_right(self.lengths, room)
        return self.lengths[end - 1] if end else None

    def pair(self, total: int) -> tuple[int, int] | None:
        """Return the pair of lengths with sum `total` of which most is left; None without one."""
        # The longer of the two runs from low to high - 1. It is more than half, so the lengths
        # differ and one sample of each is enough.
        low, high = total // 2 + 1, total - self.lengths[0] + 1
        if low >= high:
            return None
        # All pairs at once: reversed, the shares of the shorter lengths line up with the longer.
        # A pair is as used up as the scarcer of its lengths, and a length that is not there has 0.
        smaller = self._shares[total - high + 1 : total - low + 1][::-1]
        shares = np.minimum(self._shares[low:high], smaller)
        best = int(shares.argmax())
        return (low + best, total - low - best) if shares[best] else None


def _one_bin(left: _Left, capacity: int) -> list[int]:
    """Take samples for one bin out of `left`; returns their lengths in tokens."""
    takes: list[int] = []
    room = capacity
    while found := _next(left, room, tolerance=int(capacity * FULL_ENOUGH), is_empty=not takes):
        for length in found:
            left.take(length)
            room -= length
        takes += found
    return takes


def _next(left: _Left, room: int, *, tolerance: int, is_empty: bool) -> Sequence[int]:
    """Return the lengths to add to a bin with `room` tokens left; none if nothing fits."""
    largest = left.largest(room) if left.lengths else None
    if largest is None:
        return ()
    # room <= ROOM_FOR_A_PAIR * mean length, without dividing.
    is_closing = room * left.num_samples <= ROOM_FOR_A_PAIR * left.num_tokens
    # Long samples go first, as in first-fit decreasing, because short ones can still fill the gaps
    # that they leave. Only the end of a bin is worth a search.
    if is_empty or not is_closing or room - largest <= tolerance:
        return (largest,)
    pairs = (left.pair(total) for total in range(room, max(room - SUMS, 0), -1))
    return next(filter(None, pairs), (largest,))


def plan_grouped_bins(
    lengths: Sequence[int], counts: Sequence[int], *, capacity: int
) -> list[Pattern] | None:
    """Plan bins for samples of medium length, of which a bin holds two, three or four.

    There are `counts[i]` samples of `lengths[i]` tokens; lengths ascend up to `capacity`. The
    shortest are put together, as many to a bin as can fit and in as many bins as their tokens
    allow. The same is then done with the remaining samples, one fewer to a bin. None if samples
    are so short that no such plan is worth trying.
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
