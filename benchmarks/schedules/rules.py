"""Scheduling rules of other systems, as far as they decide what is sampled when and trained on.

Each is the run's own sampler with that rule in place of ours; servers, ranks, loop and rollouts are
the same. None of them streams gradients.
"""

import asyncio
from dataclasses import replace

from telescope_core.types import Group
from telescope_train.loop import LoopParts
from telescope_train.rollouts.order import PendingGroup
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.rollouts.sampler import RolloutSampler


class KeepSlotsFull(RolloutSampler):
    """Samples all the time; a batch is the groups that ended first, without those that are too old.

    A group begins as soon as fewer rollouts are open than there are slots. It is too old if the
    weights have been updated more than `max_behind` times since it began.
    """

    max_behind = 8
    num_dropped_tokens = 0

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self._begun = 0
        self._num_open = 0
        self._playing: dict[asyncio.Task[Group], int] = {}
        self._ready: list[tuple[int, Group]] = []
        self._is_closed = False
        leave = self.attempts._open.leave

        def leave_and_refill() -> None:
            leave()
            self._num_open -= 1
            self._refill()

        self.attempts._open.leave = leave_and_refill

    def advance(self, version: int) -> None:
        """Note the new weights, and fill the slots."""
        self._version = version
        self._refill()

    async def take(self, batch: int) -> SampledBatch:
        """Return the first groups that are young enough."""
        began_s = asyncio.get_running_loop().time()
        wanted = self._settings.groups_per_batch
        while True:
            young = [one for one in self._ready if batch - one[0] <= self.max_behind]
            for _, group in (one for one in self._ready if batch - one[0] > self.max_behind):
                self.num_dropped_tokens += sum(r.num_completion_tokens for r in group.rollouts)
            self._ready = young
            if len(young) >= wanted:
                break
            done, _ = await asyncio.wait(self._playing, return_when=asyncio.FIRST_COMPLETED)
            self._collect(done)
        # Tasks that ended meanwhile free their slots at once.
        taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        duration_s = asyncio.get_running_loop().time() - began_s
        return SampledBatch(groups=tuple(group for _, group in taken), duration_s=duration_s)

    async def close(self) -> None:
        """Cancel what is being played, and begin nothing in its place."""
        self._is_closed = True
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)

    def _collect(self, done: set[asyncio.Task[Group]]) -> None:
        for task in done:
            version = self._playing.pop(task, None)
            if version is not None and not task.cancelled():
                self._ready.append((version, task.result()))
        self._refill()

    def _refill(self) -> None:
        group_size = next(iter(self._player.environments.values())).group_size
        while not self._is_closed and self._num_open < self.attempts.slots.limit:
            self._num_open += group_size
            # Batch 0 in every id, since a group belongs to no batch before it has ended.
            pending = PendingGroup(batch=0, position=self._begun, drawn=self._examples.next())
            task = asyncio.create_task(self._player.play(pending, lambda: None))
            self._playing[task] = self._version
            task.add_done_callback(lambda done: self._collect({done}))
            self._begun += 1


class KeepSlotsFullShort(KeepSlotsFull):
    """With the bound of 2 that a default of two steps of lag has."""

    max_behind = 2


class OneStepOff(RolloutSampler):
    """The next batch is sampled while this one is trained on; weights change when both are done."""

    def advance(self, version: int) -> None:
        """Begin the first batch; `take` begins the others."""
        if self._next_batch == 0:
            super().advance(version)

    async def take(self, batch: int) -> SampledBatch:
        """Return the batch, and begin the next one under the weights of now."""
        sampled = await super().take(batch)
        super().advance(batch + 1)
        return sampled


class WaitForBatch:
    """Publishes when nothing is being sampled."""

    def __init__(self, inner, sampler: RolloutSampler) -> None:
        self._inner, self._sampler = inner, sampler

    async def weights_change(self) -> None:
        """Pass it on."""
        await self._inner.weights_change()

    async def publish(self, version: int) -> None:
        """Wait for the batch that is being sampled, then publish."""
        for pending_groups in list(self._sampler._pending.values()):
            await asyncio.wait([pending.task for pending in pending_groups])
        await self._inner.publish(version)


def counting_what_is_replaced(parts: LoopParts) -> LoopParts:
    """Let our own sampler count the tokens that became too old, as those of other rules do."""
    sampler, take = parts.sampler, parts.sampler.take
    sampler.num_dropped_tokens = 0

    async def counted(batch: int) -> SampledBatch:
        sampled = await take(batch)
        sampler.num_dropped_tokens += sum(one.num_completion_tokens for one in sampled.replaced)
        return sampled

    sampler.take = counted
    return parts


def with_rule(rule: type[RolloutSampler]):
    """Return what gives a simulated run another rule."""

    def adapt(parts: LoopParts) -> LoopParts:
        ours = parts.sampler
        player = ours._player
        sampler = rule(
            player.environments, ours._examples, player._policies, ours._settings, ours.attempts
        )
        publisher = parts.publisher
        if rule is OneStepOff:
            publisher = WaitForBatch(publisher, sampler)
        return replace(parts, sampler=sampler, publisher=publisher, streams_gradients=False)

    return adapt
