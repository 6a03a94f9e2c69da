"""Play one group: its rollouts, each again after a failure or when its tokens are too old.

    play         waits for the group; after a rejection it plays another draw in its place
    _all         a task per rollout; one whose tokens become too old is stopped and played again
    _rollout     attempts, until one of them is final by the rule of `base.retries`
    _attempt     waits for a slot, then for the environment, which asks the policy

Each waits for the one below it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from telescope_core.base.errors import EnvironmentProcessError
from telescope_core.base.protocols import EnvironmentClient, PlayRequest, Policy, PolicySource
from telescope_core.base.retries import (
    as_failed,
    ends_all,
    failure_text,
    play_with_attempts,
    require_others,
)
from telescope_core.base.scoring_events import hearing_of_scoring
from telescope_core.base.seeds import derived_seed
from telescope_core.base.types import (
    Group,
    Rollout,
    RolloutStatus,
    Sampling,
    StopReason,
    WeightVersion,
)
from telescope_core.environments.running import CURRENT, noting
from telescope_core.gateway import canceled_attempt
from telescope_train.cluster.supervision import cancel
from telescope_train.rollouts.accept import AcceptFn, discarded, is_scored, rejection
from telescope_train.rollouts.attempts import Attempt, AttemptKey, Attempts
from telescope_train.rollouts.draw import Drawn
from telescope_train.rollouts.failures import boundary_of
from telescope_train.rollouts.held_out import Cleared, TrainingExamples
from telescope_train.rollouts.order import (
    OFF_POLICY,
    PendingGroup,
    off_policy,
    oldest_version,
)
from telescope_train.rollouts.slots import Holding, to_begin


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnvironment:
    """One environment of the mix, with its settings."""

    client: EnvironmentClient
    group_size: int
    """Number of rollouts of one example."""
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """Settings for playing each rollout."""

    rollout_timeout_s: float
    """Deadline of one attempt, in seconds; an unfinished one is then scored as it stands."""
    seed: int | None = None
    """Seed for the tokens of each request, if servers support that; None = random."""
    accept: AcceptFn | None = None
    """Called with each scored group; None = all are accepted."""


class Player:
    """Plays places, and records the attempts of each."""

    def __init__(
        self,
        environments: Mapping[str, TrainingEnvironment],
        examples: TrainingExamples,
        policies: PolicySource,
        settings: PlaySettings,
        attempts: Attempts,
    ) -> None:
        self.environments = environments
        self.attempts = attempts
        self._examples = examples
        self._policies = policies
        self._settings = settings
        self._playing: set[_Playing] = set()

    async def play(self, pending: PendingGroup, require_draws_left: Callable[[], None]) -> Group:
        """Play draws in `pending` until a group is accepted.

        A group in which nothing was scored is a failure, which is no matter of acceptance.
        """
        accept = self._settings.accept
        if pending.playing is None:
            pending.playing = await self._examples.cleared(pending.drawn, pending.id_of_draw(1))
            for number in range(2, pending.num_draws + 1):
                group_id = pending.id_of_draw(number)
                pending.playing = await self._examples.after_rejection(pending.playing, group_id)
        while True:
            group = await self._group(pending, pending.playing)
            reason = self._rejection(group, accept) if accept and is_scored(group) else None
            if reason is None:
                return group
            pending.rejected.append(discarded(group, reason))
            require_draws_left()
            # The id seeds the replacement: which example comes next depends on the place, not on
            # which group was rejected first.
            pending.num_draws += 1
            pending.playing = await self._examples.after_rejection(
                pending.playing, pending.group_id
            )

    def _rejection(self, group: Group, accept: AcceptFn) -> str | None:
        """Return why `accept` rejects a group; None if it does not. May take long."""
        current = CURRENT.get()
        if current is not None:
            until_s = time.monotonic() + self._settings.rollout_timeout_s
            current = replace(current, played=f"group {group.id}", until_s=until_s)
        with noting(accept, "should_accept_fn", current):
            return rejection(group, accept)

    def drop_older_than(self, version: WeightVersion) -> None:
        """Play every rollout again that has a token of older weights and whose group is not full.

        Groups that are complete are left to the caller.
        """
        for playing in self._playing:
            oldest = playing.oldest_version()
            if oldest is not None and oldest < version and playing.stopping is None:
                playing.stop()
                playing.task = asyncio.create_task(self._again(playing))

    def stats(self) -> dict[str, float]:
        """Return the state of the processes of each environment, as `environment/number`."""
        return {
            f"{name}/{what}": value
            for name, environment in self.environments.items()
            for what, value in environment.client.stats().items()
        }

    async def _group(self, pending: PendingGroup, cleared: Cleared) -> Group:
        drawn = cleared.drawn
        environment = self.environments[drawn.environment]
        holding = self.attempts.for_group()
        playing = [
            _Playing(pending, environment.client, holding, self._request(pending, drawn, index))
            for index in range(environment.group_size)
        ]
        rollouts = await self._all(playing)
        group = Group(
            id=pending.group_id,
            environment=drawn.environment,
            example_id=next((r.example_id for r in rollouts if r.example_id), ""),
            rollouts=tuple(rollouts),
        )
        cleared.require(group)
        try:
            return await environment.client.score_group(drawn.split, drawn.example_index, group)
        except EnvironmentProcessError:
            raise  # no process can be kept alive
        except Exception as error:  # noqa: BLE001 - a reward boundary: its group fails, not the run
            failed = _unscored(group, error)
            pending.failed.update(
                boundary_of(after)
                for before, after in zip(group.rollouts, failed.rollouts, strict=True)
                if after is not before
            )
            return failed

    async def _all(self, group: Sequence["_Playing"]) -> list[Rollout]:
        """Return the rollouts of a group, in order, once all have ended at the same time."""
        for one in group:
            one.task = asyncio.create_task(self._rollout(one))
        self._playing.update(group)
        try:
            # One that has ended may be played again, as long as another one is still played.
            while tasks := [one.task for one in group if not one.task.done()]:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for one in group:
                    if one.task.done():
                        one.task.result()
            return [one.task.result() for one in group]
        finally:
            self._playing.difference_update(group)
            # Servers free the slot of a request once its task has ended.
            await cancel([task for one in group for task in (one.stopping, one.task) if task])
            for one in group:
                one.has_stopped()
                if not one.task.cancelled() and one.task.exception() is None:
                    one.pending.ended.append(one.task.result())

    def _request(self, pending: PendingGroup, drawn: Drawn, index: int) -> PlayRequest:
        return PlayRequest(
            split=drawn.split,
            example_index=drawn.example_index,
            group_id=pending.group_id,
            index=index,
            sampling=self.environments[drawn.environment].sampling,
            deadline_s=self._settings.rollout_timeout_s,
            scores_at_deadline=True,
        )

    async def _again(self, playing: "_Playing") -> Rollout:
        """Play the rollout again, once the stopped task has ended."""
        before = playing.stopping
        assert before is not None, "something is being stopped"
        await cancel([before])
        playing.has_stopped()
        if not before.cancelled():
            before.result()  # raises what ends the run
        return await self._rollout(playing)

    async def _rollout(self, playing: "_Playing") -> Rollout:
        """Play attempts until one is final."""
        pending, name = playing.pending, playing.client.name

        def count(failed: Rollout) -> None:
            pending.failed[boundary_of(failed)] += 1
            playing.num_lost += failed.is_lost
            if ends_all(failed):
                pending.ended.append(failed)
            require_others(failed, f"environment {name}")

        # The slot is given back between attempts, so that others go on while a server recovers.
        return await play_with_attempts(
            lambda attempt: self._attempt(playing, attempt),
            first=playing.num_attempts + 1,
            on_failure=count,
            on_replaced=pending.replaced.append,
        )

    async def _attempt(self, playing: "_Playing", number: int) -> Rollout:
        playing.num_attempts = number
        pending, request = playing.pending, playing.request
        if self._settings.seed is not None:
            # The place of the rollout in the run, and not the time at which it is played. An
            # attempt that was lost with a process is played again with the same seed.
            place = (request.rollout_id, number - playing.num_lost)
            seed = derived_seed(self._settings.seed, *place)
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        key = AttemptKey(
            step=pending.batch + 1,
            environment=playing.client.name,
            group_id=request.group_id,
            index=request.index,
            attempt=number,
        )
        priority = to_begin(pending.batch, pending.position, request.index)
        taken = self.attempts.running(request.rollout_id, key, playing.holding, priority)
        attempt: Attempt | None = None
        policy: Policy | None = None
        try:
            async with taken as attempt:
                playing.attempt = attempt
                self._examples.begins(pending.drawn)
                policy = self._policies.policy(request.rollout_id, request.sampling)
                with hearing_of_scoring(attempt.stages.is_scored):
                    rollout = await playing.client.play(request, policy)
                attempt.stages.ends(rollout)
                return rollout
        except BaseException as error:
            ended = canceled_attempt(playing.client.name, request, policy, attempt=number)
            playing.leaves(ended, error, attempt)
            raise
        finally:
            if playing.attempt is attempt:
                playing.attempt = None


@dataclass(slots=True, eq=False)
class _Playing:
    """One rollout of an incomplete group."""

    pending: PendingGroup
    client: EnvironmentClient
    holding: Holding
    request: PlayRequest
    task: asyncio.Task[Rollout] = field(init=False)
    """Task that ends with the final attempt."""
    stopping: asyncio.Task[Rollout] | None = None
    """The previous task, which is too old and may take a while to end."""
    attempt: Attempt | None = None
    """The running attempt."""
    num_attempts: int = field(init=False)
    """Number of attempts so far, including earlier ones in this place."""
    num_lost: int = field(init=False)
    """Number of those that were lost with a process."""

    def __post_init__(self) -> None:
        """Continue from the attempts that were given up."""
        mine = self.request.group_id, self.request.index
        before = [one for one in self.pending.replaced if (one.group_id, one.index) == mine]
        self.num_attempts = max((one.attempt for one in before), default=0)
        self.num_lost = sum(one.is_lost for one in before)

    def oldest_version(self) -> WeightVersion | None:
        """Return the oldest weights that sampled any of its tokens, if known."""
        if self.attempt is not None:
            return self.attempt.stages.oldest_version
        if self.task.done() and not self.task.cancelled() and self.task.exception() is None:
            return oldest_version(self.task.result())
        return None

    def stop(self) -> None:
        """Stop the running attempt, or discard its result, because it is too old."""
        if self.attempt is not None:
            self.attempt.reason = OFF_POLICY
        self.stopping = self.task
        self.task.cancel()

    def has_stopped(self) -> None:
        """Record the outcome of the stopped task, if there is one."""
        before, self.stopping = self.stopping, None
        if before is not None and not before.cancelled() and before.exception() is None:
            self.pending.replaced.append(off_policy(before.result()))

    def leaves(self, ended: Rollout, error: BaseException, attempt: Attempt | None) -> None:
        """Record an attempt that `error` has ended; `ended`: the known part of it."""
        pending = self.pending
        if isinstance(error, asyncio.CancelledError):
            # One that is None waited for a slot, and nothing of it was too old.
            reason = ended.status_reason if attempt is None else attempt.reason
            is_replaced = reason == OFF_POLICY
            kept = pending.replaced if is_replaced else pending.ended
            kept.append(replace(ended, status_reason=reason))
            return
        name = type(error).__name__
        pending.ended.append(
            replace(
                ended,
                status=RolloutStatus.FAILED,
                status_reason=name,
                stop_reason=StopReason.ERROR,
                error=f"{name}: {error}",
            )
        )


def _unscored(group: Group, error: Exception) -> Group:
    """Return `group` with its scored rollouts as failed, because its group reward failed."""
    text = failure_text(error)
    rollouts = (
        replace(as_failed(rollout, text), tags={**rollout.tags, "failed_in": "reward"})
        if rollout.reward is not None
        else rollout
        for rollout in group.rollouts
    )
    return replace(group, rollouts=tuple(rollouts))
