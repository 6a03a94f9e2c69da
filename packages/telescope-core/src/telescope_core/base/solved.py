"""When a reward counts as solved, and as within its range: comparisons but for rounding."""

REWARD_SLACK = 1e-6
"""Rounding allowed where a reward is compared, relative to numbers above 1: 0.7 + 0.2 + 0.1 is less
than 1, and a reward in float32 is up to 6e-8 from the number that was meant."""


def reward_slack(*bounds: float) -> float:
    """Return the rounding allowed where a reward is compared with `bounds`."""
    return REWARD_SLACK * max(1.0, *map(abs, bounds))


def is_solved(reward: float, threshold: float) -> bool:
    """Return whether `reward` reaches the success threshold, but for rounding."""
    return reward >= threshold - reward_slack(threshold)


def is_within(reward: float, least: float, most: float) -> bool:
    """Return whether `reward` is from `least` to `most`, but for rounding."""
    slack = reward_slack(least, most)
    return least - slack <= reward <= most + slack
