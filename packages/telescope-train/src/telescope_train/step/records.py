"""Record the rollouts of a step, each with its outcome, other attempts, and facts about tokens."""

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.types import Group, JsonValue, Rollout, RolloutStatus
from telescope_core.records import RolloutRow, row_of
from telescope_core.records.token_facts import TurnFacts
from telescope_train.backends.protocol import BatchFacts, Ranks
from telescope_train.batches.batch import Origin, PackedBatch, StepPlan, TrainingSample, TurnPart
from telescope_train.step.credit import Credit


class StepRecords(Protocol):
    """Receives the rows of a run: `telescope_core.records.RunFolder`."""

    def log_metrics(self, row: Mapping[str, JsonValue]) -> None:
        """Add one row of metrics."""
        ...

    def write_rollouts(self, step: int, rows: Iterable[RolloutRow]) -> Any:
        """Write the rollouts of one step."""
        ...

    def write_token_facts(self, step: int, rows: Iterable[TurnFacts]) -> Any:
        """Write the facts about the tokens of one step."""
        ...

    def write_attempts(self, step: int, rows: Iterable[RolloutRow]) -> Any:
        """Write the attempts at rollouts of one step that are not among its rollouts."""
        ...


def record_rollouts(
    folder: StepRecords, step: int, groups: Sequence[Group], credit: Credit
) -> None:
    """Write all rollouts of a step; those that were not trained on are marked as discarded."""
    # One row at a time: what the file holds of a step is copied in parts.
    rows = (
        row_of(
            _marked(rollout, credit),
            step=step,
            advantage=credit.advantages.get((group.id, rollout.index)),
            with_tokens=True,
        )
        for group in groups
        for rollout in group.rollouts
    )
    folder.write_rollouts(step, rows)


def record_attempts(folder: StepRecords, step: int, attempts: Sequence[Rollout]) -> None:
    """Write attempts that are not rollouts of a step: replaced, or cut short by the run's end."""
    if attempts:
        folder.write_attempts(step, (row_of(one, step=step, with_tokens=True) for one in attempts))


def record_unfinished(folder: StepRecords, left: Mapping[int, Sequence[Rollout]]) -> None:
    """Write the rollouts of untrained batches, by the number of the batch."""
    for batch, attempts in left.items():
        record_attempts(folder, batch + 1, attempts)


def _marked(rollout: Rollout, credit: Credit) -> Rollout:
    key = rollout.group_id, rollout.index
    if told := credit.of_agents.get(key):
        seats = {f"advantage/{agent}": value for agent, value in sorted(told.items()) if agent}
        rollout = replace(rollout, metrics={**rollout.metrics, **seats})
    reason = credit.filtered.get(key) or credit.discarded.get(rollout.group_id)
    if reason is None or rollout.status is not RolloutStatus.KEPT:
        return rollout
    return replace(rollout, status=RolloutStatus.DISCARDED, status_reason=str(reason))


class TokenRecords:
    """The writer of `token_facts/`; at the end of the block everything is on disk.

    Compression takes about 0.2 s for a million tokens, which no step should wait for.
    """

    def __init__(self, trainer: Ranks, folder: StepRecords, *, is_on: bool) -> None:
        self._trainer, self._folder, self._is_on = trainer, folder, is_on
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until the file of the last step is written."""
        # Also after an error: a run that goes back deletes files, and none may appear afterwards.
        await self._written()

    async def record(
        self, step: int, plan: StepPlan, samples: Sequence[TrainingSample], *, scale: float
    ) -> None:
        """Start to write the facts about the tokens of `step`; see `turn_facts`.

        A step that trained on nothing gets a file without rows. Raises the error of the write
        before.
        """
        if not self._is_on:
            return
        facts = await self._trainer.take_token_facts() if plan.order else []
        if plan.order and not any(facts):
            return  # the backend finds none

        def write() -> None:
            self._folder.write_token_facts(step, turn_facts(plan, facts, samples, scale=scale))

        await self._written()  # one at a time, so that no more than two steps are in memory
        self._writing = asyncio.create_task(asyncio.to_thread(write))

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing


class _Place(NamedTuple):
    """The place of a turn's tokens."""

    origin: Origin
    part: TurnPart
    facts: BatchFacts
    """Facts of its batch."""
    weight: float
    """Weight of each of its tokens."""
    first: int
    """Index of its first token among the trained tokens of the batch."""


def turn_facts(
    plan: StepPlan,
    facts: Sequence[Sequence[BatchFacts]],
    samples: Sequence[TrainingSample],
    *,
    scale: float = 1.0,
) -> Iterator[TurnFacts]:
    """Yield one row for each trained turn, in the order of `samples`.

    `facts` is by [rank][batch], in the order in which `plan` first uses the batches. The gradient
    was multiplied by `scale` at the end of the step.
    """
    rollouts = dict.fromkeys(sample.rollout_key for sample in samples)
    numbers = {key: number for number, key in enumerate(rollouts)}
    places = [
        place
        for rank, found in enumerate(facts)
        for batch, of_batch in zip(_of_rank(plan, rank), found, strict=True)
        for place in _places(batch, of_batch)
    ]
    # However they were packed, the turns of a rollout are beside each other in the records.
    places.sort(key=lambda one: (numbers[one.origin.group_id, one.origin.index], one.part.turn))
    return (_row(place, scale) for place in places)


def _of_rank(plan: StepPlan, rank: int) -> list[PackedBatch]:
    return [batch for shards in plan.first_pass for batch in shards[rank]]


def _places(batch: PackedBatch, facts: BatchFacts) -> Iterator[_Place]:
    first, weights_M = 0, batch.weights_T[batch.mask_T]
    for origin in batch.origins:
        for part in origin.turns:
            # All tokens of a sample have the same weight.
            yield _Place(origin, part, facts, float(weights_M[first]), first)
            first += part.num_tokens
    assert first == len(facts.logprobs_M), "the turns of its samples are all trained tokens"


def _row(place: _Place, scale: float) -> TurnFacts:
    origin, facts = place.origin, place.facts
    own = slice(place.first, place.first + place.part.num_tokens)
    return TurnFacts(
        group_id=origin.group_id,
        index=origin.index,
        attempt=origin.attempt,
        turn=place.part.turn,
        weight=scale * place.weight,
        logprobs=_array(facts.logprobs_M[own]),
        entropy=_array(facts.entropy_M[own]),
        effective_advantages=_array(facts.effective_advantages_M[own]),
    )


def _array(values: NDArray[np.floating]) -> "array[float]":
    found = array("f")
    found.frombytes(values.astype(np.float32).tobytes())
    return found
