"""HumanEval: 164 Python functions to complete, graded in a sandbox."""

from telescope_env_telescope_humaneval.environment import HumanEval

__all__ = ["HumanEval"]
