"""Learning-rate schedules as a pure function of the step."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    step: int,
    schedule: Schedule,
    *,
    warmup_steps: int,
    number_of_steps: int,
    min_lr_ratio: float,
) -> float:
    """Return the factor of `learning_rate` at `step` (from 0).

    Warmup rises linearly from above 0 and reaches 1 at step `warmup_steps - 1`. Decay then falls
    from 1 to `min_lr_ratio` over the remaining steps.
    """
    if schedule == "none":
        return 1.0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, number_of_steps - warmup_steps))
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining
