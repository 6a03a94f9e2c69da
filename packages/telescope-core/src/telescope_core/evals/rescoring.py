"""Grade saved rollouts with another version of their environment, without sampling.

`grade_again` calls the environment for one group after the other. `Tally` compares the results with
the record. Rollouts that cannot be graded are counted by reason, and never as a difference.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from telescope_core.base.errors import (
    EndpointError,
    EnvironmentProcessError,
    NotAskedError,
    NotGradedError,
)
from telescope_core.base.protocols import LEFT_OUT, METRIC, RAISED, EnvironmentClient, PlayRequest
from telescope_core.base.retries import failure_text, play_with_attempts
from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.types import (
    CLUSTER,
    Example,
    Group,
    Rollout,
    RolloutStatus,
    Sampling,
    Split,
)
from telescope_core.evals.comparison import Difference, paired_difference
from telescope_core.evals.stats import most_common
from telescope_core.records.rows import RolloutRow, rollout_of

GROUP_REWARDS = "group rewards"
"""Stands for all group rewards where they fail or are left out, which happens to all at once."""
_FETCHED_AT_ONCE = 64
_MOST_REPEATED = 2048
"""Examples in a row without a new id after which an endless source is assumed to repeat."""
_NO_LIMIT = Sampling(max_tokens=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One saved rollout, with its grade from the present environment."""

    row: RolloutRow
    why_not: str = ""
    """Why it was not graded; empty if it was."""
    rollout: Rollout | None = None
    """The rollout with its new reward, which is None if a part is not known; None if not graded."""
    raised: dict[str, str] = field(default_factory=dict[str, str])
    """Part of the reward -> the error of its code."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Part of the reward, or metric -> why the record does not tell it."""

    @property
    def reward(self) -> float | None:
        """The new reward; None if it is not known."""
        return None if self.rollout is None else self.rollout.reward

    @property
    def error(self) -> str:
        """Why the new version gives no reward; empty if it gives one, or if that is not known."""
        one = self.rollout
        if one is None or one.reward is not None or one.status_reason == NotGradedError.__name__:
            return ""
        return one.error or one.status_reason


class ExampleFinder:
    """Finds the positions of examples in a split by their ids; reads only as far as needed."""

    def __init__(
        self, environment: EnvironmentClient, split: Split, size: int | None, *, most: int
    ) -> None:
        """`size`: number of examples; None = endless, of which at most `most` are read."""
        self._environment = environment
        self._split = split
        self._end = most if size is None else size
        self._is_endless = size is None
        self._found: dict[str, int] = {}
        self._next = 0
        self._newest = 0
        """Number of examples up to the last one with a new id."""
        self._unreadable: list[str] = []
        self._lock = asyncio.Lock()

    async def index_of(self, example_id: str) -> int | None:
        """Return the position of the example; None if the split does not have it."""
        async with self._lock:
            while example_id not in self._found and self._next < self._end:
                last = min(self._end, self._next + _FETCHED_AT_ONCE)
                positions = range(self._next, last)
                read = await asyncio.gather(*map(self._read, positions))
                for index, example in zip(positions, read, strict=True):
                    if example is not None and example.id not in self._found:
                        self._found[example.id] = index
                        self._newest = last
                self._next = last
                if self._is_endless and last - self._newest >= _MOST_REPEATED:
                    self._end = last
            return self._found.get(example_id)

    def why_not_found(self) -> str:
        """Return why `index_of` returned None."""
        why = f"its example is not in the {self._split} split"
        if not self._unreadable:
            return why
        number = f"{len(self._unreadable)} of its examples"
        return f"{why}, or is one of those that cannot be read ({number}; {self._unreadable[0]})"

    async def _read(self, position: int) -> Example | None:
        """Return an example; None for one that its code cannot give, which ends nothing else."""
        try:
            return await self._environment.example(self._split, position)
        except EnvironmentProcessError:
            raise  # no process can be kept alive
        except Exception as error:  # noqa: BLE001 - the code of an example: its rollouts fail
            self._unreadable.append(failure_text(error))
            return None


async def grade_again(
    environment: EnvironmentClient,
    groups: Iterable[Sequence[RolloutRow]],
    *,
    split: Split,
    deadline_s: float,
    concurrency: int,
    most_examples: int,
    on_graded: Callable[[Sequence[Graded]], None],
) -> None:
    """Grade the rollouts of each group, and pass each graded group to `on_graded`.

    Each group has all rollouts of one example, whatever their status. `deadline_s` is for one
    rollout, and `concurrency` is the number that are graded at once: a group is taken when one of
    them has ended, because all may not fit into the memory. Of an endless split, the first
    `most_examples` are searched. Raises EnvironmentProcessError if no worker of the environment can
    be kept alive.
    """
    description = await environment.describe()
    size = description.num_examples.get(split, 0)
    examples = ExampleFinder(environment, split, size, most=most_examples)
    grader = _Grader(
        environment=environment,
        examples=examples,
        split=split,
        deadline_s=deadline_s,
        has_group_rewards=description.has_group_rewards,
    )
    slots = asyncio.Semaphore(concurrency)

    async def graded(row: RolloutRow) -> Graded:
        try:
            return await grader.rollout(row)
        finally:
            slots.release()

    async def finish(group: Sequence[asyncio.Task[Graded]]) -> None:
        on_graded(await grader.with_group_rewards(await asyncio.gather(*group)))

    try:
        async with asyncio.TaskGroup() as tasks:
            for rows in groups:
                group: list[asyncio.Task[Graded]] = []
                for row in rows:
                    await slots.acquire()
                    group.append(tasks.create_task(graded(row)))
                tasks.create_task(finish(group))
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grader:
    environment: EnvironmentClient
    examples: ExampleFinder
    split: Split
    deadline_s: float
    has_group_rewards: bool

    async def with_group_rewards(self, graded: list[Graded]) -> list[Graded]:
        scored = [one for one in graded if one.reward is not None]
        if not scored or not self.has_group_rewards:
            return graded
        # A rollout that has no reward for what the environment does takes no part, as in a run.
        unknown = [one for one in graded if one.row.reward is not None]
        if any(one.reward is None and not one.error for one in unknown):
            why = "not all rollouts of the group can be graded"
            return [_without_group_rewards(one, why) for one in graded]
        return await self._of_group(graded)

    async def rollout(self, row: RolloutRow) -> Graded:
        saved, why_not = _gradable(row)
        if saved is None:
            return Graded(row=row, why_not=why_not)
        index = await self.examples.index_of(row.example_id)
        if index is None:
            return Graded(row=row, why_not=self.examples.why_not_found())
        request = PlayRequest(
            split=self.split,
            example_index=index,
            group_id=row.group_id,
            index=row.index,
            sampling=_NO_LIMIT,
            deadline_s=self.deadline_s,
            saved=saved,
        )
        # Only a worker that knows of no saved rollouts asks for an answer.
        too_old = EndpointError(
            "the environment has a telescope-core that cannot grade saved rollouts; install or "
            "link it again"
        )
        nobody = ScriptedClient([too_old])

        async def play(attempt: int) -> Rollout:
            return await self.environment.play(request, nobody.policy(row.group_id))

        rollout = await play_with_attempts(play, max_failed=1)
        return Graded(
            row=row,
            rollout=replace(rollout, messages=saved.messages, turns=saved.turns),
            raised=_tagged(rollout, RAISED),
            left_out=_tagged(rollout, LEFT_OUT),
        )

    async def _of_group(self, graded: Sequence[Graded]) -> list[Graded]:
        first = next(one.row for one in graded if one.reward is not None)
        index = await self.examples.index_of(first.example_id)
        assert index is not None, "a rollout of it was graded"
        rollouts = [one.rollout for one in graded if one.rollout is not None]
        members = tuple(sorted(rollouts, key=lambda one: one.index))
        group = Group(
            id=first.group_id,
            environment=self.environment.name,
            example_id=first.example_id,
            rollouts=members,
        )
        try:
            scored = await self.environment.score_group(self.split, index, group)
        except EnvironmentProcessError:
            raise  # no process can be kept alive
        except NotAskedError as error:
            return [_without_group_rewards(one, str(error)) for one in graded]
        except Exception as error:  # noqa: BLE001 - a reward boundary: the group fails
            text = failure_text(error)
            return [_with_error(one, text) if one.reward is not None else one for one in graded]
        by_index = {one.index: one for one in scored.rollouts}
        return [
            one if one.rollout is None else replace(one, rollout=by_index[one.rollout.index])
            for one in graded
        ]


def _gradable(row: RolloutRow) -> tuple[Rollout | None, str]:
    """Return the rollout that can be graded again, or None and the reason."""
    if row.status is RolloutStatus.CANCELLED:
        return None, "it was cancelled"
    # One whose reward or group reward failed was played to its end.
    if row.reward is None and row.tags.get("failed_in") != "reward" and not row.rewards:
        return None, f"it failed while it was played ({row.status_reason or row.status})"
    if row.conversations:
        return None, "it has conversations that are not in its messages, of a program or of seats"
    saved = rollout_of(row)
    return saved, "" if saved else "its messages do not hold each of its turns"


def _tagged(rollout: Rollout, mark: str) -> dict[str, str]:
    return {
        name.removeprefix(mark): text
        for name, text in rollout.tags.items()
        if name.startswith(mark)
    }


def _without_group_rewards(one: Graded, why: str) -> Graded:
    if one.rollout is None or one.reward is None:
        return one
    rollout = _as_failed(one.rollout, NotGradedError.__name__, f"{GROUP_REWARDS}: {why}")
    return replace(one, rollout=rollout, left_out={**one.left_out, GROUP_REWARDS: why})


def _with_error(one: Graded, error: str) -> Graded:
    assert one.rollout is not None, "it has a reward"
    rollout = _as_failed(one.rollout, error.partition(":")[0], error)
    return replace(one, rollout=rollout, raised={**one.raised, GROUP_REWARDS: error})


def _as_failed(rollout: Rollout, kind: str, error: str) -> Rollout:
    failed = RolloutStatus.FAILED
    return replace(rollout, reward=None, status=failed, status_reason=kind, error=error)


_SAME = 1e-9
"""Largest difference of rewards that count as equal."""
_MOST_LARGEST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """One reward, or their sum, as it was recorded and as it is now."""

    name: str
    num_compared: int
    """Rollouts that have it in both versions."""
    num_rose: int
    num_fell: int
    num_failed: int
    """Rollouts for which the new version's code raised an error."""
    num_left_out: int
    """Rollouts whose record lacks what it reads."""
    num_new: int
    """Rollouts that have it only now: the part is new, or it failed before."""
    num_gone: int
    """Rollouts that have it only in the record: the new version lacks the part."""
    difference: Difference | None
    """Means before and after over examples, paired; None if nothing can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChange:
    """The rewards of one step of a run."""

    step: int
    num_compared: int
    num_rose: int
    num_fell: int
    before: float
    """Mean of the recorded rewards of the compared rollouts."""
    after: float
    """Mean of their new rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """Groups whose rewards are all equal in one of the versions, so that they teach nothing."""

    num_compared: int
    """Groups with at least two rollouts that have a reward in both versions."""
    gained: tuple[str, ...]
    """Ids of the groups with equal rewards in the record that differ now."""
    lost: tuple[str, ...]
    """Ids of those that differ in the record and are equal now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChange:
    """One rollout with another reward."""

    step: int
    group_id: str
    index: int
    example_id: str
    before: float
    after: float
    parts: Mapping[str, tuple[float | None, float | None]]
    """Parts of the reward that differ -> the values before and after, unweighted."""
    answers: tuple[str, str]
    """The right answers before and after, if they differ; else two empty texts."""
    completion: str
    """The last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """The rollouts of a run or an eval, graded with another version of the environment."""

    num_rollouts: int
    num_graded: int
    """Rollouts of which at least a part has a value, or an error."""
    reward: PartChange
    parts: tuple[PartChange, ...]
    groups: GroupChange
    steps: tuple[StepChange, ...]
    largest: tuple[RewardChange, ...]
    """The changes with the largest differences, one for each example."""
    not_graded: Mapping[str, int]
    """Reason why rollouts were not graded -> their number."""
    left_out: Mapping[str, Mapping[str, int]]
    """Part or metric -> reason why it is left out -> number of rollouts."""
    errors: Mapping[str, int]
    """Errors of the new version -> number of rollouts, most frequent first."""


class _RewardPart:
    """Counts of one part of the reward, or of their sum."""

    def __init__(self) -> None:
        self.num_rose = self.num_fell = self.num_failed = self.num_left_out = 0
        self.num_new = self.num_gone = self.num_compared = 0
        self._sums: dict[str, tuple[float, float, int]] = {}
        """Example -> sums of its rewards before and after, and their number."""
        self._clusters: dict[str, str] = {}
        """Example -> its cluster."""
        self._range = (math.inf, -math.inf)

    def add(self, rollout: Rollout, before: float | None, after: float | None) -> None:
        example_id = rollout.example_id
        if before is None or after is None:
            self.num_new += after is not None
            self.num_gone += before is not None
            return
        self.num_compared += 1
        self.num_rose += after > before + _SAME
        self.num_fell += after < before - _SAME
        old, new, number = self._sums.get(example_id, (0.0, 0.0, 0))
        self._sums[example_id] = (old + before, new + after, number + 1)
        self._clusters[example_id] = rollout.tags.get(CLUSTER, "")
        low, high = self._range
        self._range = (min(low, before, after), max(high, before, after))

    def change(self, name: str) -> PartChange:
        low, high = self._range
        means = [(old / number, new / number) for old, new, number in self._sums.values()]
        columns = [[pair[side] for pair in means] for side in (0, 1)]
        numbers = [number for _, _, number in self._sums.values()]
        return PartChange(
            name=name,
            num_compared=self.num_compared,
            num_rose=self.num_rose,
            num_fell=self.num_fell,
            num_failed=self.num_failed,
            num_left_out=self.num_left_out,
            num_new=self.num_new,
            num_gone=self.num_gone,
            difference=paired_difference(
                name,
                *columns,
                span=(high - low) or 1.0,
                rollouts=most_common(numbers),
                clusters=list(self._clusters.values()),
            )
            if means
            else None,
        )


class Tally:
    """Counts graded rollouts; keeps only those with the largest differences."""

    def __init__(self) -> None:
        self._num_rollouts = self._num_graded = self._num_groups = 0
        self._reward = _RewardPart()
        self._parts: dict[str, _RewardPart] = {}
        self._steps: dict[int, list[tuple[float, float]]] = {}
        self._gained: list[str] = []
        self._lost: list[str] = []
        self._not_graded: Counter[str] = Counter()
        self._left_out: dict[str, Counter[str]] = {}
        self._errors: Counter[str] = Counter()
        self._largest: dict[str, RewardChange] = {}

    def add(self, group: Sequence[Graded]) -> None:
        """Count the rollouts of one group."""
        pairs: list[tuple[float, float]] = []
        for one in group:
            self._num_rollouts += 1
            if one.rollout is None:
                self._not_graded[one.why_not] += 1
                continue
            self._num_graded += 1
            before, after = one.row.reward, one.reward
            self._count_parts(one, one.rollout)
            if before is not None and after is not None:
                pairs.append((before, after))
                self._steps.setdefault(one.row.step, []).append((before, after))
                self._note_largest(one.row, one.rollout, before, after)
        if len(pairs) > 1:
            self._num_groups += 1
            rewards = zip(*pairs, strict=True)
            was, is_now = (max(some) - min(some) > _SAME for some in rewards)
            if was != is_now:
                (self._gained if is_now else self._lost).append(group[0].row.group_id)

    def _count_parts(self, one: Graded, rollout: Rollout) -> None:
        row, error = one.row, one.error
        self._errors[error] += bool(error)
        is_known = rollout.reward is not None
        self._reward.num_failed += bool(error)
        self._reward.num_left_out += not is_known and not error
        # A part that is left out or failed is not a part that is gone.
        if is_known or row.reward is None:
            self._reward.add(rollout, row.reward, rollout.reward)
        for name, why in one.left_out.items():
            self._left_out.setdefault(name, Counter())[why] += 1
        has_all = not error or bool(one.raised)
        names = dict.fromkeys([*row.rewards, *rollout.rewards, *one.raised, *one.left_out])
        for name in names:
            if name.startswith(METRIC):
                continue
            part = self._parts.setdefault(name, _RewardPart())
            if name in one.raised:
                part.num_failed += 1
            elif name in one.left_out:
                part.num_left_out += 1
            elif name in rollout.rewards or has_all:
                part.add(rollout, row.rewards.get(name), rollout.rewards.get(name))

    def _note_largest(self, row: RolloutRow, rollout: Rollout, before: float, after: float) -> None:
        change = after - before
        known = self._largest.get(row.example_id)
        if abs(change) <= _SAME or (known and abs(known.after - known.before) >= abs(change)):
            return
        if known is None and len(self._largest) == _MOST_LARGEST:
            least = min(self._largest.values(), key=lambda one: abs(one.after - one.before))
            if abs(least.after - least.before) >= abs(change):
                return
            del self._largest[least.example_id]
        names = dict.fromkeys([*row.rewards, *rollout.rewards])
        values = {name: (row.rewards.get(name), rollout.rewards.get(name)) for name in names}
        answers = [", ".join(one.golden_answers.values()) for one in (row, rollout)]
        self._largest[row.example_id] = RewardChange(
            step=row.step,
            group_id=row.group_id,
            index=row.index,
            example_id=row.example_id,
            before=before,
            after=after,
            parts={name: pair for name, pair in values.items() if pair[0] != pair[1]},
            answers=(answers[0], answers[1]) if answers[0] != answers[1] else ("", ""),
            completion=row.completion_text,
        )

    def result(self) -> Rescored:
        """Return all that was counted."""
        largest = sorted(self._largest.values(), key=lambda one: -abs(one.after - one.before))
        return Rescored(
            num_rollouts=self._num_rollouts,
            num_graded=self._num_graded,
            reward=self._reward.change("reward"),
            parts=tuple(part.change(name) for name, part in self._parts.items()),
            groups=GroupChange(
                num_compared=self._num_groups, gained=tuple(self._gained), lost=tuple(self._lost)
            ),
            steps=tuple(_step(step, pairs) for step, pairs in sorted(self._steps.items())),
            largest=tuple(largest),
            not_graded=dict(self._not_graded.most_common()),
            left_out={name: dict(reasons) for name, reasons in self._left_out.items()},
            errors={text: number for text, number in self._errors.most_common() if text},
        )


def _step(step: int, pairs: Sequence[tuple[float, float]]) -> StepChange:
    return StepChange(
        step=step,
        num_compared=len(pairs),
        num_rose=sum(after > before + _SAME for before, after in pairs),
        num_fell=sum(after < before - _SAME for before, after in pairs),
        before=math.fsum(before for before, _ in pairs) / len(pairs),
        after=math.fsum(after for _, after in pairs) / len(pairs),
    )
