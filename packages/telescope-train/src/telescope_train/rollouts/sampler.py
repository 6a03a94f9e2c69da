"""Rollouts for the trainer: which batch may be sampled when, and playing it.

Batch b is admitted once weight version b - `max_async_rollout` is live, and step b trains on
exactly the groups of batch b. With 0 nothing of a step is sampled before the step before it has
been published; no group overtakes another, so short answers are not favoured. A rejected group is
replaced in its own place, for the same reason.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from telescope_core.errors import ConfigError
from telescope_core.protocols import EnvironmentClient, PlayRequest, PolicySource
from telescope_core.types import (
    Group,
    Rollout,
    RolloutStatus,
    Sampling,
    Split,
    WeightVersion,
)
from telescope_train.rollouts.accept import AcceptFn, discarded, is_scored, rejection
from telescope_train.rollouts.draw import Drawn, ExampleDraw
from telescope_train.rollouts.failures import (
    Boundary,
    boundary_of,
    require_draws_left,
    require_scored,
)
from telescope_train.rollouts.sampled import SampledBatch, SamplerState

MAX_ATTEMPTS = 3
"""How often a rollout is played before its failure is final."""
MAX_LOST = 5
"""Further tries, of a rollout whose environment process died with it."""
MAX_HELD_OUT_DRAWS = 1000
"""How many draws in a row may be examples of evals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnvironment:
    """One environment of the mix, with what the config says of it."""

    client: EnvironmentClient
    group_size: int
    sampling: Sampling
    held_out: frozenset[str] = frozenset()
    """Ids of examples that are drawn again when they come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """How many groups, how far ahead, how many at a time."""

    num_batches: int
    groups_per_batch: int
    max_async_rollout: int
    max_concurrent_rollouts: int
    rollout_timeout_s: float
    accept: AcceptFn | None = None
    """Judges each group once it is scored; None = all are accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admission:
    version: WeightVersion
    draw_position: int
    """Before the first draw of the batch."""
    at_s: float


class RolloutSampler:
    """Plays the admitted batches in tasks of its own.

    Each group task consumes draws, produces a Group, waits for a free lane and for the policy,
    and is woken by either. `advance` starts them; `take` awaits them.
    """

    def __init__(
        self,
        environments: Mapping[str, TrainingEnvironment],
        draw: ExampleDraw,
        policies: PolicySource,
        settings: SamplerSettings,
    ) -> None:
        self._environments = environments
        self._draw = draw
        self._policies = policies
        self._settings = settings
        self._lanes = asyncio.Semaphore(settings.max_concurrent_rollouts)
        self._batches: dict[int, list[asyncio.Task[Group]]] = {}
        self._admitted: dict[int, _Admission] = {}
        self._restored: dict[int, SampledBatch] = {}
        self._failed_attempts: defaultdict[int, Counter[Boundary]] = defaultdict(Counter)
        self._rejected: defaultdict[int, list[Group]] = defaultdict(list)
        self._num_playing = 0
        self._num_waiting = 0
        self._next_batch = 0

    def advance(self, version: WeightVersion) -> None:
        """Admit every batch that may be sampled now that `version` is live."""
        last = min(version + self._settings.max_async_rollout, self._settings.num_batches - 1)
        while self._next_batch <= last:
            batch = self._next_batch
            self._admitted[batch] = _Admission(
                version=version, draw_position=self._draw.position, at_s=time.monotonic()
            )
            self._batches[batch] = [
                asyncio.create_task(self._fill(batch, position, self._draw.next()))
                for position in range(self._settings.groups_per_batch)
            ]
            self._next_batch += 1

    async def take(self, batch: int) -> SampledBatch:
        """Return the groups of `batch` once all are scored; raises when not one rollout was."""
        queues = self._queues()
        sampled = self._restored.pop(batch, None) or await self._sampled(batch)
        for known in (self._batches, self._failed_attempts, self._rejected, self._admitted):
            known.pop(batch, None)
        require_scored(sampled.groups)
        return replace(sampled, queues=queues, workers=self._workers())

    async def settled(self, version: WeightVersion) -> SamplerState:
        """Return the state now that `version` is live, once what older weights began has ended.

        What `version` itself began is left out as a whole and sampled again after a restore:
        keeping the part that is finished would favour short answers.
        """
        begun = [number for number in self._batches if self._admitted[number].version == version]
        next_batch = min(begun, default=self._next_batch)
        older = [number for number in self._batches if number < next_batch]
        sampled = await asyncio.gather(*map(self._sampled, older))
        return SamplerState(
            next_batch=next_batch,
            draw_position=(
                self._admitted[next_batch].draw_position if begun else self._draw.position
            ),
            batches={**self._restored, **dict(zip(older, sampled, strict=True))},
        )

    def restore(self, state: SamplerState) -> None:
        """Continue from `state`; only before the first `advance`."""
        assert self._next_batch == 0, "restore comes before advance"
        self._draw.skip_to(state.draw_position)
        self._next_batch = state.next_batch
        self._restored = dict(state.batches)

    async def _sampled(self, batch: int) -> SampledBatch:
        groups = await asyncio.gather(*self._batches[batch])
        return SampledBatch(
            groups=tuple(groups),
            rejected=tuple(sorted(self._rejected[batch], key=_place)),
            failed_attempts=dict(self._failed_attempts[batch]),
            duration_s=time.monotonic() - self._admitted[batch].at_s,
        )

    async def close(self) -> None:
        """Cancel what is still being played, its requests included."""
        tasks = [task for batch in self._batches.values() for task in batch]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._batches.clear()

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
        while True:
            drawn = await self._not_held_out(drawn)
            group = await self._play_group(batch, group_id, drawn)
            reason = rejection(group, accept) if accept and is_scored(group) else None
            if reason is None:
                return group
            self._rejected[batch].append(discarded(group, reason))
            require_draws_left(
                self._rejected[batch], batch=batch, groups_per_batch=self._settings.groups_per_batch
            )
            num_draws += 1
            group_id = f"{batch}.{position}-{num_draws}"
            drawn = self._draw.replacement(drawn, group_id)

    async def _not_held_out(self, drawn: Drawn) -> Drawn:
        """Return `drawn`, or the next draw that is no example of an eval."""
        for _ in range(MAX_HELD_OUT_DRAWS):
            environment = self._environments[drawn.environment]
            if not environment.held_out:
                return drawn
            example = await environment.client.example(Split.TRAIN, drawn.example_index)
            if example.id not in environment.held_out:
                return drawn
            drawn = self._draw.next()
        raise ConfigError(
            f"{MAX_HELD_OUT_DRAWS} draws in a row gave examples of evals, which "
            f"separate_eval_samples keeps out of training; {drawn.environment!r} seems to have no "
            "others: lower num_samples"
        )

    async def _play_group(self, batch: int, group_id: str, drawn: Drawn) -> Group:
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
        )
        num_failed = num_lost = 0
        while num_failed < MAX_ATTEMPTS and num_lost <= MAX_LOST:
            rollout = await self._in_lane(environment.client, request)
            if rollout.status is not RolloutStatus.FAILED:
                break
            self._failed_attempts[batch][boundary_of(rollout)] += 1
            num_lost += rollout.is_lost
            num_failed += not rollout.is_lost
            attempts = str(num_failed + num_lost)
            rollout = replace(rollout, tags={**rollout.tags, "attempts": attempts})
        return rollout

    async def _in_lane(self, client: EnvironmentClient, request: PlayRequest) -> Rollout:
        self._num_waiting += 1
        try:
            await self._lanes.acquire()
        finally:
            self._num_waiting -= 1
        self._num_playing += 1
        try:
            policy = self._policies.policy(request.rollout_id, request.sampling)
            return await client.play(request, policy)
        finally:
            self._num_playing -= 1
            self._lanes.release()


def _place(group: Group) -> list[int]:
    """Sort by place and draw, not by which group finished first."""
    return [int(number) for number in group.id.replace("-", ".").split(".")]
