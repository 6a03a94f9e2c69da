"""A plan with hardly a gap: for lengths that first-fit decreasing cannot fill bins with.

Taking the largest that fits first uses up the short samples, and the last bins hold several of
about one length, with room for none. Here a bin ends with a pair that fills it exactly, of lengths
that are least used up: what is left keeps its mix, and the last bins are as full as the first.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FULL_ENOUGH = 1 / 256
"""Share of a bin that may stay empty."""
ROOM_FOR_A_PAIR = 2.6
"""A bin is closed when its room is at most this many samples of average length."""
SUMS = 16
"""Sums looked at for a pair: what is left of the bin, one less, and so on."""


class Pattern(NamedTuple):
    """Bins that hold the same lengths."""

    takes: list[tuple[int, int]]
    """(length, samples of that length in each bin), longest first."""
    num_bins: int


def plan_tight_bins(
    lengths: Sequence[int], counts: Sequence[int], *, capacity: int
) -> list[Pattern]:
    """Plan bins for `counts[i]` samples of `lengths[i]`; lengths ascend, none above `capacity`."""
    left = _Left(lengths, counts, capacity)
    patterns: list[Pattern] = []
    while left.lengths:
        takes = Counter(_one_bin(left, capacity))
        num_more = min(left.counts[length] // taken for length, taken in takes.items())
        for length, taken in takes.items():
            left.take(length, num_more * taken)
        patterns.append(Pattern(sorted(takes.items(), reverse=True), 1 + num_more))
    return patterns


class _Left:
    """The samples that no bin holds yet."""

    def __init__(self, lengths: Sequence[int], counts: Sequence[int], capacity: int) -> None:
        self.lengths = list(lengths)
        """Those of which some are left, ascending."""
        self.counts = dict(zip(lengths, counts, strict=True))
        self.num_samples = sum(counts)
        self.num_tokens = sum(length * count for length, count in zip(lengths, counts, strict=True))
        self._first_counts = dict(self.counts)
        self._shares = np.zeros(capacity + 1, np.float32)
        """What share of a length's samples is left, by length."""
        self._shares[self.lengths] = 1.0

    def take(self, length: int, times: int = 1) -> None:
        self.counts[length] -= times
        self.num_samples -= times
        self.num_tokens -= times * length
        self._shares[length] = self.counts[length] / self._first_counts[length]
        if not self.counts[length]:
            place = bisect_left(self.lengths, length)
            if place < len(self.lengths) and self.lengths[place] == length:
                del self.lengths[place]

    def largest(self, room: int) -> int | None:
        """Return the largest length that fits."""
        end = bisect_right(self.lengths, room)
        return self.lengths[end - 1] if end else None

    def pair(self, total: int) -> tuple[int, int] | None:
        """Return the two lengths of that sum that are least used up."""
        low, high = total // 2 + 1, total - self.lengths[0] + 1
        if low >= high:
            return None
        smaller = self._shares[total - high + 1 : total - low + 1][::-1]
        shares = np.minimum(self._shares[low:high], smaller)
        best = int(shares.argmax())
        return (low + best, total - low - best) if shares[best] else None


def _one_bin(left: _Left, capacity: int) -> list[int]:
    """Take the lengths of one bin."""
    takes: list[int] = []
    room = capacity
    while found := _next(left, room, tolerance=int(capacity * FULL_ENOUGH), is_empty=not takes):
        for length in found:
            left.take(length)
            room -= length
        takes += found
    return takes


def _next(left: _Left, room: int, *, tolerance: int, is_empty: bool) -> Sequence[int]:
    """Return what to put into the room of a bin: nothing when it is full."""
    largest = left.largest(room) if left.lengths else None
    if largest is None:
        return ()
    is_closing = room * left.num_samples <= ROOM_FOR_A_PAIR * left.num_tokens
    if is_empty or not is_closing or room - largest <= tolerance:
        return (largest,)
    pairs = (left.pair(total) for total in range(room, max(room - SUMS, 0), -1))
    return next(filter(None, pairs), (largest,))
