"""Math reasoning: generated or downloaded problems, answers checked symbolically."""

from telescope_env_telescope_math_reasoning.environment import MathReasoning

__all__ = ["MathReasoning"]
