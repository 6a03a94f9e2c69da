"""Rollouts for the trainer: which batch may be sampled when, and playing it.

Batch b is admitted once weight version b - `max_async_rollout` is live, and step b trains on
exactly the groups of batch b. With 0 nothing of a step is sampled before the step before it has
been published; no group overtakes another, so short answers are not favoured.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from telescope_core.errors import TelescopeError
from telescope_core.protocols import EnvironmentClient, PlayRequest, PolicySource
from telescope_core.types import (
    Group,
    Rollout,
    RolloutStatus,
    Sampling,
    Split,
    WeightVersion,
)
from telescope_train.draw import Drawn, ExampleDraw

MAX_ATTEMPTS = 3
"""How often a rollout is played before its failure is final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnvironment:
    """One environment of the mix, with what the config says of it."""

    client: EnvironmentClient
    group_size: int
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """How many groups, how far ahead, how many at a time."""

    num_batches: int
    groups_per_batch: int
    max_async_rollout: int
    max_concurrent_rollouts: int
    rollout_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """The groups of one step."""

    groups: tuple[Group, ...]
    num_failed_attempts: int
    duration_s: float
    """From admission to the last reward."""


class RolloutSampler:
    """Plays the admitted batches in tasks of its own.

    Each group task consumes a draw, produces a Group, waits for a free lane and for the policy,
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
        self._admitted_s: dict[int, float] = {}
        self._failed_attempts: Counter[int] = Counter()
        self._next_batch = 0

    def advance(self, version: WeightVersion) -> None:
        """Admit every batch that may be sampled now that `version` is live."""
        last = min(version + self._settings.max_async_rollout, self._settings.num_batches - 1)
        while self._next_batch <= last:
            batch = self._next_batch
            self._admitted_s[batch] = time.monotonic()
            self._batches[batch] = [
                asyncio.create_task(self._play_group(batch, position, self._draw.next()))
                for position in range(self._settings.groups_per_batch)
            ]
            self._next_batch += 1

    async def take(self, batch: int) -> SampledBatch:
        """Return the groups of `batch` once all are scored; raises when not one rollout was."""
        groups = await asyncio.gather(*self._batches.pop(batch))
        require_scored(groups)
        return SampledBatch(
            groups=tuple(groups),
            num_failed_attempts=self._failed_attempts.pop(batch, 0),
            duration_s=time.monotonic() - self._admitted_s.pop(batch),
        )

    async def close(self) -> None:
        """Cancel what is still being played, its requests included."""
        tasks = [task for batch in self._batches.values() for task in batch]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._batches.clear()

    async def _play_group(self, batch: int, position: int, drawn: Drawn) -> Group:
        environment = self._environments[drawn.environment]
        group_id = f"{batch}.{position}"
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
        for attempt in range(1, MAX_ATTEMPTS + 1):
            async with self._lanes:
                rollout = await environment.client.play(
                    request, self._policies.policy(request.rollout_id)
                )
            if rollout.status is not RolloutStatus.FAILED:
                break
            self._failed_attempts[batch] += 1
            rollout = replace(rollout, tags={**rollout.tags, "attempts": str(attempt)})
        return rollout


def require_scored(groups: Sequence[Group]) -> None:
    """Raise TelescopeError with the commonest error when every rollout of a batch failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if any(rollout.reward is not None for rollout in rollouts):
        return
    errors = Counter(rollout.error for rollout in rollouts if rollout.error is not None)
    text, count = errors.most_common(1)[0] if errors else ("no error was recorded", 0)
    raise TelescopeError(
        f"all {len(rollouts)} rollouts of a batch failed, {count} of them with: {text}. "
        "The run stops, because training on nothing hides a defect; the rollouts are in the run "
        "folder"
    )
