"""Every task of the reasoning-gym package by name."""

from telescope_env_telescope_reasoning_gym.environment import ReasoningGym

__all__ = ["ReasoningGym"]
