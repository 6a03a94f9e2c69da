"""`run_eval`: play the examples of an environment with a policy, and score them.

`telescope eval` uses it with an endpoint, and the trainer with its own live servers. It does no
I/O: each finished rollout is passed to `on_rollout`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from telescope_core.base.collector import rare_collections
from telescope_core.base.errors import (
    EnvironmentProcessError,
    TelescopeError,
    TooManyFailedError,
)
from telescope_core.base.protocols import EnvironmentClient, PlayRequest, PolicySource
from telescope_core.base.retries import as_failed, failure_text, play_with_attempts, require_others
from telescope_core.base.seeds import ENDPOINT_BITS, derived_seed
from telescope_core.base.types import Group, Rollout, RolloutStatus
from telescope_core.environments.author_errors import contained
from telescope_core.evals.result import EvalResult, result_of
from telescope_core.evals.settings import EvalSettings, as_played, check_split
from telescope_core.gateway import canceled_attempt
from telescope_core.records.rows import RolloutRow, readable_row, row_of

_ATTEMPT = "/attempt-"
_ALL_END = "eval stopped, as another attempt would end the same way"


class EvalStoppedError(TooManyFailedError):
    """An eval was stopped before its end, because many rollouts in a row failed."""

    def __init__(self, message: str, result: EvalResult) -> None:
        """`result`: of what was played until then."""
        super().__init__(message)
        self.result = result


async def run_eval(
    environment: EnvironmentClient,
    policies: PolicySource,
    settings: EvalSettings,
    *,
    model: str = "",
    on_rollout: Callable[[RolloutRow], None] | None = None,
    on_attempt: Callable[[RolloutRow], None] = lambda row: None,
    done: Sequence[RolloutRow] = (),
) -> EvalResult:
    """Play `settings` and return the result; `model` only names what was evaluated.

    `on_rollout` is called with each final row: at once, or with group rewards when all rollouts of
    its example have been played. `on_attempt` is called with each attempt that is played again, and
    at the end of an eval that is cut short with those that it leaves without a final row. `done`
    are rows of an earlier, interrupted or smaller run of the same eval, which are not played again.
    Failed rollouts are counted separately. Raises EvalStoppedError, with the result so far, after
    `max_failures_in_a_row` of them, and another TelescopeError after a failure that
    another attempt would not change.
    """
    started_s = time.monotonic()
    description = await environment.describe()
    check_split(settings, description)
    has_group_rewards = description.has_group_rewards
    eval_run = _EvalRun(
        environment,
        policies,
        settings,
        on_rollout,
        on_attempt,
        has_group_rewards=has_group_rewards,
        rows=reusable(done, settings, whole_groups=has_group_rewards),
    )
    num_earlier = len(eval_run.rows)
    stopped: TooManyFailedError | None = None
    try:
        await eval_run.play()
    except TooManyFailedError as error:
        stopped = error
    # The votes of 100,000 rollouts take seconds, in which a training goes on.
    result = await asyncio.to_thread(
        result_of,
        eval_run.rows,
        settings,
        description,
        model=model,
        duration_s=time.monotonic() - started_s,
        num_earlier=num_earlier,
    )
    if stopped is not None:
        raise EvalStoppedError(str(stopped), result)
    return result


def reusable(
    rows: Sequence[RolloutRow], settings: EvalSettings, *, whole_groups: bool = False
) -> list[RolloutRow]:
    """Return the rows of scored rollouts that `settings` asks for, which are not played again.

    With `whole_groups`, an example of which not every rollout is there is played again: a group
    reward needs to see all of them.
    """
    groups: dict[str, dict[int, RolloutRow]] = {}
    for row in rows:
        if row.status is RolloutStatus.KEPT and row.index < settings.rollouts:
            groups.setdefault(row.group_id, {})[row.index] = row
    # An endless split may be asked for more examples than a set of their names could hold.
    indices = set(settings.positions) or range(settings.num_examples)
    return [
        row
        for name, group in groups.items()
        if _index_of(name) in indices and (len(group) == settings.rollouts or not whole_groups)
        for row in group.values()
    ]


def group_id(example_index: int) -> str:
    """Return the group id of an example in an eval."""
    return f"eval-{example_index:06d}"


def _index_of(group: str) -> int:
    """Return the index of the example of a group; -1 = it is of no eval."""
    digits = group.removeprefix("eval-")
    return int(digits) if digits.isdecimal() and group == f"eval-{digits}" else -1


def attempt_id(rollout_id: str, attempt: int) -> str:
    """Return the id of an attempt, so that a policy may keep token history by id."""
    return rollout_id if attempt == 1 else f"{rollout_id}{_ATTEMPT}{attempt}"


def parts_of_attempt(attempt_id: str) -> tuple[str, int, int]:
    """Return group id, index and number of an attempt with an id of `attempt_id`."""
    rollout_id, _, attempt = attempt_id.partition(_ATTEMPT)
    group, _, index = rollout_id.rpartition("/")
    return group, int(index), int(attempt or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    example_index: int
    rollout_index: int
    group_size: int
    """Number of rollouts of the example, which are scored together if it has group rewards."""


@dataclass(slots=True)
class _EvalRun:
    """State of one eval. Workers consume jobs, and record each rollout when it is final."""

    environment: EnvironmentClient
    policies: PolicySource
    settings: EvalSettings
    on_rollout: Callable[[RolloutRow], None] | None
    on_attempt: Callable[[RolloutRow], None]
    has_group_rewards: bool
    rows: list[RolloutRow]
    open_groups: dict[int, list[Rollout]] = field(default_factory=dict[int, list[Rollout]])
    """With group rewards, the played rollouts of each example that lacks some of its rewards."""
    failures_in_a_row: int = 0
    example_ids: dict[str, str] = field(default_factory=dict[str, str])
    """Group id -> id of its example, as far as ended rollouts have told it."""

    async def play(self) -> None:
        """Play all jobs; raises TooManyFailedError after too many failures in a row."""
        jobs = self._jobs()
        self.example_ids |= {row.group_id: row.example_id for row in self.rows}
        try:
            with rare_collections():
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(self.settings.concurrency):
                        tasks.create_task(self._work(jobs))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            # The end cut off the group rewards of these; failed ones would have had none either.
            for rollout in (one for group in self.open_groups.values() for one in group):
                is_final = rollout.status is RolloutStatus.FAILED
                (self._record if is_final else self._record_attempt)(rollout)

    def _jobs(self) -> Iterator[_Job]:
        """Yield the rollouts that are left to play, example by example."""
        done = {(row.group_id, row.index) for row in self.rows}
        for example_index in self.settings.example_indices:
            name = group_id(example_index)
            left = [i for i in range(self.settings.rollouts) if (name, i) not in done]
            for rollout_index in left:
                yield _Job(
                    example_index=example_index, rollout_index=rollout_index, group_size=len(left)
                )

    async def _work(self, jobs: Iterator[_Job]) -> None:
        """Play jobs until there are none; consumes `jobs`, which all workers share."""
        for job in jobs:
            rollout = await self._attempts(job)
            require_others(rollout, _ALL_END)
            if self.has_group_rewards:
                group = self.open_groups.setdefault(job.example_index, [])
                group.append(rollout)
                if len(group) == job.group_size:
                    await self._finish(job.example_index, group)
            else:
                self._record(rollout)
            self._watch_failures(rollout)

    async def _attempts(self, job: _Job) -> Rollout:
        return await play_with_attempts(
            lambda attempt: self._play(self._request(job, attempt=attempt), attempt=attempt),
            max_failed=1 + self.settings.max_retries,
            on_replaced=self._record_attempt,
        )

    async def _play(self, request: PlayRequest, *, attempt: int) -> Rollout:
        try:
            policy = self.policies.policy(attempt_id(request.rollout_id, attempt), request.sampling)
            try:
                with contained():
                    rollout = await self.environment.play(request, policy)
            except asyncio.CancelledError:
                ended = canceled_attempt(self.environment.name, request, policy, attempt=attempt)
                # The environment alone knows its example, and tells it only with a whole rollout.
                known = self.example_ids.get(request.group_id, "")
                self._record_attempt(replace(ended, example_id=known))
                raise
            if rollout.example_id:
                self.example_ids[request.group_id] = rollout.example_id
            return rollout
        except EnvironmentProcessError:
            raise  # no process can be kept alive: no rollout of this eval can be played
        except TelescopeError as error:
            return _failed(self.environment.name, request, error)

    def _record_attempt(self, rollout: Rollout) -> None:
        self.on_attempt(readable_row(row_of(rollout)))

    def _request(self, job: _Job, *, attempt: int) -> PlayRequest:
        sampling = as_played(self.settings.sampling)
        if sampling.seed is not None:
            # Independent of the number of rollouts, so that an eval can grow. Hashed, because sums
            # would give evals with neighboring seeds the same samples.
            place = (job.example_index, job.rollout_index, attempt)
            seed = derived_seed(sampling.seed, *place, num_bits=ENDPOINT_BITS)
            sampling = replace(sampling, seed=seed)
        return PlayRequest(
            split=self.settings.split,
            example_index=job.example_index,
            group_id=group_id(job.example_index),
            index=job.rollout_index,
            sampling=sampling,
            deadline_s=self.settings.deadline_s,
        )

    def _watch_failures(self, rollout: Rollout) -> None:
        if rollout.status is not RolloutStatus.FAILED:
            self.failures_in_a_row = 0
            return
        self.failures_in_a_row += 1
        most = self.settings.max_failures_in_a_row
        if most is not None and self.failures_in_a_row >= most:
            raise TooManyFailedError(
                f"eval stopped: {self.failures_in_a_row} rollouts failed in a row; "
                f"the last one with {rollout.error}"
            )

    async def _finish(self, example_index: int, rollouts: list[Rollout]) -> None:
        ordered = tuple(sorted(rollouts, key=lambda rollout: rollout.index))
        group = Group(
            id=group_id(example_index),
            environment=self.environment.name,
            example_id=next((r.example_id for r in ordered if r.example_id), ""),
            rollouts=ordered,
        )
        group = await self._score_group(example_index, group)
        del self.open_groups[example_index]
        for rollout in group.rollouts:
            require_others(rollout, _ALL_END)
            self._record(rollout)

    def _record(self, rollout: Rollout) -> None:
        row = readable_row(row_of(rollout))
        # A result says nothing of what was said, which fills the memory where it has pictures.
        self.rows.append(replace(row, messages=(), conversations=(), info=()))
        if self.on_rollout is not None:
            self.on_rollout(row)

    async def _score_group(self, example_index: int, group: Group) -> Group:
        try:
            return await self.environment.score_group(self.settings.split, example_index, group)
        except Exception as error:  # noqa: BLE001 - a reward boundary: the group fails, not the eval
            text = failure_text(error)
            failed = tuple(as_failed(rollout, text) for rollout in group.rollouts)
            return replace(group, rollouts=failed)


def _failed(environment: str, request: PlayRequest, error: Exception) -> Rollout:
    return as_failed(request.rollout(environment), failure_text(error))
