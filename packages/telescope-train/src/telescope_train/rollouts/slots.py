"""Slots: how many model calls are under way at a time, and who gets the next one that is free.

A slot is held while a server works for a rollout, and no longer: tools and rewards hold none. A new
rollout begins when a slot is free for its first call and no other rollout waits to go on. So
whatever was begun ends soon, and what is open stays little.
"""

import heapq
from asyncio import CancelledError, Future, get_running_loop, shield
from itertools import count
from typing import Protocol

Priority = tuple[int, ...]
"""The lowest one gets the next slot."""


def to_begin(batch: int, position: int, index: int) -> Priority:
    """Return the priority of a rollout that has not begun: older batches first, in their order."""
    return (1, batch, position, index)


def to_go_on(batch: int, num_calls: int) -> Priority:
    """Return the priority of a later model call: the oldest batch, then the latest turn, first."""
    return (0, batch, -num_calls)


class Slots:
    """A number of slots, which may change while some are held."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Slots that may be held; more are held for a while after it was lowered."""
        self.num_held = 0
        self._waiting: list[tuple[Priority, int, Future[None]]] = []
        self._numbers = count()

    @property
    def num_waiting(self) -> int:
        """How many wait for a slot."""
        return sum(not future.done() for _, _, future in self._waiting)

    def enter_now(self) -> bool:
        """Hold a slot if one is free and nobody waits for it; returns whether it does."""
        if self.num_held >= self.limit or self.num_waiting:
            return False
        self.num_held += 1
        return True

    async def enter(self, priority: Priority) -> None:
        """Hold a slot, once one is free and nobody with a lower `priority` waits."""
        future = get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._numbers), future))
        self._wake()
        try:
            await future
        except CancelledError:
            # The slot may have been handed over at the same moment.
            if future.done() and not future.cancelled():
                self.leave()
            else:
                future.cancel()
            raise

    def leave(self) -> None:
        """Give back a slot."""
        self.num_held -= 1
        self._wake()

    def resize(self, limit: int) -> None:
        """Change how many may be held."""
        self.limit = max(1, limit)
        self._wake()

    def _wake(self) -> None:
        while self._waiting and (self._waiting[0][2].done() or self.num_held < self.limit):
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                # Counted here, so that nobody takes it before the waiting task runs.
                self.num_held += 1
                future.set_result(None)


class Holding(Protocol):
    """What a rollout enters for each model call: slots of its own, or the slot of its group."""

    def enter_now(self) -> bool:
        """Return whether the call may be made at once; it is then begun."""
        ...

    async def enter(self, priority: Priority) -> None:
        """Wait until the call may be made."""
        ...

    def leave(self) -> None:
        """End the call."""
        ...


class GroupSlot:
    """One slot for a whole group: held while any of its rollouts has entered."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._num_inside = 0
        self._entering: Future[None] | None = None

    def enter_now(self) -> bool:
        """Hold the slot that the group has, or a free one; returns whether it does."""
        if self._num_inside == 0 and (self._entering is not None or not self._slots.enter_now()):
            return False
        self._num_inside += 1
        return True

    async def enter(self, priority: Priority) -> None:
        """Wait until the group has its slot; the first to come asks for it."""
        while self._num_inside == 0:
            if self._entering is None:
                self._entering = get_running_loop().create_future()
                try:
                    await self._slots.enter(priority)
                    self._num_inside += 1
                    return
                finally:
                    # Those that waited go in, or the next of them asks if this one was canceled.
                    entering, self._entering = self._entering, None
                    entering.set_result(None)
            # Others wait for it as well: canceling one of them must not cancel all.
            await shield(self._entering)
        self._num_inside += 1

    def leave(self) -> None:
        """Give the slot back once nobody is inside."""
        self._num_inside -= 1
        if self._num_inside == 0:
            self._slots.leave()
