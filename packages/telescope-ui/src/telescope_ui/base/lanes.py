"""Bars of a timeline: lanes for overlapping ones, their number, and their times. Pure."""

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Bar(NamedTuple):
    """An interval of time."""

    start_s: float
    end_s: float


def lanes_of(bars: Sequence[Bar]) -> list[int]:
    """Return a lane for each bar, so that no two in a lane overlap; `bars` are sorted by start.

    The lowest lane that is free is taken, so there are as many lanes as bars at once.
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    found: list[int] = []
    for bar in bars:
        while busy and busy[0][0] <= bar.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        found.append(lane)
        heapq.heappush(busy, (bar.end_s, lane))
    return found


def depths_of(bars: Sequence[Bar]) -> list[int]:
    """Return the number of earlier bars around each bar; `bars` are by start, longer ones first.

    Times are measured separately, so consecutive bars may overlap a little, and an inner bar may
    end a little late. A bar is counted as inside another if most of it is.
    """
    within: list[Bar] = []
    found: list[int] = []
    for bar in bars:
        while within and not _lies_in(bar, within[-1]):
            within.pop()
        found.append(len(within))
        within.append(bar)
    return found


def _lies_in(bar: Bar, other: Bar) -> bool:
    shared_s = min(bar.end_s, other.end_s) - bar.start_s
    if bar.start_s == bar.end_s:
        return bar.start_s < other.end_s
    return shared_s > 0.5 * (bar.end_s - bar.start_s)


def seconds_by_name(bars: Iterable[tuple[str, Bar]]) -> dict[str, float]:
    """Return seconds by name; where bars overlap, the time goes to the one that began last.

    All of them together add up to the time in which there is any bar.
    """
    found: dict[str, float] = {}
    opened: list[tuple[str, float]] = []
    now_s = -math.inf

    def pass_time(until_s: float) -> float:
        at_s = now_s
        while opened:
            name, end_s = opened[-1]
            next_s = max(at_s, min(end_s, until_s))
            found[name] = found.get(name, 0.0) + next_s - at_s
            at_s = next_s
            if end_s > until_s:
                break
            opened.pop()
        return max(at_s, until_s)

    for name, bar in sorted(bars, key=lambda one: (one[1].start_s, -one[1].end_s)):
        now_s = pass_time(bar.start_s)
        opened.append((name, bar.end_s))
    pass_time(math.inf)
    return found


class Change(NamedTuple):
    """Changes in a bucket: the number of bars that begin and end, and the sum of their times."""

    bucket: int
    number: int
    """Beginnings minus ends."""
    sum_s: float
    """Times of beginnings minus those of ends, from the start of the window."""


def mean_numbers(
    changes: Iterable[Change], *, num_buckets: int, bucket_s: float
) -> dict[int, float]:
    """Return the mean number of simultaneous bars in each bucket that has any.

    Up to a time t, bars that began at s and ended at e last sum(t - s) - sum(t - e) together, which
    needs only the number and the sum of beginnings and ends before t.
    """
    numbers, sums_s = [0] * num_buckets, [0.0] * num_buckets
    for change in changes:
        numbers[min(change.bucket, num_buckets - 1)] += change.number
        sums_s[min(change.bucket, num_buckets - 1)] += change.sum_s
    found: dict[int, float] = {}
    count, sum_s, before_s = 0, 0.0, 0.0
    for bucket in range(num_buckets):
        count, sum_s = count + numbers[bucket], sum_s + sums_s[bucket]
        until_s = count * (bucket + 1) * bucket_s - sum_s
        mean = (until_s - before_s) / bucket_s
        before_s = until_s
        # Rests of rounding, which are small relative to the sums, are no bars.
        if mean > 1e-6:
            found[bucket] = mean
    return found
