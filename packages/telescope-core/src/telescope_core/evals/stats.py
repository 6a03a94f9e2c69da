"""Statistics of evals: pass@k and pass^k from all n rollouts, and intervals clustered by task.

Rollouts of one task are correlated, so every number here is a mean over tasks, and its uncertainty
comes from the spread between tasks. Pure functions, no I/O.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_NUM_RESAMPLES = 2000


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


def clustered_mean(
    values: Sequence[Sequence[float]], *, minimum: float = 0.0, maximum: float = 1.0
) -> Estimate | None:
    """Return the mean over tasks of each task's mean, with a t interval (tasks - 1 df).

    `values` has one sequence per task; empty ones are ignored. Returns None when all are empty.
    """
    means = [math.fsum(task) / len(task) for task in values if task]
    if not means:
        return None
    return mean_of_tasks(means, minimum=minimum, maximum=maximum)


def mean_of_tasks(
    means_N: Sequence[float], *, minimum: float = 0.0, maximum: float = 1.0
) -> Estimate:
    """Return the mean of one value per task with a t interval clipped to [minimum, maximum]."""
    num_tasks = len(means_N)
    mean = _mean(means_N)
    if num_tasks < 2:
        return Estimate(mean=mean, low=None, high=None, num_tasks=num_tasks)
    if all(value == means_N[0] for value in means_N):
        return _constant(mean, num_tasks, minimum=minimum, maximum=maximum)
    variance = math.fsum((value - mean) ** 2 for value in means_N) / (num_tasks - 1)
    reach = t_quantile(0.5 + CONFIDENCE / 2, num_tasks - 1) * math.sqrt(variance / num_tasks)
    low, high = max(minimum, mean - reach), min(maximum, mean + reach)
    return Estimate(mean=mean, low=low, high=high, num_tasks=num_tasks)


def bootstrap_mean_of_tasks(
    values_N: Sequence[float],
    *,
    minimum: float = 0.0,
    maximum: float = 1.0,
    seed: int = 0,
    num_resamples: int = _NUM_RESAMPLES,
) -> Estimate:
    """Return the mean of one value per task with a percentile bootstrap interval over tasks."""
    num_tasks = len(values_N)
    mean = _mean(values_N)
    if num_tasks < 2:
        return Estimate(mean=mean, low=None, high=None, num_tasks=num_tasks)
    if all(value == values_N[0] for value in values_N):
        return _constant(mean, num_tasks, minimum=minimum, maximum=maximum)
    draw = random.Random(seed)
    means = sorted(_mean(draw.choices(values_N, k=num_tasks)) for _ in range(num_resamples))
    tail = (1.0 - CONFIDENCE) / 2
    low, high = _sorted_quantile(means, tail), _sorted_quantile(means, 1.0 - tail)
    return Estimate(mean=mean, low=low, high=high, num_tasks=num_tasks)


def _constant(mean: float, num_tasks: int, *, minimum: float, maximum: float) -> Estimate:
    """Return the interval when every task has the same value, so that the spread is zero.

    The exact binomial bound on the share of tasks with another value (Clopper-Pearson, with no such
    task among N) is multiplied by the distance from the mean to each end of the range.
    """
    share = 1.0 - ((1.0 - CONFIDENCE) / 2) ** (1.0 / num_tasks)
    low = mean - share * (mean - minimum)
    high = mean + share * (maximum - mean)
    return Estimate(mean=mean, low=low, high=high, num_tasks=num_tasks)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _sorted_quantile(ordered: Sequence[float], probability: float) -> float:
    position = probability * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def t_quantile(probability: float, df: int) -> float:
    """Return the `probability` quantile of Student's t with `df` degrees of freedom."""
    if not (0.0 < probability < 1.0 and df >= 1):
        raise ValueError(f"expected 0 < probability < 1 and df >= 1, got {probability}, {df}")
    if probability < 0.5:
        return -t_quantile(1.0 - probability, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < probability:
        low, high = high, 2.0 * high
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if t_cdf(middle, df) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def t_cdf(t: float, df: int) -> float:
    """Return P(T <= t) of Student's t with `df` degrees of freedom."""
    tail = 0.5 * incomplete_beta(0.5 * df, 0.5, df / (df + t * t))
    return 1.0 - tail if t >= 0 else tail


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), for a, b > 0 and 0 <= x <= 1."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    # The continued fraction converges fast only left of the mean; symmetry covers the rest.
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    return math.exp(log_front) / a / _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Evaluate 1 + d1 x / (1 + d2 x / (1 + ...)) of I_x(a, b), innermost term first."""
    value = 1.0
    for j in range(_num_beta_terms(a), 0, -1):
        half = j // 2
        if j % 2:
            term = -(a + half) * (a + b + half) / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) / ((a + 2 * half - 1) * (a + 2 * half))
        value = 1.0 + term * x / value
    return value


def _num_beta_terms(a: float) -> int:
    # The number of terms needed grows with the square root of the larger parameter.
    return 100 + 8 * math.ceil(math.sqrt(a))
