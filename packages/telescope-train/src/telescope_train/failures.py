"""At which boundary a rollout failed: environment, its process, reward, endpoint, or deadline."""

from enum import StrEnum

from telescope_core.errors import (
    EndpointError,
    EnvironmentProcessError,
    ProcessDiedError,
    RewardError,
)
from telescope_core.types import Rollout, StopReason


class Boundary(StrEnum):
    """Whose doing a failure was."""

    ENVIRONMENT = "environment"
    """Environment code raised, or its settings leave no room for a turn."""
    REWARD = "reward"
    """A reward or metric function raised, or gave something that is no number."""
    ENDPOINT = "endpoint"
    """An inference server did not answer as it must."""
    PROCESS = "process"
    """The environment's process died, hung or ran out of memory."""
    TIMEOUT = "timeout"
    """The rollout's deadline passed."""


BY_ERROR = {
    RewardError.__name__: Boundary.REWARD,
    EndpointError.__name__: Boundary.ENDPOINT,
    ProcessDiedError.__name__: Boundary.ENDPOINT,
    EnvironmentProcessError.__name__: Boundary.PROCESS,
    MemoryError.__name__: Boundary.PROCESS,
}
"""Name of the exception, which opens `Rollout.error`, -> boundary."""


def boundary_of(rollout: Rollout) -> Boundary:
    """Return where a failed rollout failed."""
    if rollout.stop_reason is StopReason.TIMEOUT:
        return Boundary.TIMEOUT
    name = (rollout.error or "").partition(":")[0]
    if name in BY_ERROR:
        return BY_ERROR[name]
    is_scored = rollout.tags.get("failed_in") == "reward"
    return Boundary.REWARD if is_scored else Boundary.ENVIRONMENT
