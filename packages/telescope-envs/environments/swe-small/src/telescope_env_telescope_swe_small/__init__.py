"""SWE small: tiny repositories with a planted bug to find and fix."""

from telescope_env_telescope_swe_small.environment import SweSmall

__all__ = ["SweSmall"]
