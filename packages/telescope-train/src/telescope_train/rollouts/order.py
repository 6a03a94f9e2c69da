"""The pending groups of batches, and the choice of groups for a batch.

`batch_order` decides. `DrawnOrder`: exactly those that were drawn for the batch, whichever ended
first. `FinishedOrder`: whichever ended first, of all that are sampled. The batch then waits for no
straggler, and so short answers are trained on earlier than long ones.
"""

import asyncio
from asyncio import Task
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from telescope_core.base.types import Group, Rollout, RolloutStatus, WeightVersion
from telescope_train.rollouts.draw import Drawn
from telescope_train.rollouts.failures import Boundary
from telescope_train.rollouts.held_out import Cleared
from telescope_train.rollouts.sampled import ReadyGroup

OFF_POLICY = "off_policy"
"""Reason of attempts that were stopped because their weights had become too old."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingGroup:
    """One place of a batch, with its draw or the replacement of a rejected one."""

    batch: int
    """Number of the batch, 0 first."""
    position: int
    """Position in the batch."""
    drawn: Drawn
    """The draw in order."""
    playing: Cleared | None = None
    """The draw that is played now; None = it is not known yet."""
    num_draws: int = 1
    """Number of draws: that in order, and its replacements."""
    rejected: list[Group] = field(default_factory=list[Group])
    replaced: list[Rollout] = field(default_factory=list[Rollout])
    """Attempts that were played again, in the order of their ends."""
    ended: list[Rollout] = field(default_factory=list[Rollout])
    """Attempts that were not played again, or ended with the run."""
    failed: Counter[Boundary] = field(default_factory=Counter[Boundary])
    """Failed attempts by cause."""
    ended_s: float | None = None
    """Time at which its group was accepted, on the clock of the event loop; None = not yet, or
    before a restore."""
    task: Task[Group] | None = None
    """Task that plays until a group is accepted, and returns it."""

    @property
    def key(self) -> tuple[int, int]:
        """Batch and position, which sort places in the order of the draws."""
        return self.batch, self.position

    @property
    def group_id(self) -> str:
        """Id of the group that is played there now."""
        return self.id_of_draw(self.num_draws)

    def id_of_draw(self, number: int) -> str:
        """Return the id of a group, with the number of the draw in its place, 1 first."""
        first = f"{self.batch}.{self.position}"
        return first if number == 1 else f"{first}-{number}"

    @property
    def is_done(self) -> bool:
        """Whether its group was accepted."""
        return self.task is not None and self.task.done()

    @property
    def group(self) -> Group:
        """The accepted group, if it `is_done`; raises the error of the task, if it failed."""
        assert self.task is not None, "the place is not played yet"
        return self.task.result()

    def ready(self) -> ReadyGroup:
        """Return the content for a checkpoint of a place that `is_done`."""
        return ReadyGroup(
            group=self.group,
            rejected=tuple(self.rejected),
            replaced=tuple(self.replaced),
            failed=dict(self.failed),
            num_draws=self.num_draws,
        )

    def take_over(self, ready: ReadyGroup) -> None:
        """Restore the content from a checkpoint."""
        self.rejected += ready.rejected
        self.replaced += ready.replaced
        self.ended += ready.group.rollouts
        self.failed.update(ready.failed)
        self.num_draws = ready.num_draws

    def give_up(self) -> None:
        """Mark the accepted group to be played again, with newer weights."""
        group = self.group
        self.replaced += map(off_policy, group.rollouts)
        self.ended = [one for one in self.ended if one.group_id != group.id]

    def unused(self) -> list[Rollout]:
        """Return every attempt of a place that no step was trained on, at the end of the run."""
        return [*self.replaced, *map(_unused, self.ended)]


def oldest_version(rollout: Rollout) -> WeightVersion | None:
    """Return the oldest weights that sampled any token; None if nothing was sampled."""
    return min((turn.completion.oldest_version for turn in rollout.turns), default=None)


def off_policy(rollout: Rollout) -> Rollout:
    """Return a finished rollout marked as to be played again with newer weights."""
    return replace(rollout, status=RolloutStatus.CANCELLED, status_reason=OFF_POLICY)


def by_draw(groups: Iterable[Group]) -> list[Group]:
    """Return groups by place and draw, independent of the order in which they ended."""
    return sorted(groups, key=lambda group: [int(n) for n in group.id.replace("-", ".").split(".")])


def _unused(rollout: Rollout) -> Rollout:
    if rollout.status is not RolloutStatus.KEPT:
        return rollout
    return replace(rollout, status=RolloutStatus.DISCARDED, status_reason="run_ended")


class BatchOrder(Protocol):
    """Chooses the places of each batch."""

    def ended(self, batch: int) -> AsyncIterator[list[PendingGroup]]:
        """Yield the places of `batch` in lists as they end, each place once."""
        ...


class DrawnOrder:
    """Gives each batch the places that were drawn for it."""

    def __init__(self, pending_groups: Mapping[int, list[PendingGroup]]) -> None:
        self._pending = pending_groups

    async def ended(self, batch: int) -> AsyncIterator[list[PendingGroup]]:
        """Yield the places of `batch` in lists as they end, each place once."""
        pending_groups = {_task(pending): pending for pending in self._pending[batch]}
        left = set(pending_groups)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            yield _in_order(pending_groups[task] for task in done)


class FinishedOrder:
    """Gives each batch the places that ended first, if they are not too old."""

    def __init__(
        self,
        pending_groups: Mapping[int, list[PendingGroup]],
        *,
        groups_per_batch: int,
        is_too_old: Callable[[Group], bool],
        play_again: Callable[[PendingGroup], None],
    ) -> None:
        self._pending = pending_groups
        self._groups_per_batch = groups_per_batch
        self._is_too_old = is_too_old
        self._play_again = play_again

    async def ended(self, batch: int) -> AsyncIterator[list[PendingGroup]]:
        """Yield places in lists as they end, each place once, until there are enough."""
        chosen: set[PendingGroup] = set()
        while len(chosen) < self._groups_per_batch:
            open_places = [
                p
                for pending_groups in self._pending.values()
                for p in pending_groups
                if p not in chosen
            ]
            ready = sorted(
                (p for p in open_places if p.is_done),
                key=lambda pending: (pending.ended_s or 0.0, pending.key),
            )
            for pending in [p for p in ready if self._is_too_old(p.group)]:
                ready.remove(pending)
                self._play_again(pending)
            if ready:
                found = ready[: self._groups_per_batch - len(chosen)]
                chosen.update(found)
                yield _in_order(found)
            else:
                tasks = [_task(pending) for pending in open_places]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _in_order(pending_groups: Iterable[PendingGroup]) -> list[PendingGroup]:
    """Return ended places in the order of their draws; raises the error of one that failed."""
    ordered = sorted(pending_groups, key=lambda pending: pending.key)
    for pending in ordered:
        _task(pending).result()
    return ordered


def _task(pending: PendingGroup) -> "asyncio.Task[Group]":
    assert pending.task is not None, "the place is played"
    return pending.task
