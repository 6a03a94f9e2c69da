"""Student's t and the beta distribution: the quantiles that the intervals of evals need.

Written out here because telescope-core depends on neither numpy nor scipy.
"""

import math
from functools import lru_cache

_TINY = 1e-300
_LARGEST_LOG = 700.0
_MOST_FRACTION_TERMS = 10_000


@lru_cache(maxsize=1024)
def t_quantile(probability: float, df: float) -> float:
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


def t_cdf(t: float, df: float) -> float:
    """Return P(T <= t) of Student's t with `df` degrees of freedom."""
    tail = 0.5 * incomplete_beta(0.5 * df, 0.5, df / (df + t * t))
    return 1.0 - tail if t >= 0 else tail


def beta_quantile(probability: float, a: float, b: float, *, tolerance: float = 1e-8) -> float:
    """Return x with I_x(a, b) = `probability`, to within `tolerance`, for a, b > 0.

    Newton's steps from the mean, and half the bracket where a step would leave it.
    """
    low, high = 0.0, 1.0
    x = min(max(a / (a + b), tolerance), 1.0 - tolerance)
    ways = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    while high - low > tolerance:
        excess = incomplete_beta(a, b, x) - probability
        if excess < 0.0:
            low = x
        else:
            high = x
        log_density = ways + (a - 1.0) * math.log(x) + (b - 1.0) * math.log1p(-x)
        density = math.exp(min(log_density, _LARGEST_LOG))
        step = excess / density if density > 0.0 else math.inf
        aimed = x - step
        if not low < aimed < high:
            aimed = 0.5 * (low + high)
        if abs(aimed - x) <= 0.5 * tolerance:
            return aimed
        x = aimed
    return 0.5 * (low + high)


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
    """Evaluate 1 + d1 x / (1 + d2 x / (1 + ...)) of I_x(a, b), until a further term adds nothing.

    Lentz's method: the fraction is a product of factors c / d that tend to 1.
    """
    value = c = 1.0
    d = 0.0
    for j in range(1, _MOST_FRACTION_TERMS):
        half = j // 2
        if j % 2:
            term = -(a + half) * (a + b + half) / ((a + 2 * half) * (a + 2 * half + 1)) * x
        else:
            term = half * (b - half) / ((a + 2 * half - 1) * (a + 2 * half)) * x
        d = 1.0 / ((1.0 + term * d) or _TINY)
        c = (1.0 + term / c) or _TINY
        value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value
