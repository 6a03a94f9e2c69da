"""Estimate the share of the largest possible variance between tasks that an eval has.

Among tasks of which each is solved always or never, a score between 0 and 1 with mean m has the
variance m (1 - m), which is the largest there is. Tasks that are alike have a small share of it.
With few tasks, the variance that was seen says little about the tasks that were not; the counts of
the rollouts say more. Pure functions, no I/O.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

_NUM_MEANS = 24
_NUM_CORRELATIONS = 16


class _Point(NamedTuple):
    """One beta distribution of the tasks' chances of success."""

    a: float
    b: float


def variance_share(counts: Mapping[tuple[int, int], int], values: Sequence[float]) -> float:
    """Return the expected share, in (0, 1], of the largest possible variance between tasks.

    `counts` maps (rollouts, solved) to the number of tasks that had them, and `values[c]` is the
    score of a task with c solved rollouts out of len(values) - 1. The tasks' chances of success are
    taken as beta distributed, with every correlation between the rollouts of a task equally likely
    in advance and an arcsine prior on the mean, and the share is averaged over what is left after
    seeing `counts` (the beta-binomial model; Skellam 1948, J. R. Stat. Soc. B 10, 257).
    """
    if all(value in (0.0, 1.0) for value in values):
        return 1.0
    shares = _shares(tuple(values))
    evidence = [0.0] * len(shares)
    for (rollouts, solved), num_tasks in counts.items():
        log_chances = _log_chances(rollouts, solved)
        evidence = [sum_ + num_tasks * one for sum_, one in zip(evidence, log_chances, strict=True)]
    most = max(evidence)
    weights = [math.exp(one - most) for one in evidence]
    return math.fsum(w * s for w, s in zip(weights, shares, strict=True)) / math.fsum(weights)


@lru_cache(maxsize=1)
def _points() -> list[_Point]:
    points: list[_Point] = []
    for i in range(_NUM_MEANS):
        mean = math.sin(math.pi * (i + 0.5) / (2 * _NUM_MEANS)) ** 2
        for j in range(_NUM_CORRELATIONS):
            size = _NUM_CORRELATIONS / (j + 0.5) - 1.0  # correlation r = 1 / (a + b + 1)
            points.append(_Point(mean * size, (1.0 - mean) * size))
    return points


@lru_cache(maxsize=4096)
def _log_chances(rollouts: int, solved: int) -> list[float]:
    """Return the log probability of `solved` out of `rollouts` at every point."""
    ways = _log_beta(solved + 1.0, rollouts - solved + 1.0) + math.log(rollouts + 1.0)
    return [
        _log_beta(solved + a, rollouts - solved + b) - _log_beta(a, b) - ways for a, b in _points()
    ]


@lru_cache(maxsize=64)
def _shares(values: tuple[float, ...]) -> list[float]:
    """Return the share at every point: Var(value) / (mean (1 - mean))."""
    rollouts = len(values) - 1
    rows = [_log_chances(rollouts, solved) for solved in range(rollouts + 1)]
    shares: list[float] = []
    for i in range(len(_points())):
        chances = [math.exp(row[i]) for row in rows]
        mean = math.fsum(c * v for c, v in zip(chances, values, strict=True))
        square = math.fsum(c * v * v for c, v in zip(chances, values, strict=True))
        room = mean * (1.0 - mean)
        # A mean so near 0 or 1 that the variance is lost to rounding has no tasks in between.
        shares.append(min(1.0, (square - mean * mean) / room) if room > 1e-12 else 1.0)
    return shares


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
