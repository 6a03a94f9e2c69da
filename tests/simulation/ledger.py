"""What a simulated run recorded, over all starts of its driver, and what is wrong with it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.simulation.disk import Weights

from telescope_core.base.types import RolloutStatus
from telescope_core.records import RolloutRow
from telescope_core.records.events import AttemptEvent, Stage
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.sampled import SamplerState
from telescope_train.simulation.run import History

_ENDS = (Stage.DONE, Stage.CANCELLED, Stage.FAILED)
_END_OF = {
    RolloutStatus.KEPT: Stage.DONE,
    RolloutStatus.DISCARDED: Stage.DONE,
    RolloutStatus.FAILED: Stage.FAILED,
    RolloutStatus.CANCELLED: Stage.CANCELLED,
}


class AttemptId(NamedTuple):
    """Which attempt at which rollout."""

    group_id: str
    index: int
    attempt: int


class _Row(NamedTuple):
    step: int
    key: AttemptId
    row: RolloutRow


class Ledger(History):
    """Takes the place of the run folder, and forgets what a real one forgets at a resume."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts: list[_Row] = []
        self.attempts: list[_Row] = []
        self.events: list[AttemptEvent] = []
        self.packed: list[int] = []

    def write_rollouts(self, step: int, rows: Iterable[RolloutRow]) -> None:
        """Keep the rollouts of a step."""
        self.rollouts += (_row(step, row) for row in rows)

    def write_attempts(self, step: int, rows: Iterable[RolloutRow]) -> None:
        """Keep the other attempts of a step."""
        self.attempts += (_row(step, row) for row in rows)

    def add(self, event: AttemptEvent) -> None:
        """Keep what happens to an attempt."""
        super().add(event)
        self.events.append(event)

    def pack(self, step: int) -> None:
        """Note that nothing of `step` is played any more."""
        self.packed.append(step)

    def forget_after(self, step: int, state: SamplerState) -> None:
        """Forget every step after `step`, and what is played again from `state` on."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self.rollouts = [one for one in self.rollouts if one.step <= step]
        self.attempts = [one for one in self.attempts if one.step <= step]
        is_repeated = state.repeated()
        self.events = [one for one in self.events if not is_repeated(one)]
        self.packed = [one for one in self.packed if one <= state.first_repeated_batch]

    def problems(self, config: TrainConfig) -> Iterator[str]:
        """Yield what is wrong after a run that has taken all of its steps."""
        yield from self._wrong_steps(config)
        yield from self._wrong_places(config)
        yield from self._wrong_attempts()
        yield from self._wrong_scores()

    def wrong_weights(self, weights: Weights) -> Iterator[str]:
        """Yield what the weights in the end learned that no row says, and the reverse."""
        # A step of which nothing was left to train on changes no weights.
        said = [(row["step"] - 1, row.get("tokens/trained", 0)) for row in self.rows]
        said = [(version, num_tokens) for version, num_tokens in said if num_tokens]
        learned = [(one.version, one.num_tokens) for one in weights]
        if learned != said:
            yield f"weights learned (version, tokens) {learned}, and the rows say {said}"

    def _wrong_steps(self, config: TrainConfig) -> Iterator[str]:
        steps = [row["step"] for row in self.rows]
        if steps != list(range(1, config.run.number_of_steps + 1)):
            yield f"the steps taken were {steps}"
        bound = config.scheduling.max_async_rollout
        if config.scheduling.batch_order == "finished":
            bound = config.scheduling.max_off_policy_steps
        for row in self.rows:
            if bound >= 0 and row.get("staleness/max", 0) > bound:
                yield f"step {row['step']} trained on tokens {row['staleness/max']} updates old"

    def _wrong_places(self, config: TrainConfig) -> Iterator[str]:
        """Yield places that were not trained on exactly once, or not in their own step."""
        # What replaces a rejected group has its id with a number behind it.
        trained = {(one.step, one.key.group_id.partition("-")[0]) for one in self.rollouts}
        size = config.rollout.prompts_batch_size_for_trainer
        places = Counter(place for _, place in trained)
        for place in (f"{b}.{p}" for b in range(config.run.number_of_steps) for p in range(size)):
            if places[place] != 1:
                yield f"place {place} was trained on {places[place]} times"
        if config.scheduling.batch_order == "drawn":
            for step, place in sorted(trained):
                if int(place.partition(".")[0]) != step - 1:
                    yield f"step {step} trained on place {place}"

    def _wrong_attempts(self) -> Iterator[str]:
        """Yield attempts whose events and rows do not agree one to one."""
        events: defaultdict[AttemptId, list[AttemptEvent]] = defaultdict(list)
        for event in self.events:
            events[AttemptId(event.group_id, event.index, event.attempt)].append(event)
        rows = Counter(one.key for one in (*self.rollouts, *self.attempts))
        for key, count in rows.items():
            if count > 1 or key not in events:
                yield f"{key} has {count} rows and {len(events[key])} events"
        by_key = {one.key: one.row for one in (*self.rollouts, *self.attempts)}
        for key, own in events.items():
            ends = [event.stage for event in own if event.stage in _ENDS]
            if len(ends) != 1 or own[0].stage is not Stage.DRAWN or own[-1].stage != ends[0]:
                yield f"{key} has the stages {[str(event.stage) for event in own]}"
            elif key not in by_key:
                yield f"{key} left no row"
            elif _END_OF[by_key[key].status] is not ends[0] and not _was_given_up(by_key[key]):
                yield f"{key} ended as {ends[0]} and is recorded as {by_key[key].status}"

    def _wrong_scores(self) -> Iterator[str]:
        for one in (*self.rollouts, *self.attempts):
            if one.row.status is RolloutStatus.FAILED and one.row.reward is not None:
                yield f"{one.key} failed and has the reward {one.row.reward}"


def _row(step: int, row: RolloutRow) -> _Row:
    return _Row(step, AttemptId(row.group_id, row.index, row.attempt), row)


def _was_given_up(row: RolloutRow) -> bool:
    """Whether an attempt had ended, and was played again because it became too old."""
    return row.status is RolloutStatus.CANCELLED and row.status_reason == "off_policy"
