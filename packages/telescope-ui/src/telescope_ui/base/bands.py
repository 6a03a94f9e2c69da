"""The interval around a curve of mean rewards. Pure, and quick: one for each step."""

import math
from typing import NamedTuple

from telescope_core.evals.distributions import t_quantile
from telescope_core.evals.stats import CONFIDENCE

_TAIL = (1 - CONFIDENCE) / 2
_NO_SPREAD = 1e-18
"""Variance of values between 0 and 1 that is due to rounding alone."""


class Band(NamedTuple):
    """Both ends of the interval; None if one group alone shows no spread."""

    low: float | None
    high: float | None


def band(num: int, mean: float, variance: float, reward_range: tuple[float, float] | None) -> Band:
    """Return the 95% interval of the mean over `num` groups whose means have `variance`.

    `variance` is the mean squared distance from `mean`. If the range of values is known, the
    interval is Student's t for the log of the odds, `log(p / (1 - p))` of the place `p` in the
    range, by the delta method. Otherwise it is Student's t for the mean, which may reach values
    that the reward cannot have. The intervals of evals look at single rewards
    (`telescope_core.evals.stats`), which takes too long for every step of a run.
    """
    if num < 2:
        return Band(None, None)
    quantile = t_quantile(1 - _TAIL, num - 1)
    if reward_range is None:
        reach = quantile * math.sqrt(variance / (num - 1))
        return Band(mean - reach, mean + reach)
    minimum, maximum = reward_range
    span = maximum - minimum
    place = min(1.0, max(0.0, (mean - minimum) / span))
    low, high = _places(num, place, variance / span**2, quantile)
    # Rounding must not push the mean out of its own interval.
    return Band(min(mean, minimum + span * low), max(mean, minimum + span * high))


def _places(num: int, place: float, variance: float, quantile: float) -> tuple[float, float]:
    """Return the interval of a mean between 0 and 1."""
    if variance <= _NO_SPREAD or not 0.0 < place < 1.0:
        # Groups that are all alike: the exact binomial bound on the share of others, times the
        # distance to each end.
        share = 1.0 - _TAIL ** (1.0 / num)
        return place - share * place, place + share * (1.0 - place)
    odds = place / (1.0 - place)
    reach = quantile * math.sqrt(variance / (num - 1)) / (place * (1.0 - place))
    # Beyond this, the ends are 0 and 1 to the last digit.
    factor = math.exp(min(reach, 300.0))
    return odds / (odds + factor), odds * factor / (1.0 + odds * factor)
