"""Countdown: reach a target from given numbers."""

from telescope_env_telescope_countdown.environment import Countdown

__all__ = ["Countdown"]
