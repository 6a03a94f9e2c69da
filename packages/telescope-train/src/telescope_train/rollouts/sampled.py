"""The results of the sampler: the batch of a step, and its own state for a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from telescope_core.base.types import Group, Rollout
from telescope_core.records.events import AttemptEvent
from telescope_train.rollouts.failures import Boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """The groups of one step."""

    groups: tuple[Group, ...]
    """Groups for training, in the order in which they were drawn."""
    rejected: tuple[Group, ...] = ()
    """Groups that `should_accept_fn` rejected; their rollouts carry the reason."""
    replaced: tuple[Rollout, ...] = ()
    """Attempts that failed or became too old and were played again, by place; each rollout above is
    the last attempt at it."""
    failed_attempts: Mapping[Boundary, int] = field(default_factory=dict[Boundary, int])
    """Number of failed attempts by cause, including those that a later attempt replaced."""
    queues: Mapping[str, int] = field(default_factory=dict[str, int])
    """Groups that were ready, and rollouts that were playing or waiting for a slot, when the
    trainer asked for the batch."""
    workers: Mapping[str, float] = field(default_factory=dict[str, float])
    """State of the processes of each environment at that time, as `environment/number`."""
    duration_s: float | None
    """Seconds from admission to the last reward; None = not known, as some of its groups were
    sampled before a restore."""
    length_bias: float | None = None
    """In finished order: mean tokens of trained rollouts so far over those of all draws."""
    ended_steps: tuple[int, ...] = ()
    """Steps for whose batches no rollout is playing any more."""

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """The accepted groups, then the rejected ones."""
        return (*self.groups, *self.rejected)

    @property
    def all_rollouts(self) -> Iterator[Rollout]:
        """Every known attempt: the rollouts of all groups, then those that were replaced."""
        yield from (rollout for group in self.all_groups for rollout in group.rollouts)
        yield from self.replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A place whose group was accepted and is not trained on yet."""

    group: Group
    rejected: tuple[Group, ...]
    replaced: tuple[Rollout, ...]
    failed: Mapping[Boundary, int]
    """Failed attempts by cause."""
    num_draws: int
    """Number of draws: that in order, and its replacements."""

    @property
    def all_rollouts(self) -> Iterator[Rollout]:
        """Every attempt that was played there."""
        for group in (self.group, *self.rejected):
            yield from group.rollouts
        yield from self.replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group that was begun and not trained on."""

    batch: int
    position: int
    number: int
    """Number of draws before the one of this place."""
    ready: ReadyGroup | None
    """None = it is played again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """The state of sampling, in a form that can be saved."""

    next_batch: int
    """Number of the first batch that has not been admitted."""
    draw_position: int
    """Number of examples drawn before the first one of that batch."""
    batches: Mapping[int, SampledBatch]
    """Batches that were sampled and are not trained on yet, by number."""
    open_places: tuple[OpenGroup, ...] = ()
    """With batches in finished order, all places that are not trained on yet."""

    @property
    def first_repeated_batch(self) -> int:
        """Number of the first batch of which anything may be played again.

        A group that has ended is played again if it is too old when a step chooses it.
        """
        return min((one.batch for one in self.open_places), default=self.next_batch)

    def repeated(self) -> Callable[[AttemptEvent], bool]:
        """Return a predicate of events: whether a run that continues here repeats the attempt."""
        open_places = {(one.batch, one.position): one.ready for one in self.open_places}
        saved = {
            (one.group_id, one.index, one.attempt)
            for ready in open_places.values()
            if ready is not None
            for one in ready.all_rollouts
        }

        def is_repeated(event: AttemptEvent) -> bool:
            batch, position = map(int, event.group_id.partition("-")[0].split("."))
            if batch >= self.next_batch:
                return True
            is_open = (batch, position) in open_places
            return is_open and (event.group_id, event.index, event.attempt) not in saved

        return is_repeated

    @property
    def groups(self) -> Iterator[Group]:
        """The groups that are not trained on yet."""
        for batch in self.batches.values():
            yield from batch.groups
        for one in self.open_places:
            if one.ready is not None:
                yield one.ready.group

    @property
    def all_rollouts(self) -> Iterator[Rollout]:
        """Every attempt in the state."""
        for batch in self.batches.values():
            yield from batch.all_rollouts
        for one in self.open_places:
            if one.ready is not None:
                yield from one.ready.all_rollouts


BEGINNING = SamplerState(next_batch=0, draw_position=0, batches={})
"""State before anything was sampled."""
