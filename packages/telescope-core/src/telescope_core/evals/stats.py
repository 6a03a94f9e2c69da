"""Statistics of evals: pass@k and pass^k from all n rollouts, and intervals clustered by task.

Rollouts of one task are correlated, so every number here is a mean over tasks, and its uncertainty
comes from the spread between tasks. Pure functions, no I/O.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from telescope_core.evals.distributions import beta_quantile, t_quantile

CONFIDENCE = 0.95
_TAIL = (1.0 - CONFIDENCE) / 2
NORMAL_QUANTILE = 1.959963984540054
"""Standard deviations from the mean to the ends of a normal distribution's 95% interval."""
_ROUNDING = 1e-9
_MOST_TRIALS = 64
"""Rollouts of a task beyond these change the weight of imagined tasks by next to nothing."""
_HALF_TASK = 0.5
"""Weight of an imagined task at each end of the range: Jeffreys' prior for a proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks and its 95% interval; the ends are None with fewer than 2 tasks."""

    mean: float
    low: float | None
    high: float | None
    num_tasks: int
    """Number of tasks in the mean: its denominator."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n rollouts include at least one of the c successes.

    The k rollouts are drawn without replacement. This is an unbiased estimate of the probability
    that at least one of k independent rollouts succeeds. Requires 1 <= k <= n and 0 <= c <= n.
    """
    _require_counts(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_all_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n rollouts, with c successes, are all successes (pass^k).

    The k rollouts are drawn without replacement. Requires 1 <= k <= n and 0 <= c <= n.
    """
    _require_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _require_counts(n: int, c: int, k: int) -> None:
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"expected 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")


def success_rate(counts: Sequence[tuple[int, int]], k: int, *, every: bool) -> Estimate | None:
    """Return pass@k, or pass^k if `every`, of tasks with (rollouts, solved), and its interval.

    Tasks with fewer than k rollouts are left out; returns None when that leaves none. How often the
    interval covers the truth is measured in benchmarks/results/intervals.md.
    """
    estimator = pass_all_k if every else pass_at_k
    used = Counter((n, c) for n, c in counts if n >= k)
    if not used:
        return None
    scores = {case: estimator(*case, k) for case in used}
    values_N = [scores[case] for case, count in used.items() for _ in range(count)]
    # All tasks have the same number of rollouts, except where some failed.
    most = most_common(case[0] for case in used.elements())
    by_num_solved = [estimator(most, solved, k) for solved in range(most + 1)]
    share = variance_share(used, by_num_solved)
    return _interval(values_N, end_weight=_HALF_TASK * math.sqrt(share), range_=(0.0, 1.0))


def mean_of_rewards(
    rewards: Sequence[Sequence[float]], *, minimum: float = 0.0, maximum: float = 1.0
) -> Estimate | None:
    """Return the mean over tasks of each task's mean reward, and its interval.

    `rewards` has one sequence per task; empty ones are ignored. Returns None if all are empty. If
    all rewards are at the ends of their range, they count as successes and failures; other rewards
    as shares of a success.
    """
    tasks = [task for task in rewards if task]
    if not tasks:
        return None
    # Sums of weights may miss an end of the range by rounding.
    slack = 1e-9 * (maximum - minimum)
    if minimum < maximum and all(
        min(one - minimum, maximum - one) <= slack for task in tasks for one in task
    ):
        counts = [(len(task), sum(maximum - one <= slack for one in task)) for task in tasks]
        rate = success_rate(counts, 1, every=False)
        return None if rate is None else _stretched(rate, minimum, maximum)
    means_N = [math.fsum(task) / len(task) for task in tasks]
    span = (maximum - minimum) or 1.0
    weight = end_weight([(mean - minimum) / span for mean in means_N], most_common(map(len, tasks)))
    return _interval(means_N, end_weight=weight, range_=(minimum, maximum))


def end_weight(shares_N: Iterable[float], rollouts: int) -> float:
    """Return the weight of an imagined task at each end, from values between 0 and 1.

    Each is taken for the share of solved rollouts of one task: partial credit of 0.1 in each of 4
    rollouts is none solved. So rare tasks at an end that were not seen are allowed for, and fewer
    where `rollouts` for each task show that tasks are alike. See `variance_share`.
    """
    trials = min(rollouts, _MOST_TRIALS)
    solved = (min(trials, max(0, round(trials * share))) for share in shares_N)
    counts = Counter((trials, number) for number in solved)
    values = [number / trials for number in range(trials + 1)]
    return _HALF_TASK * math.sqrt(variance_share(counts, values))


def most_common(numbers: Iterable[int]) -> int:
    """Return the most frequent of `numbers`."""
    return Counter(numbers).most_common(1)[0][0]


def _stretched(rate: Estimate, minimum: float, maximum: float) -> Estimate:
    def value(share: float) -> float:
        return minimum + share * (maximum - minimum)

    return Estimate(
        mean=value(rate.mean),
        low=None if rate.low is None else value(rate.low),
        high=None if rate.high is None else value(rate.high),
        num_tasks=rate.num_tasks,
    )


def _interval(
    values_N: Sequence[float], *, end_weight: float, range_: tuple[float, float]
) -> Estimate:
    """Return the mean of one value per task, with a beta interval on the range of the values.

    `end_weight` tasks at each end of the range are added to the tasks. A beta distribution gets the
    mean and the variance that the mean of the tasks then has under Rubin's Bayesian bootstrap
    (1981, Ann. Stat. 9, 130), widened by Student's t for the variance that is itself estimated; its
    quantiles are the interval. For single rollouts, before the widening, this is Jeffreys' interval
    of a proportion (Brown, Cai and DasGupta 2001, Stat. Sci. 16, 101), whose change at the ends is
    made here too: where all tasks are at one end, that end is kept, and the other is the exact
    binomial bound on the share of tasks that were not seen.
    """
    minimum, maximum = range_
    num_tasks = len(values_N)
    mean = math.fsum(values_N) / num_tasks
    if num_tasks < 2 or minimum >= maximum:
        return Estimate(mean=mean, low=None, high=None, num_tasks=num_tasks)
    span = maximum - minimum
    scaled_N = [(value - minimum) / span for value in values_N]
    if are_alike(scaled_N):
        low, high = ends_of_constant(scaled_N[0], num_tasks)
    else:
        found = mean_distribution(scaled_N, end_weight)
        low, high = (0.0, 1.0) if found is None else found.ends
    # Rounding, and ends that are rarely seen, must not push the mean out of its own interval.
    return Estimate(
        mean=mean,
        low=min(mean, minimum + span * low),
        high=max(mean, minimum + span * high),
        num_tasks=num_tasks,
    )


def are_alike(values_N: Sequence[float]) -> bool:
    """Return whether values between -1 and 1 differ by no more than rounding does."""
    return max(values_N) - min(values_N) <= _ROUNDING


class BetaMean(NamedTuple):
    """A beta distribution of the mean of values between 0 and 1."""

    a: float
    b: float

    @property
    def sd(self) -> float:
        """Its standard deviation."""
        total = self.a + self.b
        return math.sqrt(self.a * self.b / (total + 1.0)) / total

    @property
    def ends(self) -> tuple[float, float]:
        """Its 95% interval."""
        low, high = (beta_quantile(tail, self.a, self.b) for tail in (_TAIL, 1.0 - _TAIL))
        return low, high


def mean_distribution(values_N: Sequence[float], end_weight: float) -> BetaMean | None:
    """Return the distribution of the mean of values between 0 and 1 that are not all the same.

    None = so few tasks that the mean may be anywhere.
    """
    total = len(values_N) + 2 * end_weight
    mean = (math.fsum(values_N) + end_weight) / total
    square = math.fsum((value - mean) ** 2 for value in values_N)
    square += end_weight * (mean**2 + (1.0 - mean) ** 2)
    widening = t_quantile(1.0 - _TAIL, len(values_N) - 1) / NORMAL_QUANTILE
    variance = square / total / (total + 1.0) * widening**2
    size = mean * (1.0 - mean) / variance - 1.0
    return BetaMean(mean * size, (1.0 - mean) * size) if size > 0.0 else None


def ends_of_constant(value: float, num_tasks: int) -> tuple[float, float]:
    """Return the interval when every task has the same value, so that no spread is seen.

    The exact binomial bound on the share of tasks with another value (Clopper-Pearson, with no such
    task among N) is multiplied by the distance from the value to each end of the range.
    """
    share = 1.0 - _TAIL ** (1.0 / num_tasks)
    return (value - share * value, value + share * (1.0 - value))


_NUM_MEANS = 24
_NUM_CORRELATIONS = 16


class _Point(NamedTuple):
    """One beta distribution of the tasks' chances of success."""

    a: float
    b: float


def variance_share(counts: Mapping[tuple[int, int], int], values: Sequence[float]) -> float:
    """Return the expected share, in (0, 1], of the largest possible variance between tasks.

    Among tasks of which each is solved always or never, a score between 0 and 1 with mean m has the
    variance m (1 - m), which is the largest there is. Tasks that are alike have a small share of
    it. With few tasks, the variance that was seen says little about the tasks that were not; the
    counts of the rollouts say more.

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
