"""Statistics of evals: pass@k and pass^k from all n rollouts, and intervals clustered by task.

Rollouts of one task are correlated, so every number here is a mean over tasks, and its uncertainty
comes from the spread between tasks. Tasks may be correlated too, such as questions about one text:
then it comes from the spread between clusters of tasks. Pure functions, no I/O.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from telescope_core.base.number_text import style_of
from telescope_core.evals.distributions import beta_quantile, t_quantile

CONFIDENCE = 0.95
_TAIL = (1.0 - CONFIDENCE) / 2
NORMAL_QUANTILE = 1.959963984540054
"""Standard deviations from the mean to the ends of a normal distribution's 95% interval."""
_ROUNDING = 1e-9
_NEVER = 1e-20
"""A chance that is left out: fewer than 1e9 such are summed, beside one of at least 0.01."""
_MOST_TRIALS = 64
"""Rollouts of a task beyond these change the weight of imagined tasks by next to nothing."""
_HALF_TASK = 0.5
"""Weight of an imagined task at each end of the range: Jeffreys' prior for a proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks and its 95% interval; the ends are None with fewer than 2 draws."""

    mean: float
    low: float | None
    high: float | None
    num_tasks: int
    """Number of tasks in the mean: its denominator."""
    num_clusters: int = 0
    """Number of clusters of these tasks; 0 if each task is independent of the others."""

    @property
    def mean_text(self) -> str:
        """The mean, with as many digits as the interval."""
        return f"{self.mean:{style_of(self.mean, self.low, self.high)}}"

    @property
    def interval_text(self) -> str:
        """The ends of the interval, or a dash when there is none."""
        if self.low is None or self.high is None:
            return "-"
        style = style_of(self.mean, self.low, self.high)
        return f"{self.low:{style}} to {self.high:{style}}"


class Draws(NamedTuple):
    """Independent draws of a value: single tasks, or the means of clusters of tasks."""

    values: list[float]
    sizes: list[int]
    """Number of tasks behind each value."""

    @property
    def weights(self) -> list[float]:
        """Weight of each value in the mean over tasks; 1 on average."""
        total = sum(self.sizes)
        return [size * len(self.sizes) / total for size in self.sizes]

    @property
    def number(self) -> float:
        """Number of draws of equal weight that tell as much (Kish 1965, Survey Sampling)."""
        return sum(self.sizes) ** 2 / sum(size * size for size in self.sizes)

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the spread between the draws, at least 1."""
        return max(1.0, self.number - 1.0)

    @property
    def num_clusters(self) -> int:
        """Number of clusters; 0 if all draws are single tasks."""
        return 0 if sum(self.sizes) == len(self.sizes) else len(self.sizes)


def draws_of(values_N: Sequence[float], clusters_N: Sequence[str] = ()) -> Draws:
    """Return the independent draws in one value per task; tasks of one cluster are one draw.

    A task whose cluster has an empty name is a draw of its own, as all are by default.
    """
    members: dict[str | int, list[float]] = {}
    for index, value in enumerate(values_N):
        name = clusters_N[index] if clusters_N else ""
        members.setdefault(name or index, []).append(value)
    groups = members.values()
    return Draws([math.fsum(one) / len(one) for one in groups], [len(one) for one in groups])


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


@lru_cache(maxsize=4096)
def majority_at_k(votes: tuple[tuple[int, int], ...], num_without: int, k: int) -> float:
    """Return the probability that the most frequent answer among k rollouts is right (maj@k).

    `votes` has (rollouts, solved) for each different answer; `num_without` more rollouts gave none.
    The k are drawn from all of them without replacement. Of several answers that are equally
    frequent each is taken as often; one that was graded both ways is right in its share of solved
    rollouts. Without any answer there is none that is right. Requires 1 <= k <= all rollouts.
    Paper: arXiv:2203.11171 (self-consistency).
    """
    n = sum(count for count, _ in votes) + num_without
    _require_counts(n, 0, k)
    highest = max((count for count, _ in votes), default=0)
    if k == n:
        shares = [solved / count for count, solved in votes if count == highest]
        return math.fsum(shares) / max(1, len(shares))
    # Each rollout is drawn with probability k / n by itself; those draws count in which k are.
    right = 0.0
    for most in range(1, min(k, highest) + 1):
        # An answer that fewer gave can neither win nor tie, so it is like no answer.
        able = [one for one in votes if one[0] >= most]
        others = _draws_of_each(n - sum(count for count, _ in able), k, n)
        for (size, tied), (_, good) in _votes_of(able, most, k, n).items():
            if tied and k - size < len(others):
                right += good * others[k - size] / tied
    # Rounding must not make a share of more than all.
    return min(1.0, right / _draws_of_each(n, k, n)[k])


def _votes_of(
    able: Sequence[tuple[int, int]], most: int, k: int, n: int
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return (rollouts drawn, answers with `most` of them) -> chance, and chance times right."""
    drawn = {(0, 0): (1.0, 0.0)}
    for count, solved in able:
        chances = _draws_of_each(count, k, n)
        after: dict[tuple[int, int], tuple[float, float]] = {}
        for (size, tied), (whole, good) in drawn.items():
            for taken in range(min(most, k - size) + 1):
                chance, is_most = chances[taken], taken == most
                if whole * chance < _NEVER:
                    continue
                here = (size + taken, tied + is_most)
                before = after.get(here, (0.0, 0.0))
                share = whole * chance * solved / count if is_most else 0.0
                after[here] = (before[0] + whole * chance, before[1] + good * chance + share)
        drawn = after
    return drawn


@lru_cache(maxsize=4096)
def _draws_of_each(count: int, k: int, n: int) -> list[float]:
    """Return the chance of 0, 1, ... of `count` rollouts, up to k, if each has k / n."""
    log_in, log_out = math.log(k / n), math.log1p(-k / n)
    return [
        math.exp(
            math.lgamma(count + 1)
            - math.lgamma(taken + 1)
            - math.lgamma(count - taken + 1)
            + taken * log_in
            + (count - taken) * log_out
        )
        for taken in range(min(count, k) + 1)
    ]


def _require_counts(n: int, c: int, k: int) -> None:
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"expected 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")


def success_rate(
    counts: Sequence[tuple[int, int]], k: int, *, every: bool, clusters: Sequence[str] = ()
) -> Estimate | None:
    """Return pass@k, or pass^k if `every`, of tasks with (rollouts, solved), and its interval.

    `clusters` has the cluster of each task, as in `draws_of`. Tasks with fewer than k rollouts are
    left out; returns None when that leaves none. How often the interval covers the truth is
    measured in benchmarks/results/intervals.md.
    """
    estimator = pass_all_k if every else pass_at_k
    used = Counter((n, c) for n, c in counts if n >= k)
    if not used:
        return None
    scores = {case: estimator(*case, k) for case in used}
    values_N = [scores[case] for case in counts if case[0] >= k]
    left = [name for name, (n, _) in zip(clusters, counts, strict=False) if n >= k]
    draws = draws_of(values_N, left)
    # All tasks have the same number of rollouts, except where some failed.
    most = most_common(case[0] for case in used.elements())
    if draws.num_clusters:
        weight = end_weight(draws, most)
    else:
        by_num_solved = [estimator(most, solved, k) for solved in range(most + 1)]
        weight = _HALF_TASK * math.sqrt(variance_share(used, by_num_solved))
    return _interval(draws, end_weight=weight, range_=(0.0, 1.0))


def mean_of_rewards(
    rewards: Sequence[Sequence[float]],
    *,
    minimum: float = 0.0,
    maximum: float = 1.0,
    clusters: Sequence[str] = (),
) -> Estimate | None:
    """Return the mean over tasks of each task's mean reward, and its interval.

    `rewards` has one sequence per task; empty ones are ignored. `clusters` has the cluster of each
    task, as in `draws_of`. Returns None if all are empty. If
    all rewards are at the ends of their range, they count as successes and failures; other rewards
    as shares of a success.
    """
    tasks = [task for task in rewards if task]
    if not tasks:
        return None
    clusters = [name for name, task in zip(clusters, rewards, strict=False) if task]
    # Sums of weights may miss an end of the range by rounding.
    slack = 1e-9 * (maximum - minimum)
    if minimum < maximum and all(
        min(one - minimum, maximum - one) <= slack for task in tasks for one in task
    ):
        counts = [(len(task), sum(maximum - one <= slack for one in task)) for task in tasks]
        rate = success_rate(counts, 1, every=False, clusters=clusters)
        assert rate is not None, "each task has a rollout"
        low, high = (
            None if share is None else minimum + share * (maximum - minimum)
            for share in (rate.low, rate.high)
        )
        mean = minimum + rate.mean * (maximum - minimum)
        return replace(rate, low=low, mean=mean, high=high)
    means_N = [math.fsum(task) / len(task) for task in tasks]
    span = (maximum - minimum) or 1.0
    shares = draws_of([(mean - minimum) / span for mean in means_N], clusters)
    weight = end_weight(shares, most_common(map(len, tasks)))
    draws = draws_of(means_N, clusters)
    return _interval(draws, end_weight=weight, range_=(minimum, maximum))


def end_weight(shares: Draws, rollouts: int) -> float:
    """Return the weight of an imagined draw at each end, from values between 0 and 1.

    Each is taken for the share of solved rollouts of one task: partial credit of 0.1 in each of 4
    rollouts is none solved. So rare tasks at an end that were not seen are allowed for, and fewer
    where `rollouts` for each task show that tasks are alike. A cluster is taken for one task with
    the rollouts of its tasks. See `variance_share`.
    """
    trials = min(rollouts * most_common(shares.sizes), _MOST_TRIALS)
    solved = (min(trials, max(0, round(trials * share))) for share in shares.values)
    counts = Counter((trials, number) for number in solved)
    values = [number / trials for number in range(trials + 1)]
    return _HALF_TASK * math.sqrt(variance_share(counts, values))


def most_common(numbers: Iterable[int]) -> int:
    """Return the most frequent of `numbers`."""
    return Counter(numbers).most_common(1)[0][0]


def _interval(draws: Draws, *, end_weight: float, range_: tuple[float, float]) -> Estimate:
    """Return the mean over tasks, with a beta interval on the range of their values.

    `end_weight` draws at each end of the range are added to the draws. A beta distribution gets the
    mean and the variance that the mean of the draws then has under Rubin's Bayesian bootstrap
    (1981, Ann. Stat. 9, 130), widened by Student's t for the variance that is itself estimated; its
    quantiles are the interval. For single rollouts, before the widening, this is Jeffreys' interval
    of a proportion (Brown, Cai and DasGupta 2001, Stat. Sci. 16, 101), whose change at the ends is
    made here too: where all draws are at one end, that end is kept, and the other is the exact
    binomial bound on the share of draws that were not seen.
    """
    minimum, maximum = range_
    num_tasks = sum(draws.sizes)
    mean = math.fsum(v * size for v, size in zip(*draws, strict=True)) / num_tasks
    found = Estimate(
        mean=mean, low=None, high=None, num_tasks=num_tasks, num_clusters=draws.num_clusters
    )
    if len(draws.values) < 2 or minimum >= maximum:
        return found
    span = maximum - minimum
    scaled = draws._replace(values=[(value - minimum) / span for value in draws.values])
    if are_alike(scaled.values):
        low, high = ends_of_constant(scaled.values[0], draws.number)
    else:
        beta = mean_distribution(scaled, end_weight)
        low, high = (0.0, 1.0) if beta is None else beta.ends
    # Rounding, and ends that are rarely seen, must not push the mean out of its own interval.
    low, high = (minimum + span * end for end in (low, high))
    return replace(found, low=min(mean, low), high=max(mean, high))


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


def mean_distribution(draws: Draws, end_weight: float) -> BetaMean | None:
    """Return the distribution of the mean of values between 0 and 1 that are not all the same.

    With clusters of several sizes it has the variance of a ratio of two sums over clusters. None =
    so few draws that the mean may be anywhere.
    """
    total = len(draws.values) + 2 * end_weight
    weighted = list(zip(draws.values, draws.weights, strict=True))
    mean = (math.fsum(value * weight for value, weight in weighted) + end_weight) / total
    square = math.fsum((weight * (value - mean)) ** 2 for value, weight in weighted)
    square += end_weight * (mean**2 + (1.0 - mean) ** 2)
    widening = t_quantile(1.0 - _TAIL, draws.degrees) / NORMAL_QUANTILE
    variance = square / total / (total + 1.0) * widening**2
    size = mean * (1.0 - mean) / variance - 1.0
    return BetaMean(mean * size, (1.0 - mean) * size) if size > 0.0 else None


def ends_of_constant(value: float, number: float) -> tuple[float, float]:
    """Return the interval when all of `number` draws have the same value: no spread is seen.

    The exact binomial bound on the share of draws with another value (Clopper-Pearson, with no such
    draw among `number`) is multiplied by the distance from the value to each end of the range.
    """
    share = 1.0 - _TAIL ** (1.0 / number)
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
