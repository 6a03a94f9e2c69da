"""Attempts at rollouts: their stages, recorded as events, and waiting for slots.

    drawn -> waiting -> environment -> scoring -> done
                           |    ^
                           v    |
                 waiting -> generating        cancelled and failed from anywhere but an end

`playing` makes them, and another one after a failure. A program in an environment may ask the model
several things at once: the attempt is `generating` while any server works for it, and `waiting`
while it only waits. A reward may ask, too, and the attempt stays `scoring` then. Policies ask
`LimitedPool`: a call of a running attempt waits for a slot, any other, as of an eval, does not.
"""

import asyncio
from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from telescope_core.base.types import Rollout, RolloutStatus, WeightVersion
from telescope_core.records.events import AttemptEvent, EventSink, Stage
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.generation import Generation, QueuePosition, Request
from telescope_train.inference.pool import ServerPool
from telescope_train.observability.calls import UNRECORDED_CALLS, Caller, CallLog
from telescope_train.rollouts.slots import GroupSlot, Holding, Priority, Slots, to_go_on

OPEN_PER_SLOT = 4
"""Open rollouts per slot; those without a slot are with environments."""

OnSent = Callable[[str, WeightVersion], None]
"""Called with the address of the server and the live weights when a call is sent there."""
_ENDS = frozenset({Stage.DONE, Stage.CANCELLED, Stage.FAILED})
# Another call may begin while one is under way, and a deadline may end all of them.
_FROM_PLAY = frozenset({Stage.WAITING, Stage.GENERATING, Stage.ENVIRONMENT, Stage.SCORING})
_NEXT = {
    Stage.DRAWN: frozenset({Stage.WAITING}),
    Stage.WAITING: _FROM_PLAY,
    Stage.GENERATING: _FROM_PLAY,
    Stage.ENVIRONMENT: _FROM_PLAY,
    Stage.SCORING: frozenset({Stage.WAITING, Stage.GENERATING, Stage.DONE}),
}
"""Stage -> possible next stages, besides `cancelled` and `failed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptKey:
    """Identifies an attempt."""

    step: int
    """The step for whose batch it was drawn."""
    environment: str
    group_id: str
    index: int
    attempt: int


class AttemptStages:
    """The stages of one attempt; each change goes to `log`."""

    def __init__(self, key: AttemptKey, log: Callable[[AttemptEvent], None]) -> None:
        self.key = key
        self.stage = Stage.DRAWN
        self.oldest_version: WeightVersion | None = None
        """The live weights when the first model call was sent; None = there was none."""
        self.num_calls = 0
        """Number of model calls that were sent."""
        self._log = log
        self._num_waiting = 0
        self._num_generating = 0
        self._is_scored = False
        self._last_s = 0.0
        self._emit(Stage.DRAWN)

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended, in any way."""
        return self.stage in _ENDS

    def waits_to_begin(self) -> None:
        """Record that the attempt waits for its first slot."""
        self._move(Stage.WAITING)

    def begins(self) -> None:
        """Record that the environment begins to play it."""
        self._move(Stage.ENVIRONMENT)

    def waits(self) -> None:
        """Record that a model call waits for a slot."""
        self._num_waiting += 1
        self._settle()

    def no_longer_waits(self) -> None:
        """Record that the call has its slot, or was canceled before it had one."""
        self._num_waiting -= 1

    def is_sent(self, server: str, version: WeightVersion) -> None:
        """Record that a model call was sent to `server`, with the live weights `version`."""
        self._num_generating += 1
        self.num_calls += 1
        self.goes_on(server, version)

    def goes_on(self, server: str, version: WeightVersion) -> None:
        """Record that the latest call continues at `server`."""
        if self.oldest_version is None:
            self.oldest_version = version
        if not self.is_over:
            self._move(Stage.GENERATING, call=self.num_calls, server=server, version=version)

    def is_answered(self) -> None:
        """Record that a model call ended, with or without an answer."""
        self._num_generating -= 1
        self._settle()

    def is_scored(self) -> None:
        """Record that scoring begins; has no effect if the attempt has ended."""
        self._is_scored = True
        self._settle()

    def ends(self, rollout: Rollout) -> None:
        """Record that the environment returned `rollout`."""
        has_score = rollout.status not in (RolloutStatus.FAILED, RolloutStatus.CANCELLED)
        if has_score or rollout.tags.get("failed_in") == "reward":
            self._was_scored(rollout.score_s)
        if rollout.status is RolloutStatus.FAILED:
            self._move(Stage.FAILED, reason=rollout.status_reason or rollout.stop_reason)
        elif rollout.status is RolloutStatus.CANCELLED:
            self._move(Stage.CANCELLED, reason=rollout.status_reason)
        else:
            self._move(Stage.DONE)

    def is_cancelled(self, reason: str) -> None:
        """Record that it was stopped for `reason`; has no effect if it has ended."""
        if not self.is_over:
            self._move(Stage.CANCELLED, reason=reason)

    def fails(self, reason: str) -> None:
        """Record that playing it raised an error; has no effect if it has ended."""
        if not self.is_over:
            self._move(Stage.FAILED, reason=reason)

    def _was_scored(self, score_s: float) -> None:
        """Record the scoring of an attempt that ends now; `score_s`: its duration.

        If an environment does not report when scoring begins, the scoring is known only now.
        """
        if self.stage is not Stage.SCORING:
            # When it began is what the environment told, if a call of its own goes on until now.
            self._move(Stage.SCORING, ago_s=0.0 if self._is_scored else score_s)

    def _settle(self) -> None:
        """Change to the stage that follows from the running calls."""
        # A call may end after its attempt, when both are canceled.
        if self.is_over or self._num_generating:
            return
        at_rest = Stage.SCORING if self._is_scored else Stage.ENVIRONMENT
        stage = Stage.WAITING if self._num_waiting else at_rest
        if stage is not self.stage:
            self._move(stage)

    def _move(self, stage: Stage, *, ago_s: float = 0.0, **detail: Any) -> None:
        """Change to `stage`; `detail`: further facts about some stages, see `AttemptEvent`."""
        if stage in (Stage.CANCELLED, Stage.FAILED):
            is_allowed = not self.is_over
        else:
            is_allowed = stage in _NEXT.get(self.stage, frozenset())
        assert is_allowed, f"an attempt went from {self.stage} to {stage}: {self.key}"
        self.stage = stage
        self._emit(stage, ago_s=ago_s, **detail)

    def _emit(self, stage: Stage, *, ago_s: float = 0.0, **detail: Any) -> None:
        # Events of one attempt are in order, also where a duration is rounded.
        self._last_s = max(self._last_s, asyncio.get_running_loop().time() - ago_s)
        key = self.key
        self._log(
            AttemptEvent(
                time_s=self._last_s,
                step=key.step,
                environment=key.environment,
                group_id=key.group_id,
                index=key.index,
                attempt=key.attempt,
                stage=stage,
                **detail,
            )
        )


class Attempts:
    """The running attempts, over all servers."""

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
        self._running: dict[str, Attempt] = {}

    @classmethod
    def from_config(
        cls,
        config: TrainConfig,
        log: EventSink,
        *,
        num_servers: int,
        calls: CallLog = UNRECORDED_CALLS,
    ) -> "Attempts":
        """Return the attempts of a run with these settings, before it plays any."""
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
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of attempts and calls that wait for a slot, or to be opened."""
        return self.slots.num_waiting + self._open.num_waiting

    def for_group(self) -> Holding:
        """Return the slots for the rollouts of one group."""
        return GroupSlot(self.slots) if self._a_slot_per_group else self.slots

    @asynccontextmanager
    async def running(
        self, rollout_id: str, key: AttemptKey, holding: Holding, priority: Priority
    ) -> "AsyncIterator[Attempt]":
        """Wait for a slot, and count this attempt as running within the context."""
        stages = AttemptStages(key, self.log.add)
        attempt = Attempt(stages, holding, until_end=self.until_end)
        try:
            stages.waits_to_begin()
            await self._open.enter(priority)
            try:
                await holding.enter(priority)
                attempt.has_slot = True
                stages.begins()
                self._running[rollout_id] = attempt
                yield attempt
            finally:
                if self._running.get(rollout_id) is attempt:
                    del self._running[rollout_id]
                attempt.close()
                self._open.leave()
        except CancelledError:
            stages.is_cancelled(attempt.reason)
            raise
        except Exception as error:
            stages.fails(type(error).__name__)
            raise

    def of_rollout(self, rollout_id: str) -> "Attempt | None":
        """Return the running attempt at this rollout; None if there is none."""
        return self._running.get(rollout_id)


class Attempt:
    """One running attempt."""

    def __init__(self, stages: AttemptStages, holding: Holding, *, until_end: bool) -> None:
        self.stages = stages
        self.reason = "cancelled"
        """The reason for its cancellation; empty if there was none."""
        self.has_slot = False
        """Whether it holds a slot outside its calls: before its first one, or all the time."""
        self._holding = holding
        self._until_end = until_end

    @asynccontextmanager
    async def call(self) -> AsyncIterator[OnSent]:
        """Wait for a slot and hold it for one model call; yields a callback for the sending."""
        stages, is_sent = self.stages, False

        def sent(server: str, version: WeightVersion) -> None:
            nonlocal is_sent
            (stages.goes_on if is_sent else stages.is_sent)(server, version)
            is_sent = True

        await self._enter()
        try:
            yield sent
        finally:
            if is_sent:
                stages.is_answered()
            if not self._until_end:
                self._holding.leave()

    @property
    def caller(self) -> Caller:
        """The call that is about to be sent."""
        key = self.stages.key
        return Caller(
            environment=key.environment,
            group_id=key.group_id,
            index=key.index,
            attempt=key.attempt,
            call=self.stages.num_calls + 1,
            step=key.step,
        )

    def close(self) -> None:
        """Release the slot that is held outside calls."""
        if self.has_slot:
            self.has_slot = False
            self._holding.leave()

    async def _enter(self) -> None:
        if self.has_slot:
            self.has_slot = self._until_end
            return
        if self._holding.enter_now():
            return
        step = self.stages.key.step
        self.stages.waits()
        try:
            await self._holding.enter(to_go_on(step, self.stages.num_calls))
        finally:
            self.stages.no_longer_waits()


class LimitedPool:
    """The servers for the policy of one rollout; see `RolloutServers`."""

    def __init__(self, pool: ServerPool, attempts: Attempts, rollout_id: str) -> None:
        self._pool = pool
        self._attempts = attempts
        self._rollout_id = rollout_id

    @property
    def is_down(self) -> bool:
        """Whether no server accepts requests now."""
        return self._pool.is_down

    async def generate(self, request: Request) -> Generation:
        """Sample one continuation, once there is a slot for it."""
        attempt = self._attempts.of_rollout(self._rollout_id)
        if attempt is None:
            return await self._pool.generate(request)
        async with attempt.call() as sent:
            return await self._pool.generate(
                replace(
                    request,
                    position=QueuePosition(self._rollout_id, attempt.stages.key.step),
                    watching=self._attempts.calls.watching(attempt.caller, sent),
                )
            )
