"""Record the rollouts of a step in the run folder, each with its outcome, and other attempts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from telescope_core.base.types import Group, JsonValue, Rollout, RolloutStatus
from telescope_core.records import RolloutRow, row_of
from telescope_core.records.token_facts import TurnFacts
from telescope_train.step.credit import Credit


class StepRecords(Protocol):
    """Receives the rows of a run: `telescope_core.records.RunFolder`."""

    def log_metrics(self, row: Mapping[str, JsonValue]) -> None:
        """Add one row of metrics."""
        ...

    def write_rollouts(self, step: int, rows: Iterable[RolloutRow]) -> Any:
        """Write the rollouts of one step."""
        ...

    def write_token_facts(self, step: int, rows: Iterable[TurnFacts]) -> Any:
        """Write the facts about the tokens of one step."""
        ...

    def write_attempts(self, step: int, rows: Iterable[RolloutRow]) -> Any:
        """Write the attempts at rollouts of one step that are not among its rollouts."""
        ...


def record_rollouts(
    folder: StepRecords, step: int, groups: Sequence[Group], credit: Credit
) -> None:
    """Write all rollouts of a step; those that were not trained on are marked as discarded."""
    # One row at a time: what the file holds of a step is copied in parts.
    rows = (
        row_of(
            _marked(rollout, credit),
            step=step,
            advantage=credit.advantages.get((group.id, rollout.index)),
            with_tokens=True,
        )
        for group in groups
        for rollout in group.rollouts
    )
    folder.write_rollouts(step, rows)


def record_attempts(folder: StepRecords, step: int, attempts: Sequence[Rollout]) -> None:
    """Write attempts that are not rollouts of a step: replaced, or cut short by the run's end."""
    if attempts:
        folder.write_attempts(step, (row_of(one, step=step, with_tokens=True) for one in attempts))


def record_unfinished(folder: StepRecords, left: Mapping[int, Sequence[Rollout]]) -> None:
    """Write the rollouts of untrained batches, by the number of the batch."""
    for batch, attempts in left.items():
        record_attempts(folder, batch + 1, attempts)


def _marked(rollout: Rollout, credit: Credit) -> Rollout:
    key = rollout.group_id, rollout.index
    reason = credit.filtered.get(key) or credit.discarded.get(rollout.group_id)
    if reason is None or rollout.status is not RolloutStatus.KEPT:
        return rollout
    return replace(rollout, status=RolloutStatus.DISCARDED, status_reason=str(reason))
