"""Which groups a batch is made of: `batch_order`.

`DrawnOrder`: exactly those that were drawn for it, whichever ended first.
`FinishedOrder`: whichever groups ended first, of all that are being sampled. The batch then waits
for no straggler, and so short answers are trained on earlier than long ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Protocol

from telescope_core.base.types import Group
from telescope_train.rollouts.pending_groups import PendingGroup


class BatchOrder(Protocol):
    """Chooses the places of each batch."""

    def ended(self, batch: int) -> AsyncIterator[list[PendingGroup]]:
        """Yield the places of `batch` in lists as they end, each place once."""
        ...


class DrawnOrder:
    """Each batch has the places that were drawn for it."""

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
    """Each batch has the places that ended first, and young ones only."""

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
                key=lambda pending: (pending.ended_s, pending.key),
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
    """Return places that have ended in the order of their draws; raises what ended one of them."""
    ordered = sorted(pending_groups, key=lambda pending: pending.key)
    for pending in ordered:
        _task(pending).result()
    return ordered


def _task(pending: PendingGroup) -> "asyncio.Task[Group]":
    assert pending.task is not None, "the place is played"
    return pending.task
