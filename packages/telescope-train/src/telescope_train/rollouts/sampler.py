"""Rollouts for the trainer: when a batch may be sampled, and which groups it consists of.

    loop.advance(version)        who waits for whom, and what wakes it
        |  admits batch b once version b - max_async_rollout is live
        v
    Player.play, a task per      one example each, from `TrainingExamples`; waits for its group;
        |          `PendingGroup`       after a rejection it draws again
        v
    loop.take(b)                 waits for the places that `batch_order` chooses, and for no other

With `batch_order` "drawn", step b trains on exactly the groups of batch b, whichever finished
first, and a rejected group is replaced in its own place. Otherwise short answers, which finish
early, would be trained on more. With `max_async_rollout` 0, no rollout of a step is sampled before
the step before it is published.
"""

import asyncio
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from telescope_core.base.protocols import PolicySource
from telescope_core.base.types import Group, Rollout, WeightVersion
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.failures import Boundary, require_draws_left, require_scored
from telescope_train.rollouts.held_out import TrainingExamples
from telescope_train.rollouts.order import (
    BatchOrder,
    DrawnOrder,
    FinishedOrder,
    PendingGroup,
    by_draw,
    oldest_version,
)
from telescope_train.rollouts.playing import Player, PlaySettings, TrainingEnvironment
from telescope_train.rollouts.sampled import OpenGroup, ReadyGroup, SampledBatch, SamplerState

_LOGGER = logging.getLogger(__name__)


class LengthBias:
    """Compares trained rollouts with those of complete batches of draws.

    Unfinished rollouts are longer than finished ones, so only complete batches show how long draws
    are.
    """

    def __init__(self) -> None:
        self._open: defaultdict[int, list[int]] = defaultdict(list)
        self._drawn: list[int] = []
        self._trained: list[int] = []

    def note(self, pending_groups: Iterable[PendingGroup], *, complete: Set[int]) -> float | None:
        """Record that `pending_groups` are trained on, and that the batches `complete` have ended.

        Returns the mean tokens of trained rollouts so far, divided by those of drawn ones; None if
        nothing is known yet.
        """
        for pending in pending_groups:
            lengths = [one.num_completion_tokens for one in pending.group.rollouts]
            self._trained = _added(self._trained, lengths)
            self._open[pending.batch] += lengths
        for batch in complete:
            self._drawn = _added(self._drawn, self._open.pop(batch, []))
        if not self._drawn or not self._drawn[0]:
            return None
        return self._trained[0] / self._trained[1] / (self._drawn[0] / self._drawn[1])


def _added(total: list[int], values: list[int]) -> list[int]:
    """Return sum and number of all values so far."""
    before = total or [0, 0]
    return [before[0] + sum(values), before[1] + len(values)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Number, lead and order of groups."""

    num_batches: int
    """Number of batches, which is that of the run's steps."""
    groups_per_batch: int
    """Number of places in a batch."""
    max_async_rollout: int
    """Steps by which the weights at the start of a batch may be older than those it trains."""
    play: PlaySettings
    """Settings for playing each rollout."""
    max_off_policy_steps: int | None = None
    """Weight updates by which any token may be behind when it is trained; None = no bound."""
    is_in_drawn_order: bool = True
    """Whether each batch consists of exactly the groups drawn for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admission:
    version: WeightVersion
    """The newest live weights when the batch was admitted."""
    draw_position: int
    """Number of examples drawn before the first one of the batch."""
    at_s: float
    """On the clock of the event loop."""


class RolloutSampler:
    """Plays the admitted batches in its own tasks; `advance` starts them, `take` awaits them.

    Everything runs in one event loop, so state changes only at an `await` and needs no lock.
    """

    def __init__(
        self,
        environments: Mapping[str, TrainingEnvironment],
        examples: TrainingExamples,
        policies: PolicySource,
        settings: SamplerSettings,
        attempts: Attempts,
    ) -> None:
        self.attempts = attempts
        self._examples = examples
        self._settings = settings
        self._player = Player(environments, examples, policies, settings.play, attempts)
        self._pending: dict[int, list[PendingGroup]] = {}
        self._chosen: dict[int, list[PendingGroup]] = {}
        self._admitted: dict[int, _Admission] = {}
        self._restored: dict[int, SampledBatch] = {}
        self._asked: dict[int, dict[str, int]] = {}
        self._unended: set[int] = set()
        self._length_bias = LengthBias()
        self._next_batch = 0
        self._num_taken = 0
        self._version: WeightVersion = 0
        self._order: BatchOrder = (
            DrawnOrder(self._pending)
            if settings.is_in_drawn_order
            else FinishedOrder(
                self._pending,
                groups_per_batch=settings.groups_per_batch,
                is_too_old=self._is_too_old,
                play_again=self._play_again,
            )
        )

    def advance(self, version: WeightVersion) -> None:
        """Admit every batch that may be sampled now that `version` is live."""
        self._version = version
        if self._settings.max_off_policy_steps is not None:
            self._player.drop_older_than(version - self._settings.max_off_policy_steps)
        last = min(version + self._settings.max_async_rollout, self._settings.num_batches - 1)
        while self._next_batch <= last:
            batch = self._next_batch
            # A checkpoint goes back to this position, so it is noted before the first draw.
            self._admit(batch, self._examples.draw.position)
            for position in range(self._settings.groups_per_batch):
                drawn = self._examples.next()
                _LOGGER.debug(
                    "batch %d, group %d: draw %d is example %d of %s, under weights %d",
                    *(batch, position, drawn.number, drawn.example_index, drawn.environment),
                    version,
                )
                self._open(PendingGroup(batch=batch, position=position, drawn=drawn))
            self._next_batch += 1

    async def finished(self, batch: int) -> AsyncIterator[list[Group]]:
        """Yield the groups of `batch` in lists as they end, each group once; then call `take`.

        Each list holds the groups that have ended since the last one, in the order of the draws.
        """
        self._asked[batch] = self.queues()
        if batch in self._restored:
            yield list(self._restored[batch].groups)
            return
        async for pending_groups in self._choose(batch):
            yield [pending.group for pending in pending_groups]

    async def take(self, batch: int) -> SampledBatch:
        """Return the groups of `batch` once all are scored; raises if no rollout was."""
        # Looked at before waiting: what is finished by now shows whether the trainer is starved.
        queues = self._asked.pop(batch, None) or self.queues()
        sampled = self._restored.pop(batch, None)
        if sampled is None:
            if batch not in self._chosen:
                async for _ in self._choose(batch):
                    pass
            sampled = self._sampled(batch, self._chosen[batch])
        # Training on a batch of failures would hide the defect behind a step without a gradient.
        require_scored(sampled.groups)
        pending_groups = self._chosen.pop(batch, [])
        self._num_taken = batch + 1
        self._admitted.pop(batch, None)
        ended = {one for one in self._unended if one not in self._pending}
        self._unended -= ended
        bias = None
        if not self._settings.is_in_drawn_order:
            bias = self._length_bias.note(pending_groups, complete=ended)
        return replace(
            sampled,
            queues=queues,
            workers=self._player.stats(),
            length_bias=bias,
            ended_steps=tuple(one + 1 for one in sorted(ended)),
        )

    def ended_ahead(self) -> Iterator[Group]:
        """Yield the groups that have ended and are in no batch yet, in the order of the draws."""
        for pending_groups in self._pending.values():
            for pending in pending_groups:
                if (
                    pending.is_done
                    and pending.task is not None
                    and pending.task.exception() is None
                ):
                    yield pending.group

    async def settled(self, version: WeightVersion) -> SamplerState:
        """Return the state now that `version` is live, which the next step trains.

        In drawn order, the batch of that step is part of the state, once it has ended, if older
        weights began it: these weights are gone, and the next step has to wait for the batch
        anyway. Every later batch is left out completely and sampled again after a restore. Keeping
        the finished groups would favor short answers, and waiting for all would delay the next
        step. In finished order, ended groups are part of the state, and every other place is played
        again.
        """
        if not self._settings.is_in_drawn_order:
            return self._open_state()
        batches = dict(self._restored)
        if version in self._pending and self._admitted[version].version < version:
            pending_groups = self._pending[version]
            async for _ in self._order.ended(version):
                pass
            batches[version] = self._sampled(version, pending_groups)
        next_batch = next(number for number in itertools.count(version) if number not in batches)
        begun = self._admitted.get(next_batch)
        return SamplerState(
            next_batch=next_batch,
            draw_position=self._examples.draw.position if begun is None else begun.draw_position,
            batches=batches,
        )

    def restore(self, state: SamplerState) -> None:
        """Continue from `state`; only before the first `advance`.

        Raises ConfigError if evals hold out an example in it that is not yet trained on.
        """
        assert self._next_batch == 0, "restore comes before advance"
        self._examples.require_free(state.groups)
        drawn = self._examples.draw.numbered({one.number for one in state.open_places})
        self._examples.draw.skip_to(state.draw_position)
        self._next_batch = state.next_batch
        self._restored = dict(state.batches)
        self._unended.update(state.batches)
        for one in state.open_places:
            if one.batch not in self._admitted:
                self._admit(one.batch, one.number - one.position)
            pending = PendingGroup(batch=one.batch, position=one.position, drawn=drawn[one.number])
            self._open(pending, ended=one.ready)

    async def close(self) -> dict[int, list[Rollout]]:
        """Cancel what is still being played, its requests included.

        Returns every attempt of the places that were not taken, by the number of their batch. Those
        of a batch that was taken without them go with the next batch that was not.
        """
        pending_groups = [pending for batch in self._pending.values() for pending in batch]
        pending_groups += [pending for chosen in self._chosen.values() for pending in chosen]
        tasks = [pending.task for pending in pending_groups if pending.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            # Servers free the slot of a request once its task has really ended.
            await asyncio.wait(tasks)
        await self._examples.close()
        self._pending.clear()
        self._chosen.clear()
        attempts: dict[int, list[Rollout]] = {}
        for pending in pending_groups:
            batch = max(pending.batch, self._num_taken, self._version)
            attempts.setdefault(batch, []).extend(pending.unused())
        return {batch: rollouts for batch, rollouts in attempts.items() if rollouts}

    def _admit(self, batch: int, draw_position: int) -> None:
        self._unended.add(batch)
        self._admitted[batch] = _Admission(
            version=self._version,
            draw_position=draw_position,
            at_s=asyncio.get_running_loop().time(),
        )

    def _open(self, pending: PendingGroup, *, ended: ReadyGroup | None = None) -> None:
        """Begin to play `pending`, or restore its content from a checkpoint."""
        self._pending.setdefault(pending.batch, []).append(pending)
        if ended is not None:
            pending.take_over(ended)
        pending.task = asyncio.create_task(self._play(pending, ended))

    async def _play(self, pending: PendingGroup, ended: ReadyGroup | None = None) -> Group:
        if ended is not None:
            return ended.group

        def require_left() -> None:
            rejected = [
                group for one in self._pending.get(pending.batch, ()) for group in one.rejected
            ]
            size = self._settings.groups_per_batch
            require_draws_left(rejected, batch=pending.batch, groups_per_batch=size)

        group = await self._player.play(pending, require_left)
        pending.ended_s = asyncio.get_running_loop().time()
        return group

    def _play_again(self, pending: PendingGroup) -> None:
        pending.give_up()
        pending.task = asyncio.create_task(self._play(pending))

    def _is_too_old(self, group: Group) -> bool:
        bound = self._settings.max_off_policy_steps
        if bound is None:
            return False
        known = [oldest_version(rollout) for rollout in group.rollouts]
        return any(one is not None and self._version - one > bound for one in known)

    async def _choose(self, batch: int) -> AsyncIterator[list[PendingGroup]]:
        """Yield the places of `batch` as they end; they then belong to no other batch."""
        chosen = self._chosen[batch] = list[PendingGroup]()
        async for pending_groups in self._order.ended(batch):
            chosen += pending_groups
            for pending in pending_groups:
                self._pending[pending.batch].remove(pending)
                if not self._pending[pending.batch]:
                    del self._pending[pending.batch]
            yield pending_groups

    def _sampled(self, batch: int, pending_groups: Sequence[PendingGroup]) -> SampledBatch:
        ordered = sorted(pending_groups, key=lambda pending: pending.key)
        # After a restore, a batch may be made of groups that were drawn for earlier ones alone.
        begun = self._admitted.get(batch)
        ends = [pending.ended_s for pending in pending_groups if pending.ended_s is not None]
        duration_s = None
        if begun is not None and len(ends) == len(pending_groups):
            duration_s = max(0.0, max(ends) - begun.at_s)
        return SampledBatch(
            groups=tuple(pending.group for pending in ordered),
            rejected=tuple(by_draw(group for pending in ordered for group in pending.rejected)),
            replaced=tuple(rollout for pending in ordered for rollout in pending.replaced),
            failed_attempts=dict(sum((p.failed for p in ordered), Counter[Boundary]())),
            duration_s=duration_s,
        )

    def _open_state(self) -> SamplerState:
        """Return the state of finished order: ended places, and those that are played again."""
        return SamplerState(
            next_batch=self._next_batch,
            draw_position=self._examples.draw.position,
            batches={},
            open_places=tuple(
                OpenGroup(
                    batch=pending.batch,
                    position=pending.position,
                    number=pending.drawn.number,
                    ready=pending.ready() if pending.is_done else None,
                )
                for pending_groups in self._pending.values()
                for pending in pending_groups
            ),
        )

    def queues(self) -> dict[str, int]:
        """Return the number of ready groups, and of rollouts that are played or wait."""
        pending_groups = [pending for batch in self._pending.values() for pending in batch]
        return {
            "groups_ready": sum(pending.is_done for pending in pending_groups),
            "rollouts_playing": self.attempts.num_playing,
            "rollouts_waiting": self.attempts.num_waiting,
        }
