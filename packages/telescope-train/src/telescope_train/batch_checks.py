"""When sampling a batch cannot go on: nothing was scored, or next to nothing is accepted."""

from collections import Counter
from collections.abc import Sequence

from telescope_core.errors import TelescopeError
from telescope_core.types import Group

MAX_DRAWS_PER_GROUP = 32
"""Draws for one group of a batch, on average over its groups, before acceptance is hopeless."""


def require_scored(groups: Sequence[Group]) -> None:
    """Raise TelescopeError with the commonest error when every rollout of a batch failed."""
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
    """Raise TelescopeError when the groups rejected so far use up the draws of a batch."""
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
