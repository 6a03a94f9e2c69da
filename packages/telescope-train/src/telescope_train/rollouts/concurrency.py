"""How many rollouts the servers work on at a time: as many as their key-value caches have room for.

A request that finds the cache full throws another one out, which is later computed again from its
first token. Too few requests leave a server idle. So the number of slots grows while there is room,
and shrinks as soon as a cache is nearly full or somebody was thrown out, or a server is lost.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from telescope_train.config.schema import TrainConfig
from telescope_train.inference.load import ServerLoad
from telescope_train.inference.pool import ServerPool
from telescope_train.rollouts.slots import Slots

GROWS_BELOW = 0.8
"""Share of the cache up to which slots are added."""
SHRINKS_ABOVE = 0.95
"""Share of the cache from which slots are taken away."""
_THROWN_OUT_ABOVE = 0.5
"""Share of the cache below which nobody was thrown out for want of room: servers count the requests
that they begin anew at a change of weights as thrown out, too."""
_FIRST_GROWTH = 1.15
"""Factor of each reading until slots are taken away for the first time."""
_GROWTH = 1.02
"""Factor of each reading from then on: the limit that was found is nearly right."""
_CUT = 0.8
READING_S = 1.0
"""Seconds from one reading to the next."""
MOST_READ = 256
"""Servers that are asked in one reading; if there are more, they take turns."""
_FIRST_SHARE = 0.25
"""Share of all slots that a run begins with: the cache fills as answers become longer."""

Reader = Callable[[], Awaitable[ServerLoad | None]]
"""Asks one server how busy it is."""
ReadAll = Callable[[Sequence[Reader]], Awaitable[Sequence[ServerLoad | None]]]


async def read_at_once(readers: Sequence[Reader]) -> Sequence[ServerLoad | None]:
    """Ask all servers at the same time."""
    return await asyncio.gather(*(reader() for reader in readers))


class SlotLimit:
    """Slots of one server, as a function of what it reports."""

    def __init__(self, most: int, *, calls_per_slot: int = 1) -> None:
        """`most`: slots that it never has more of."""
        self._most = most
        self._calls_per_slot = calls_per_slot
        self.limit = max(1, round(_FIRST_SHARE * most))
        self._growth = _FIRST_GROWTH
        self._num_preemptions: int | None = None
        self._cache_use = 0.0

    def follow(self, load: ServerLoad | None, *, is_used_up: bool) -> int:
        """Return the number of slots after one more reading.

        `load`: None = the server did not say; one that never does has all its slots.
        `is_used_up`: whether all slots are held, and more would be.
        """
        if load is None:
            self.limit = self._most if self._num_preemptions is None else self.limit
            return self.limit
        before, self._num_preemptions = self._num_preemptions, load.num_preemptions
        use_before, self._cache_use = self._cache_use, load.cache_use
        was_full = max(use_before, load.cache_use) > _THROWN_OUT_ABOVE
        was_preempted = before is not None and load.num_preemptions > before and was_full
        if load.cache_use > SHRINKS_ABOVE or was_preempted:
            # From what runs, which may be less than the slots there were.
            running = max(1, load.num_running // self._calls_per_slot)
            self.limit = max(1, int(_CUT * min(self.limit, running)))
            self._growth = _GROWTH
        elif load.cache_use < GROWS_BELOW and is_used_up:
            self.limit = min(self._most, max(self.limit + 1, round(self._growth * self.limit)))
        return self.limit


class Concurrency:
    """Sets the slots of a run: those of each server that serves, by what it reports.

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
        """`readers`: one for each server; `serves`: whether the server at that place does.

        Without `follows_load`, each server has all its slots, whatever it would report.
        """
        self._slots = slots
        self._readers = readers
        self._serves = serves
        self._follows_load = follows_load
        self._read_all = read_all
        self._share = slots.limit // len(readers)
        self._limits = [SlotLimit(self._share, calls_per_slot=calls_per_slot) for _ in readers]
        self._next = 0
        """The server that is looked at first in the next reading."""
        self._counted = [0 for _ in readers]
        """Slots of each server that are part of the sum."""
        self._sum = 0
        self._count(range(len(readers)))

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        slots: Slots,
        pool: ServerPool,
        *,
        read_all: ReadAll = read_at_once,
    ) -> "Concurrency":
        """Return what the settings ask for; from then on they bound each server of `pool`."""
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
        """Follow the servers without end."""
        while True:
            await self.read_once()
            await asyncio.sleep(READING_S)

    async def read_once(self) -> None:
        """Look at the servers whose turn it is, and set the slots."""
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
        self._count(turn)

    def _count(self, servers: Iterable[int]) -> None:
        """Bring the sum of the slots up to date for these servers."""
        for index in servers:
            limit = self._limits[index].limit if self._follows_load else self._share
            now = limit if self._serves(index) else 0
            self._sum += now - self._counted[index]
            self._counted[index] = now
        self._slots.resize(self._sum)
