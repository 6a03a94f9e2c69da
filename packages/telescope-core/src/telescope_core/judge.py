"""`Judge`: a model that grades or ranks what the policy wrote, for use in a reward."""

from telescope_core.models.judge import (
    Judge,
    JudgeConfig,
    JudgedEnvironment,
    JudgeRanking,
    JudgeVerdict,
    RankedEnvironment,
    transcript,
)

__all__ = [
    "Judge",
    "JudgeConfig",
    "JudgeRanking",
    "JudgeVerdict",
    "JudgedEnvironment",
    "RankedEnvironment",
    "transcript",
]
