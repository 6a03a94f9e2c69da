"""`Judge`: a model that grades what the policy wrote, for use in a reward."""

from telescope_core.models.judge import (
    Judge,
    JudgeConfig,
    JudgedEnvironment,
    JudgeVerdict,
    transcript,
)

__all__ = [
    "Judge",
    "JudgeConfig",
    "JudgeVerdict",
    "JudgedEnvironment",
    "transcript",
]
