"""Facts about each token of a step, sorted back from packed batches to turns. Pure."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telescope_core.records.token_facts import TurnFacts
from telescope_train.backends.protocol import BatchFacts
from telescope_train.batches.batch import Origin, PackedBatch, StepPlan, TrainingSample, TurnPart


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
