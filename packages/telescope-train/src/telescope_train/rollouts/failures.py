"""Classify failures of rollouts (environment, process, reward, endpoint, deadline); limit them."""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from telescope_core.base.errors import (
    EndpointAccessError,
    EndpointError,
    EndpointLostError,
    EnvironmentProcessError,
    ProcessDiedError,
    RewardError,
    RewardRaisedError,
    RolloutCrashError,
    TelescopeError,
)
from telescope_core.base.types import Group, Rollout, StopReason
from telescope_core.processes.replies import UnreadableReplyError
from telescope_train.inference.generation import ServerLostError

MAX_DRAWS_PER_GROUP = 32
"""Draws for one group, on average over the groups of a batch, before the run stops."""


class Boundary(StrEnum):
    """The part in which a failure occurred."""

    ENVIRONMENT = "environment"
    """Environment code raised an error."""
    REWARD = "reward"
    """A reward or metric function raised an error, or returned something that is not a number."""
    CONTEXT_LENGTH = "context_length"
    """The prompt does not fit the model's context."""
    ENDPOINT = "endpoint"
    """An inference server failed, or gave an invalid answer."""
    PROCESS = "process"
    """The environment's process died, hung or ran out of memory."""
    TIMEOUT = "timeout"
    """The rollout's deadline passed."""


BY_ERROR = {
    RewardError.__name__: Boundary.REWARD,
    RewardRaisedError.__name__: Boundary.REWARD,
    EndpointError.__name__: Boundary.ENDPOINT,
    EndpointAccessError.__name__: Boundary.ENDPOINT,
    EndpointLostError.__name__: Boundary.ENDPOINT,
    ServerLostError.__name__: Boundary.ENDPOINT,
    ProcessDiedError.__name__: Boundary.ENDPOINT,
    EnvironmentProcessError.__name__: Boundary.PROCESS,
    RolloutCrashError.__name__: Boundary.PROCESS,
    UnreadableReplyError.__name__: Boundary.PROCESS,
    MemoryError.__name__: Boundary.PROCESS,
}
"""Name of the exception at the beginning of `Rollout.error` -> boundary."""


def boundary_of(rollout: Rollout) -> Boundary:
    """Return the part in which a rollout failed."""
    if rollout.stop_reason is StopReason.TIMEOUT:
        return Boundary.TIMEOUT
    if rollout.stop_reason is StopReason.CONTEXT_LENGTH:
        return Boundary.CONTEXT_LENGTH
    name = (rollout.error or "").partition(":")[0]
    if name in BY_ERROR:
        return BY_ERROR[name]
    is_scored = rollout.tags.get("failed_in") == "reward"
    return Boundary.REWARD if is_scored else Boundary.ENVIRONMENT


def require_scored(groups: Sequence[Group]) -> None:
    """Raise TelescopeError with the most common error if every rollout of a batch failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if any(rollout.reward is not None for rollout in rollouts):
        return
    errors = Counter(rollout.error for rollout in rollouts if rollout.error is not None)
    text, count = errors.most_common(1)[0] if errors else ("no error was recorded", 0)
    raise TelescopeError(
        f"all {len(rollouts)} rollouts of a batch failed, {count} of them with: {text}. "
        "The run stops, because training on nothing hides a defect; the rollouts are in the run "
        "folder"
    )


def require_draws_left(rejected: Sequence[Group], *, batch: int, groups_per_batch: int) -> None:
    """Raise TelescopeError if the rejected groups have used up the draws of a batch."""
    num_draws = len(rejected) + groups_per_batch
    if num_draws <= MAX_DRAWS_PER_GROUP * groups_per_batch:
        return
    reasons = Counter(group.rollouts[0].status_reason for group in rejected)
    listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))
    raise TelescopeError(
        f"should_accept_fn rejected {len(rejected)} groups for the {groups_per_batch} places of "
        f"batch {batch} ({listed}): an acceptance rate of at most "
        f"{groups_per_batch / num_draws:.1%}. Loosen it, or choose examples that the model solves "
        "sometimes but not always"
    )
