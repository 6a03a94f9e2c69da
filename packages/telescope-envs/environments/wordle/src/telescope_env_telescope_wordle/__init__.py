"""Wordle: find a hidden word from the feedback to each guess."""

from telescope_env_telescope_wordle.environment import Wordle
from telescope_env_telescope_wordle.feedback import feedback

__all__ = ["Wordle", "feedback"]
