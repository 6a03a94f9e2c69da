"""Evals beside the steps of a run: each round is a task, with one version of the weights.

    after_step(v)      begins the round that is due, in a task; a round that is still going on is
        |              left alone, and the new one is skipped, with the reason
        v
    round of v         plays its evals one after the other; records a point for each
        |
        v
    publish(v + 1)     with shared servers: waits for the round, so that all of it is of version v

With servers of their own, evals get the weights once, before their round, and keep them until the
next one: neither publishing nor training waits for them.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from telescope_core.base import clock
from telescope_core.base.errors import TelescopeError
from telescope_core.base.protocols import EnvironmentClient, PolicySource
from telescope_core.base.secret_names import secret_values
from telescope_core.base.types import Sampling, Split, WeightVersion
from telescope_core.evals import EvalFolder, EvalResult, EvalSettings, read_results, run_eval
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.reports.before_after import eval_folder_name
from telescope_train.cluster.colocation import GpuSharing, SharedGpu
from telescope_train.cluster.supervision import cancel
from telescope_train.config.eval_folders import (
    due_evals,
    eval_path,
    missing_evals,
    step_tag,
)
from telescope_train.config.schema import EvalEntry, TrainConfig
from telescope_train.evals.servers import EvalServers
from telescope_train.observability.eval_numbers import eval_numbers
from telescope_train.rollouts.held_out import eval_split, num_played, question_of
from telescope_train.weights.publish import WeightPublisher


class PlayedEval(NamedTuple):
    """A completed eval."""

    result: EvalResult
    versions: frozenset[WeightVersion]
    """Versions of the weights that sampled its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEvals:
    """The evals of a run. `play` plays one and records it in its folder."""

    config: TrainConfig
    environments: Mapping[str, EnvironmentClient]
    """Name of the eval entry -> its environment."""
    policies: PolicySource
    folder: RunFolder
    concurrency: int
    """Most rollouts per server that are played at once."""
    questions: set[int] = field(default_factory=set[int])
    """`question_of` of the examples that were played so far."""

    def due(self, step: int) -> list[EvalEntry]:
        """Return the evals that are due after `step`."""
        return due_evals(self.config, step)

    def unfinished(self, step: int) -> list[EvalEntry]:
        """Return the evals that were due after `step` and have no result."""
        return self.missing(self.due(step), step_tag(step))

    def missing(self, entries: Sequence[EvalEntry], tag: str) -> list[EvalEntry]:
        """Return those of `entries` that have no result of this `tag` that can be read."""
        return missing_evals(entries, self.folder, tag)

    async def play(self, entry: EvalEntry, tag: str, *, num_servers: int = 1) -> PlayedEval:
        """Play one eval on the given number of servers; removes the files of an interrupted one."""
        description = await self.environments[entry.name].describe()
        split = eval_split(entry, description)
        settings = eval_settings(
            entry,
            self.config,
            num_examples=num_played(entry, description.num_examples.get(split)),
            concurrency=self.concurrency * num_servers,
            split=split,
        )
        path = eval_path(self.folder, entry, tag)
        if path.exists() and not read_results([path]).results:
            shutil.rmtree(path)
        self.folder.require_here()
        manifest = {"tag": tag, **entry.model_dump(mode="json"), "split": split}
        folder = EvalFolder.create(path, manifest=manifest)
        folder.if_gone = "bring it back, or begin again"  # as for the run that it is part of
        folder.hide = secret_values(entry.env) | secret_values(os.environ)
        versions: set[WeightVersion] = set()

        def record(row: RolloutRow) -> None:
            folder.append(row)
            known = (row.oldest_version, row.newest_version)
            versions.update(version for version in known if version is not None)
            question = question_of(row.messages, row.num_turns, row.golden_answers)
            if question is not None:
                self.questions.add(question)

        try:
            result = await run_eval(
                self.environments[entry.name],
                self.policies,
                settings,
                model=f"{self.config.run.name} ({tag})",
                on_rollout=record,
                on_attempt=folder.append_attempt,
            )
        except BaseException as error:
            folder.fail(f"{type(error).__name__}: {error}")
            raise
        environment_record = self.folder.info().environments.get(entry.name)
        result = replace(result, environment_record=environment_record)
        folder.finish(result)
        return PlayedEval(result, frozenset(versions))


def eval_settings(
    entry: EvalEntry,
    config: TrainConfig,
    *,
    num_examples: int,
    concurrency: int,
    split: Split = Split.EVAL,
) -> EvalSettings:
    """Return the settings of the eval `entry`, completed from `[rollout]`."""
    return EvalSettings(
        num_examples=num_examples,
        rollouts=entry.rollouts,
        ks=entry.pass_k,
        sampling=Sampling(
            max_tokens=entry.max_tokens or config.rollout.max_tokens,
            temperature=entry.temperature,
            top_p=entry.top_p,
            top_k=entry.top_k or -1,
            min_p=entry.min_p,
            repetition_penalty=entry.repetition_penalty,
            stop=config.rollout.stop,
            include_stop_str_in_output=(
                bool(config.rollout.stop) and config.rollout.include_stop_str_in_output
            ),
            seed=config.run.seed if config.rollout.seed_sampling else None,
        ),
        concurrency=concurrency,
        split=split,
        deadline_s=config.rollout.rollout_timeout_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    entries: Sequence[EvalEntry]
    tag: str
    version: WeightVersion


class EvalsBeside:
    """Plays evals before, beside and after training; it must be closed in any case."""

    def __init__(
        self,
        evals: LiveEvals,
        servers: EvalServers,
        publisher: WeightPublisher,
        *,
        show: Callable[[str], None],
        on_result: Callable[[EvalPoint, EvalResult], None] = lambda point, result: None,
    ) -> None:
        """`show`: called with the outcome of each eval; `on_result`: with each that has numbers."""
        self._evals = evals
        self._servers = servers
        self._publisher = publisher
        self._show = show
        self._on_result = on_result
        self._step: WeightVersion = 0
        self._playing: asyncio.Task[None] | None = None
        self._begun_tag = ""
        """Tag of the last round that was started."""
        self._known = dict[str, float]()
        """Results since the last step, as metrics of the next one."""
        self._counts = dict[str, float]()
        """Lag and losses of evals since the last step, likewise."""

    @property
    def environments(self) -> Mapping[str, EnvironmentClient]:
        """Name of each eval -> its environment."""
        return self._evals.environments

    @property
    def questions(self) -> Set[int]:
        """`question_of` of the examples that evals have played so far; it grows with each eval."""
        return self._evals.questions

    @property
    def folder(self) -> RunFolder:
        """Folder in which points are recorded."""
        return self._evals.folder

    async def whole_round(self, tag: str, version: WeightVersion) -> None:
        """Play every eval while nothing is trained; raises the error of one that fails.

        Evals that already have a result of this `tag`, from before a resume, are skipped.
        """
        self._step = version
        await self._send(version)
        self._servers.use_all()
        try:
            for entry in self._evals.missing(self._evals.config.evals.evals, tag):
                self._servers.playing = eval_folder_name(entry.name, tag)
                num_servers = self._servers.num_servers
                played = await self._evals.play(entry, tag, num_servers=num_servers)
                self._record(_Round(entries=(entry,), tag=tag, version=version), entry, played)
        finally:
            self._servers.use_own()

    async def go_on(self, step: int) -> None:
        """Start the evals of `step` that an earlier part of the run left unfinished."""
        self._step = step
        if step:
            await self._begin(self._evals.unfinished(step), step)

    async def after_step(self, step: int) -> None:
        """Start the evals that are due, now that the weights of `step` are live."""
        self._step = step
        await self._begin(self._evals.due(step), step)

    def take_known(self) -> dict[str, float]:
        """Return the results since the last call."""
        known, self._known = self._known, {}
        return known

    def take_counts(self) -> dict[str, float]:
        """Return the largest lag of results since the last call, and how many were missed."""
        counts, self._counts = self._counts, {}
        return counts

    async def leave_servers(self) -> None:
        """Return when no round needs the present weights of the servers for rollouts.

        If none of these servers is left, it is not waited for: they only come back with new
        weights. The points of the round then say which weights its tokens are of.
        """
        playing = self._playing
        if playing is None or not self._servers.are_shared:
            return
        down = asyncio.create_task(self._servers.rollouts.until_down())
        try:
            await asyncio.wait([playing, down], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel([down])

    async def finish(self) -> None:
        """Wait for the current round."""
        playing, self._playing = self._playing, None
        if playing is not None:
            await playing

    async def close(self) -> None:
        """End the current round, if there is one; a run that resumes at its step repeats it.

        Another part of the run may follow, with `go_on`.
        """
        playing, self._playing = self._playing, None
        if playing is not None:
            await cancel([playing])

    async def _begin(self, entries: Sequence[EvalEntry], step: int) -> None:
        if self._playing is not None and self._playing.done():
            await self.finish()  # which raises what is no failure of an eval
        if not entries:
            return
        due = _Round(entries=entries, tag=step_tag(step), version=step)
        if self._playing is not None:
            self._skip(due, f"the evals of {self._begun_tag} were still going on")
            return
        await self._send(step)
        if self._servers.is_down:
            self._skip(due, f"no server for evals answers: {self._servers.why_down}")
            return
        self._begun_tag = due.tag
        self._playing = asyncio.create_task(self._play(due))

    async def _send(self, version: WeightVersion) -> None:
        own = self._servers.own
        if own is not None:
            await self._publisher.send_to(own)
            assert own.is_down or own.version == version, "evals were to get the live weights"

    async def _play(self, due: _Round) -> None:
        # Requests that run are not stopped for those of rollouts, so what is shared keeps room.
        num_servers = 1 if self._servers.are_shared else self._servers.num_servers
        for entry in due.entries:
            self._servers.playing = eval_folder_name(entry.name, due.tag)
            try:
                played = await self._evals.play(entry, due.tag, num_servers=num_servers)
            except asyncio.CancelledError:
                stopped = "it was stopped with the steps that it was beside"
                self._note(self._point(due, entry, EvalPointState.FAILED, stopped))
                raise
            # An error that ends an eval need not end the training.
            except TelescopeError as error:
                reason = f"{type(error).__name__}: {error}"
                self._note(self._point(due, entry, EvalPointState.FAILED, reason))
            else:
                self._record(due, entry, played)

    def _record(self, due: _Round, entry: EvalEntry, played: PlayedEval) -> None:
        result, versions = played.result, tuple(sorted(played.versions))
        state, reason = EvalPointState.DONE, ""
        if not result.num_scored:
            causes = ", ".join(result.failures)
            lost = f"; a server was lost: {self._servers.why_down}" if self._servers.is_down else ""
            state = EvalPointState.FAILED
            reason = f"none of {result.num_failed} rollouts was scored ({causes}){lost}"
        elif set(versions) - {due.version}:
            state = EvalPointState.MIXED
            reason = f"tokens are of the weights {', '.join(map(str, versions))}"
        point = replace(
            self._point(due, entry, state, reason),
            versions=versions,
            num_scored=result.num_scored,
            num_failed=result.num_failed,
            reward=None if result.reward is None else result.reward.mean,
            pass_at={k: estimate.mean for k, estimate in result.pass_at.items() if estimate},
            duration_s=result.duration_s,
        )
        self._note(point)
        if result.num_scored:
            numbers = eval_numbers(point, result)
            self._known |= {f"eval/{entry.name}/{key}": value for key, value in numbers.items()}
            self._on_result(point, result)

    def _skip(self, due: _Round, reason: str) -> None:
        for entry in due.entries:
            self._note(self._point(due, entry, EvalPointState.SKIPPED, reason))

    def _point(
        self, due: _Round, entry: EvalEntry, state: EvalPointState, reason: str
    ) -> EvalPoint:
        return EvalPoint(
            time_s=clock.now_s(),
            name=entry.name,
            tag=due.tag,
            folder=eval_folder_name(entry.name, due.tag),
            version=due.version,
            state=state,
            reason=reason,
            lag_steps=self._step - due.version,
        )

    def _note(self, point: EvalPoint) -> None:
        lag_steps = max(self._counts.get("eval/lag_steps", 0.0), float(point.lag_steps))
        self._counts["eval/lag_steps"] = lag_steps
        if point.state in (EvalPointState.SKIPPED, EvalPointState.FAILED):
            self._counts["eval/missing"] = self._counts.get("eval/missing", 0.0) + 1.0
        self.folder.log_eval_point(point)
        self._show(point.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingAfterEvals(GpuSharing):
    """Turns on a shared GPU, in which a server stays awake while evals use it."""

    gpu_sharing: GpuSharing
    evals: EvalsBeside

    async def trainer_works(self) -> None:
        """Wait for the evals on these servers, and give the trainer the GPU."""
        if isinstance(self.gpu_sharing, SharedGpu):
            await self.evals.leave_servers()
        await self.gpu_sharing.trainer_works()

    async def servers_work(self) -> None:
        """Give the servers the GPU."""
        await self.gpu_sharing.servers_work()


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterEvals:
    """A publisher that waits for evals which need the old weights; see `loop.Publisher`."""

    publisher: WeightPublisher
    evals: EvalsBeside

    async def weights_change(self) -> None:
        """Announce that the ranks' weights are about to change."""
        await self.publisher.weights_change()

    async def publish(self, version: WeightVersion) -> None:
        """Publish `version` once no eval uses the weights that it replaces."""
        await self.evals.leave_servers()
        await self.publisher.publish(version)
