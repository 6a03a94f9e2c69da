"""Slots: limit the concurrent model calls, order those that wait, and adapt the limit.

A rollout holds a slot only while a server works for it; tools and rewards hold none. A new rollout
begins when a slot is free for its first call and no begun rollout waits for one. Begun rollouts
therefore end soon, and few are open. `Concurrency` adds slots while the key-value caches of the
servers have room, because too few requests leave a server idle. It takes some away when a cache is
nearly full, because a server then preempts requests and computes them again, or when a server is
lost.
"""

import asyncio
import heapq
from asyncio import CancelledError, Future, get_running_loop, shield
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import Protocol

from telescope_train.config.schema import TrainConfig
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.servers import ServerLoad

Priority = tuple[int, ...]
"""Priority for slots; the lowest one is next."""
GROWS_BELOW = 0.8
"""Share of the cache up to which slots are added."""
SHRINKS_ABOVE = 0.95
"""Share of the cache from which on slots are removed."""
_THROWN_OUT_ABOVE = 0.5
"""Share of the cache below which nobody was thrown out for want of room: servers count the requests
that they begin anew at a change of weights as thrown out, too."""
_FIRST_GROWTH = 1.15
"""Growth factor per reading until slots are removed for the first time."""
_GROWTH = 1.02
"""Growth factor per reading after that, because the limit is nearly right."""
_CUT = 0.8
READING_S = 1.0
"""Seconds between readings."""
MOST_READ = 256
"""Most servers per reading; with more, they take turns."""
_FIRST_SHARE = 0.25
"""Share of all slots at the start of a run; the cache fills as answers become longer."""

Reader = Callable[[], Awaitable[ServerLoad | None]]
"""Asks one server for its load."""
ReadAll = Callable[[Sequence[Reader]], Awaitable[Sequence[ServerLoad | None]]]


async def read_at_once(readers: Sequence[Reader]) -> Sequence[ServerLoad | None]:
    """Ask all servers at the same time."""
    return await asyncio.gather(*(reader() for reader in readers))


def to_begin(batch: int, position: int, index: int) -> Priority:
    """Return the priority of a rollout that has not begun: older batches first, in order."""
    return (1, batch, position, index)


def to_go_on(batch: int, num_calls: int) -> Priority:
    """Return the priority of a later model call: the oldest batch, then the latest turn, first."""
    return (0, batch, -num_calls)


class Slots:
    """A number of slots, which may change while some are held."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Most slots that may be held; more may be held for a while after it was lowered."""
        self.num_held = 0
        self.num_thrown_out = 0
        """Requests that lost their place in a full key-value cache so far, as far as is known."""
        self._waiting: list[tuple[Priority, int, Future[None]]] = []
        self._numbers = count()

    @property
    def num_waiting(self) -> int:
        """Number of waiters for a slot."""
        return sum(not future.done() for _, _, future in self._waiting)

    def enter_now(self) -> bool:
        """Take a slot if one is free and nobody waits for it; returns whether it did."""
        if self.num_held >= self.limit or self.num_waiting:
            return False
        self.num_held += 1
        return True

    async def enter(self, priority: Priority) -> None:
        """Take a slot, once one is free and nobody with a lower `priority` waits."""
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
        """Release a slot."""
        self.num_held -= 1
        self._wake()

    def resize(self, limit: int) -> None:
        """Change the number of slots."""
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
    """Slots for the model calls of a rollout: single ones, or one for its group."""

    def enter_now(self) -> bool:
        """Start the call if it may be made at once; returns whether it was started."""
        ...

    async def enter(self, priority: Priority) -> None:
        """Wait until the call may be made."""
        ...

    def leave(self) -> None:
        """End the call."""
        ...


class GroupSlot:
    """One slot for a whole group, held while any of its rollouts has entered."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._num_inside = 0
        self._entering: Future[None] | None = None

    def enter_now(self) -> bool:
        """Take the slot that the group has, or a free one; returns whether it did."""
        if self._num_inside == 0 and (self._entering is not None or not self._slots.enter_now()):
            return False
        self._num_inside += 1
        return True

    async def enter(self, priority: Priority) -> None:
        """Wait until the group has its slot; the first caller requests it."""
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
        """Release the slot when no rollout is inside."""
        self._num_inside -= 1
        if self._num_inside == 0:
            self._slots.leave()


class SlotLimit:
    """The number of slots of one server, as a function of its reported load."""

    def __init__(self, most: int, *, calls_per_slot: int = 1) -> None:
        """`most`: largest number of slots."""
        self._most = most
        self._calls_per_slot = calls_per_slot
        self.limit = max(1, round(_FIRST_SHARE * most))
        self.num_thrown_out = 0
        """Requests that lost their place in a full cache so far."""
        self._growth = _FIRST_GROWTH
        self._num_preemptions: int | None = None
        self._cache_use = 0.0

    def follow(self, load: ServerLoad | None, *, is_used_up: bool) -> int:
        """Return the number of slots after another reading.

        `load`: None if the server did not report it; a server that never does has all its slots.
        `is_used_up`: whether all slots are held and more are wanted.
        """
        if load is None:
            self.limit = self._most if self._num_preemptions is None else self.limit
            return self.limit
        before, self._num_preemptions = self._num_preemptions, load.num_preemptions
        use_before, self._cache_use = self._cache_use, load.cache_use
        was_full = max(use_before, load.cache_use) > _THROWN_OUT_ABOVE
        num_new = load.num_preemptions - (load.num_preemptions if before is None else before)
        # A server that was started again counts from zero.
        num_new = max(0, num_new) if was_full else 0
        self.num_thrown_out += num_new
        if load.cache_use > SHRINKS_ABOVE or num_new:
            # From what runs, which may be less than the slots there were.
            running = max(1, load.num_running // self._calls_per_slot)
            self.limit = max(1, int(_CUT * min(self.limit, running)))
            self._growth = _GROWTH
        elif load.cache_use < GROWS_BELOW and is_used_up:
            self.limit = min(self._most, max(self.limit + 1, round(self._growth * self.limit)))
        return self.limit


class Concurrency:
    """Sets the slots of a run: the sum over servers that serve, by their reported loads.

    A server that is lost takes its slots with it until it comes back. The others would else be
    given its share, too, beyond what one server may work for at a time.
    """

    def __init__(
        self,
        slots: Slots,
        readers: Sequence[Reader],
        *,
        serves: Callable[[int], bool] = lambda index: True,
        follows_load: bool = True,
        calls_per_slot: int = 1,
        read_all: ReadAll = read_at_once,
    ) -> None:
        """`readers`: one per server; `serves`: whether the server at that index serves.

        Without `follows_load`, each server has all its slots, whatever load it reports.
        """
        self._slots = slots
        self._readers = readers
        self._serves = serves
        self._follows_load = follows_load
        self._read_all = read_all
        self._share = slots.limit // len(readers)
        self._limits = [SlotLimit(self._share, calls_per_slot=calls_per_slot) for _ in readers]
        self._next = 0
        """Index of the server that is first in the next reading."""
        self._counted = [0 for _ in readers]
        """Slots of each server that are part of the sum."""
        self._sum = 0
        self._count(range(len(readers)))

    @classmethod
    def from_config(
        cls,
        config: TrainConfig,
        slots: Slots,
        pool: ServerPool,
        *,
        read_all: ReadAll = read_at_once,
    ) -> "Concurrency":
        """Return the slots for these settings, which limit each server of `pool` from then on."""
        section, servers = config.scheduling, pool.servers
        pool.limit(section.max_concurrent_prompts_per_server * config.largest_group)
        return cls(
            slots,
            [server.client.load for server in servers],
            serves=lambda index: servers[index].takes_requests,
            follows_load=section.follow_kv_cache_use,
            calls_per_slot=1 if section.enable_individual_sample_lanes else config.largest_group,
            read_all=read_all,
        )

    async def run(self) -> None:
        """Read the servers repeatedly."""
        while True:
            await self.read_once()
            await asyncio.sleep(READING_S)

    async def read_once(self) -> None:
        """Read the servers whose turn it is, and set the slots."""
        turn = range(self._next, min(self._next + MOST_READ, len(self._readers)))
        self._next = turn.stop if turn.stop < len(self._readers) else 0
        # Before anybody is asked: an answer may take seconds.
        self._count(turn)
        if not self._follows_load:
            return
        asked = [index for index in turn if self._serves(index)]
        loads = await self._read_all([self._readers[index] for index in asked])
        is_used_up = self._slots.num_waiting > 0
        for index, load in zip(asked, loads, strict=True):
            self._limits[index].follow(load, is_used_up=is_used_up)
        self._slots.num_thrown_out = sum(one.num_thrown_out for one in self._limits)
        self._count(turn)

    def _count(self, servers: Iterable[int]) -> None:
        """Update the sum of the slots for these servers."""
        for index in servers:
            limit = self._limits[index].limit if self._follows_load else self._share
            now = limit if self._serves(index) else 0
            self._sum += now - self._counted[index]
            self._counted[index] = now
        self._slots.resize(self._sum)
