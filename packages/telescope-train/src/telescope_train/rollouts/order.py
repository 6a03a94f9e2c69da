"""Which groups a batch is made of: `batch_order`.

`DrawnOrder`: exactly those that were drawn for it, whichever ended first.
`FinishedOrder`: whichever groups ended first, of all that are being sampled. The batch then waits
for no straggler, and so short answers are trained on earlier than long ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Protocol

from telescope_core.base.types import Group
from telescope_train.rollouts.places import Place


class BatchOrder(Protocol):
    """Chooses the places of each batch."""

    def ended(self, batch: int) -> AsyncIterator[list[Place]]:
        """Yield the places of `batch` in lists as they end, each place once."""
        ...


class DrawnOrder:
    """Each batch has the places that were drawn for it."""

    def __init__(self, places: Mapping[int, list[Place]]) -> None:
        self._places = places

    async def ended(self, batch: int) -> AsyncIterator[list[Place]]:
        """Yield the places of `batch` in lists as they end, each place once."""
        places = {_task(place): place for place in self._places[batch]}
        left = set(places)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            yield _in_order(places[task] for task in done)


class FinishedOrder:
    """Each batch has the places that ended first, and young ones only."""

    def __init__(
        self,
        places: Mapping[int, list[Place]],
        *,
        groups_per_batch: int,
        is_too_old: Callable[[Group], bool],
        play_again: Callable[[Place], None],
    ) -> None:
        self._places = places
        self._groups_per_batch = groups_per_batch
        self._is_too_old = is_too_old
        self._play_again = play_again

    async def ended(self, batch: int) -> AsyncIterator[list[Place]]:
        """Yield places in lists as they end, each place once, until there are enough."""
        chosen: set[Place] = set()
        while len(chosen) < self._groups_per_batch:
            open_places = [p for places in self._places.values() for p in places if p not in chosen]
            ready = sorted(
                (p for p in open_places if p.is_done), key=lambda place: (place.ended_s, place.key)
            )
            for place in [p for p in ready if self._is_too_old(p.group)]:
                ready.remove(place)
                self._play_again(place)
            if ready:
                found = ready[: self._groups_per_batch - len(chosen)]
                chosen.update(found)
                yield _in_order(found)
            else:
                tasks = [_task(place) for place in open_places]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _in_order(places: Iterable[Place]) -> list[Place]:
    """Return places that have ended in the order of their draws; raises what ended one of them."""
    ordered = sorted(places, key=lambda place: place.key)
    for place in ordered:
        _task(place).result()
    return ordered


def _task(place: Place) -> "asyncio.Task[Group]":
    assert place.task is not None, "the place is played"
    return place.task
