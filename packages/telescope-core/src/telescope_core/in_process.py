"""`InProcessEnvironment`: play an environment in this process."""

from telescope_core.playing.in_process import (
    InProcessEnvironment,
)

__all__ = [
    "InProcessEnvironment",
]
