"""Rollouts for the trainer: which batch may be sampled when, and playing it.

    loop.advance(version)            who waits for whom, and what wakes it
        |  admits batch b once version b - max_async_rollout is live
        v
    _fill, a task per place          waits for its group; after a rejection it draws again
        |  one example each, from `TrainingExamples`
        v
    _play_group                      waits for all rollouts of the group, then for group rewards
        |
        v
    _play, group_size at once        waits for a lane, woken by any rollout that ends;
        |                            then for the environment, which asks the policy
        v
    loop.take(b)                     waits for every place of batch b, and for no other batch

Step b trains on exactly the groups of batch b, whichever finished first, and a rejected group is
replaced in its own place: otherwise short answers, which finish early, would be trained on more.
With `max_async_rollout` 0 nothing of a step is sampled before the step before it is published.
"""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace

from telescope_core.attempts import has_no_access, play_with_attempts
from telescope_core.errors import EndpointAccessError
from telescope_core.gateway import canceled_attempt
from telescope_core.protocols import EnvironmentClient, PlayRequest, PolicySource
from telescope_core.types import (
    Group,
    Rollout,
    RolloutStatus,
    Sampling,
    Split,
    WeightVersion,
)
from telescope_train.inference.seeds import derived_seed
from telescope_train.rollouts.accept import AcceptFn, discarded, is_scored, rejection
from telescope_train.rollouts.draw import Drawn
from telescope_train.rollouts.failures import (
    Boundary,
    boundary_of,
    require_draws_left,
    require_scored,
)
from telescope_train.rollouts.held_out import Cleared, TrainingExamples
from telescope_train.rollouts.sampled import SampledBatch, SamplerState


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnvironment:
    """One environment of the mix, with what the config says of it."""

    client: EnvironmentClient
    group_size: int
    """Rollouts of one example."""
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """How many groups, how far ahead, how many at a time."""

    num_batches: int
    """Steps of the run: no batch beyond the last one is sampled."""
    groups_per_batch: int
    """Places of a batch."""
    max_async_rollout: int
    """Steps by which the weights that begin a batch may be older than those it trains."""
    max_concurrent_rollouts: int
    """Lanes: rollouts that are played at the same time, over all servers."""
    rollout_timeout_s: float
    """Deadline of one attempt; what is still being played then is scored as it stands."""
    seed: int | None = None
    """Decides the tokens of each request, where servers support that; None = they are random."""
    accept: AcceptFn | None = None
    """Judges each group once it is scored; None = all are accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admission:
    version: WeightVersion
    """The newest live weights when the batch was admitted."""
    draw_position: int
    """Examples drawn before the first one of the batch."""
    at_s: float
    """On the clock of the event loop."""


class RolloutSampler:
    """Plays the admitted batches in tasks of its own; `advance` starts them, `take` awaits them.

    Everything runs in one event loop, so state changes only at an `await` and needs no lock.
    """

    def __init__(
        self,
        environments: Mapping[str, TrainingEnvironment],
        examples: TrainingExamples,
        policies: PolicySource,
        settings: SamplerSettings,
    ) -> None:
        self._environments = environments
        self._examples = examples
        self._policies = policies
        self._settings = settings
        self._lanes = asyncio.Semaphore(settings.max_concurrent_rollouts)
        self._batches: dict[int, list[asyncio.Task[Group]]] = {}
        self._admitted: dict[int, _Admission] = {}
        self._restored: dict[int, SampledBatch] = {}
        self._failed_attempts: defaultdict[int, Counter[Boundary]] = defaultdict(Counter)
        self._rejected: defaultdict[int, list[Group]] = defaultdict(list)
        self._replaced: defaultdict[int, list[Rollout]] = defaultdict(list)
        self._ended: defaultdict[int, list[Rollout]] = defaultdict(list)
        self._asked: dict[int, dict[str, int]] = {}
        self._num_playing = 0
        self._num_waiting = 0
        self._next_batch = 0

    def advance(self, version: WeightVersion) -> None:
        """Admit every batch that may be sampled now that `version` is live."""
        last = min(version + self._settings.max_async_rollout, self._settings.num_batches - 1)
        while self._next_batch <= last:
            batch = self._next_batch
            # A checkpoint goes back to this position, so it is noted before the first draw.
            self._admitted[batch] = _Admission(
                version=version,
                draw_position=self._examples.draw.position,
                at_s=asyncio.get_running_loop().time(),
            )
            self._batches[batch] = [
                asyncio.create_task(self._fill(batch, position, self._examples.next()))
                for position in range(self._settings.groups_per_batch)
            ]
            self._next_batch += 1

    async def finished(self, batch: int) -> AsyncIterator[list[Group]]:
        """Yield the groups of `batch` in lists as they end, each group once; `take` comes after.

        Each list holds what has ended since the last one, in the order of the draws.
        """
        self._asked[batch] = self._queues()
        if batch in self._restored:
            yield list(self._restored[batch].groups)
            return
        places = {task: place for place, task in enumerate(self._batches[batch])}
        left = set(places)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            yield [task.result() for task in sorted(done, key=places.__getitem__)]

    async def take(self, batch: int) -> SampledBatch:
        """Return the groups of `batch` once all are scored; raises when not one rollout was."""
        # Looked at before waiting: what is finished by now shows whether the trainer is starved.
        queues = self._asked.pop(batch, None) or self._queues()
        sampled = self._restored.pop(batch, None) or await self._sampled(batch)
        # Training on a batch of failures would hide the defect behind a step without a gradient.
        require_scored(sampled.groups)
        self._forget(batch)
        return replace(sampled, queues=queues, workers=self._workers())

    async def settled(self, version: WeightVersion) -> SamplerState:
        """Return the state now that `version` is live, which the next step trains.

        If older weights began the batch of that step, it is part of the state, once it has ended:
        they are gone, and the next step has to wait for it anyway. Every later batch is left out as
        a whole and sampled again after a restore. Keeping those that are finished, or the finished
        part of one, would favor short answers, and waiting for them would hold up the next step.
        """
        batches = dict(self._restored)
        if version in self._batches and self._admitted[version].version < version:
            batches[version] = await self._sampled(version)
        next_batch = next(number for number in itertools.count(version) if number not in batches)
        begun = self._admitted.get(next_batch)
        return SamplerState(
            next_batch=next_batch,
            draw_position=self._examples.draw.position if begun is None else begun.draw_position,
            batches=batches,
        )

    def restore(self, state: SamplerState) -> None:
        """Continue from `state`; only before the first `advance`."""
        assert self._next_batch == 0, "restore comes before advance"
        self._examples.draw.skip_to(state.draw_position)
        self._next_batch = state.next_batch
        self._restored = dict(state.batches)

    async def _sampled(self, batch: int) -> SampledBatch:
        # Tasks keep their results, so a checkpoint and `take` may both await the same batch.
        groups = await asyncio.gather(*self._batches[batch])
        return SampledBatch(
            groups=tuple(groups),
            rejected=tuple(sorted(self._rejected[batch], key=_place)),
            replaced=tuple(self._replaced[batch]),
            failed_attempts=dict(self._failed_attempts[batch]),
            duration_s=asyncio.get_running_loop().time() - self._admitted[batch].at_s,
        )

    async def close(self) -> dict[int, list[Rollout]]:
        """Cancel what is still being played, its requests included.

        Returns every attempt of the batches that were not taken, by the number of the batch.
        """
        tasks = [task for batch in self._batches.values() for task in batch]
        for task in tasks:
            task.cancel()
        if tasks:
            # Servers free the slot of a request once its task has really ended.
            await asyncio.wait(tasks)
        attempts = {
            batch: [*self._replaced[batch], *map(_unused, self._ended[batch])]
            for batch in self._batches
        }
        for batch in attempts:
            self._forget(batch)
        return {batch: rollouts for batch, rollouts in attempts.items() if rollouts}

    def _forget(self, batch: int) -> None:
        for known in (
            *(self._batches, self._admitted, self._rejected),
            *(self._failed_attempts, self._replaced, self._ended),
        ):
            known.pop(batch, None)

    def _queues(self) -> dict[str, int]:
        tasks = [task for batch in self._batches.values() for task in batch]
        return {
            "groups_ready": sum(task.done() for task in tasks),
            "rollouts_playing": self._num_playing,
            "rollouts_waiting": self._num_waiting,
        }

    def _workers(self) -> dict[str, float]:
        return {
            f"{name}/{what}": value
            for name, environment in self._environments.items()
            for what, value in environment.client.stats().items()
        }

    async def _fill(self, batch: int, position: int, drawn: Drawn) -> Group:
        """Play draws in this place until a group is accepted.

        A group in which nothing was scored is a failure, which is no matter of acceptance.
        """
        accept = self._settings.accept
        group_id = f"{batch}.{position}"
        num_draws = 1
        cleared = await self._examples.cleared(drawn, group_id)
        while True:
            group = await self._play_group(batch, group_id, cleared)
            reason = rejection(group, accept) if accept and is_scored(group) else None
            if reason is None:
                return group
            self._rejected[batch].append(discarded(group, reason))
            require_draws_left(
                self._rejected[batch], batch=batch, groups_per_batch=self._settings.groups_per_batch
            )
            # The id tells the draws of one place apart, and seeds the replacement: which example
            # comes next depends on the place, not on which group was rejected first.
            num_draws += 1
            group_id = f"{batch}.{position}-{num_draws}"
            cleared = await self._examples.after_rejection(cleared, group_id)

    async def _play_group(self, batch: int, group_id: str, cleared: Cleared) -> Group:
        drawn = cleared.drawn
        environment = self._environments[drawn.environment]
        rollouts = await asyncio.gather(
            *(
                self._play(batch, environment, drawn, group_id=group_id, index=index)
                for index in range(environment.group_size)
            )
        )
        group = Group(
            id=group_id,
            environment=drawn.environment,
            example_id=next((r.example_id for r in rollouts if r.example_id), ""),
            rollouts=tuple(rollouts),
        )
        cleared.require(group)
        return await environment.client.score_group(Split.TRAIN, drawn.example_index, group)

    async def _play(
        self,
        batch: int,
        environment: TrainingEnvironment,
        drawn: Drawn,
        *,
        group_id: str,
        index: int,
    ) -> Rollout:
        request = PlayRequest(
            split=Split.TRAIN,
            example_index=drawn.example_index,
            group_id=group_id,
            index=index,
            sampling=environment.sampling,
            deadline_s=self._settings.rollout_timeout_s,
            scores_at_deadline=True,
        )

        def count(failed: Rollout) -> None:
            self._failed_attempts[batch][boundary_of(failed)] += 1
            if has_no_access(failed):
                raise EndpointAccessError(f"environment {environment.client.name}: {failed.error}")

        # The lane is given back between attempts, so that others go on while a server recovers.
        rollout = await play_with_attempts(
            lambda attempt: self._in_lane(batch, environment.client, request, attempt=attempt),
            on_failure=count,
            on_replaced=self._replaced[batch].append,
        )
        self._ended[batch].append(rollout)
        return rollout

    def _seeded(self, request: PlayRequest, attempt: int) -> PlayRequest:
        if self._settings.seed is None:
            return request
        # The place of the rollout in the run, and not the time at which it is played.
        seed = derived_seed(self._settings.seed, request.rollout_id, attempt)
        return replace(request, sampling=replace(request.sampling, seed=seed))

    async def _in_lane(
        self, batch: int, client: EnvironmentClient, request: PlayRequest, *, attempt: int
    ) -> Rollout:
        self._num_waiting += 1
        try:
            # asyncio's semaphore wakes waiters in order, so older batches get their lanes first.
            await self._lanes.acquire()
        finally:
            self._num_waiting -= 1
        self._num_playing += 1
        try:
            request = self._seeded(request, attempt)
            policy = self._policies.policy(request.rollout_id, request.sampling)
            try:
                return await client.play(request, policy)
            except asyncio.CancelledError:
                self._ended[batch].append(
                    canceled_attempt(client.name, request, policy, attempt=attempt)
                )
                raise
        finally:
            self._num_playing -= 1
            self._lanes.release()


def _unused(rollout: Rollout) -> Rollout:
    """Return a rollout that ended, but whose batch was not complete when the run ended."""
    if rollout.status is not RolloutStatus.KEPT:
        return rollout
    return replace(rollout, status=RolloutStatus.DISCARDED, status_reason="run_ended")


def _place(group: Group) -> list[int]:
    """Sort by place and draw, not by which group finished first."""
    return [int(number) for number in group.id.replace("-", ".").split(".")]
