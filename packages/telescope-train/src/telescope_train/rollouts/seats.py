"""Seats: the attempts that are being played, and what each of their model calls waits for.

`SeatedPool` is what policies ask. A call of an attempt with a seat waits for a slot and is noted in
the attempt's life; any other call, such as one of an eval, goes straight to the servers.
"""

from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from telescope_core.base.types import Sampling, WeightVersion
from telescope_core.records.events import EventSink
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.generation import Generation
from telescope_train.inference.pool import ServerPool, Turn
from telescope_train.observability.calls import UNRECORDED_CALLS, Caller, CallLog
from telescope_train.rollouts.slots import GroupSlot, Holding, Priority, Slots, to_go_on
from telescope_train.rollouts.stages import AttemptKey, AttemptLife

OPEN_PER_SLOT = 4
"""Rollouts that may be open for each slot; all but those in the slots are with environments."""

OnSent = Callable[[str, WeightVersion], None]
"""Gets the address of the server and the live weights, when a call is sent there."""


class Seats:
    """Who is being played, over all servers."""

    def __init__(
        self,
        num_slots: int,
        log: EventSink,
        *,
        calls: CallLog = UNRECORDED_CALLS,
        max_open: int | None = None,
        a_slot_per_group: bool = False,
        until_end: bool = False,
    ) -> None:
        """`until_end`: a slot is held until the rollout has ended, or its group.

        `max_open`: rollouts that may be open; None = `OPEN_PER_SLOT` for each slot.
        """
        self.slots = Slots(num_slots)
        self.log = log
        self.calls = calls
        self.until_end = until_end
        self._a_slot_per_group = a_slot_per_group
        self._open = Slots(OPEN_PER_SLOT * num_slots if max_open is None else max_open)
        self._taken: dict[str, Seat] = {}

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        log: EventSink,
        *,
        num_servers: int,
        calls: CallLog = UNRECORDED_CALLS,
    ) -> "Seats":
        """Return the seats that the settings ask for."""
        section = config.scheduling
        num_groups = section.max_concurrent_prompts_per_server * num_servers
        group_size = config.largest_group
        a_slot_per_group = not section.enable_individual_sample_lanes
        max_open = section.max_open_rollouts
        if max_open is None:
            max_open = OPEN_PER_SLOT * num_groups * group_size
        return cls(
            num_groups if a_slot_per_group else num_groups * group_size,
            log,
            calls=calls,
            # A group that has its slot has to get all of its rollouts in.
            max_open=max(max_open, group_size) if a_slot_per_group else max_open,
            a_slot_per_group=a_slot_per_group,
            until_end=not section.free_lane_after_generation,
        )

    @property
    def num_playing(self) -> int:
        """Attempts that have begun."""
        return len(self._taken)

    @property
    def num_waiting(self) -> int:
        """Attempts and calls that wait for a slot, or to be opened."""
        return self.slots.num_waiting + self._open.num_waiting

    def for_group(self) -> Holding:
        """Return what the rollouts of one group enter."""
        return GroupSlot(self.slots) if self._a_slot_per_group else self.slots

    @asynccontextmanager
    async def taken(
        self, rollout_id: str, key: AttemptKey, holding: Holding, priority: Priority
    ) -> "AsyncIterator[Seat]":
        """Wait for a slot, and hold the seat of this attempt."""
        life = AttemptLife(key, self.log.add)
        seat = Seat(life, holding, until_end=self.until_end)
        try:
            life.waits_to_begin()
            await self._open.enter(priority)
            try:
                await holding.enter(priority)
                seat.has_slot = True
                life.begins()
                self._taken[rollout_id] = seat
                yield seat
            finally:
                if self._taken.get(rollout_id) is seat:
                    del self._taken[rollout_id]
                seat.close()
                self._open.leave()
        except CancelledError:
            life.is_cancelled(seat.reason)
            raise
        except Exception as error:
            life.fails(type(error).__name__)
            raise

    def seat_of(self, rollout_id: str) -> "Seat | None":
        """Return the seat of the attempt at this rollout; None if it has none."""
        return self._taken.get(rollout_id)


class Seat:
    """One attempt that is being played."""

    def __init__(self, life: AttemptLife, holding: Holding, *, until_end: bool) -> None:
        self.life = life
        self.reason = "cancelled"
        """Why it is canceled, if it is."""
        self.has_slot = False
        """Whether it holds a slot outside its calls: for its first one, or all the time."""
        self._holding = holding
        self._until_end = until_end

    @asynccontextmanager
    async def call(self) -> AsyncIterator[OnSent]:
        """Wait for a slot and hold it for one model call; yields what to tell where it is sent."""
        life, is_sent = self.life, False

        def sent(server: str, version: WeightVersion) -> None:
            nonlocal is_sent
            (life.goes_on if is_sent else life.is_sent)(server, version)
            is_sent = True

        await self._enter()
        try:
            yield sent
        finally:
            if is_sent:
                life.is_answered()
            if not self._until_end:
                self._holding.leave()

    @property
    def caller(self) -> Caller:
        """The call that is about to be sent."""
        key = self.life.key
        return Caller(
            environment=key.environment,
            group_id=key.group_id,
            index=key.index,
            attempt=key.attempt,
            call=self.life.num_calls + 1,
            step=key.step,
        )

    def close(self) -> None:
        """Give back the slot that is held outside calls."""
        if self.has_slot:
            self.has_slot = False
            self._holding.leave()

    async def _enter(self) -> None:
        if self.has_slot:
            self.has_slot = self._until_end
            return
        if self._holding.enter_now():
            return
        step = self.life.key.step
        self.life.waits()
        try:
            await self._holding.enter(to_go_on(step, self.life.num_calls))
        finally:
            self.life.no_longer_waits()


class SeatedPool:
    """The servers, as the policy of one rollout sees them; see `RolloutServers`."""

    def __init__(self, pool: ServerPool, seats: Seats, rollout_id: str) -> None:
        self._pool = pool
        self._seats = seats
        self._rollout_id = rollout_id

    @property
    def is_down(self) -> bool:
        """Whether no server takes requests now."""
        return self._pool.is_down

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        group_id: str,
        priority: int = 0,
    ) -> Generation:
        """Sample one continuation, once there is a slot for it."""
        seat = self._seats.seat_of(self._rollout_id)
        if seat is None:
            return await self._pool.generate(
                prompt_ids,
                sampling,
                stop_token_ids=stop_token_ids,
                group_id=group_id,
                priority=priority,
            )
        async with seat.call() as sent:
            return await self._pool.generate(
                prompt_ids,
                sampling,
                stop_token_ids=stop_token_ids,
                group_id=group_id,
                priority=priority,
                turn=Turn(self._rollout_id, seat.life.key.step),
                watching=self._seats.calls.watching(seat.caller, sent),
            )
