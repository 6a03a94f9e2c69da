"""`run_training`: one prepared run from its first process to its summary.

A run is built from parts, and each part is a context that opens and closes itself:

    Ray cluster -> nodes -> gateway -> servers and ranks -> policies -> sampler and checkpointer
                                                                             -> the loop

The parts close in the opposite order, however the run ends. While the loop works, the processes are
watched, so that a death is reported as the cause and not as the failures that follow from it. When
trainer ranks die, the last two parts are opened again from a checkpoint; the others stay.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telescope_core.base import clock, interruptible, interrupts
from telescope_core.base.collector import rare_collections
from telescope_core.base.errors import ConfigError, ProcessDiedError, TelescopeError
from telescope_core.base.open_files import raise_limit
from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.types import WeightVersion
from telescope_core.chat.trouble import showing_troubles
from telescope_core.diagnosis import GrowingHistory, diagnose
from telescope_core.environments.running import CURRENT, HoldWatch, Request
from telescope_core.gateway.policies import RecordedEnvironment
from telescope_core.records import RunFolder
from telescope_core.records.events import drop_events
from telescope_core.records.logs import ProcessLog
from telescope_core.reports.train_report import write_train_report
from telescope_train.backends.protocol import RankDiedError
from telescope_train.batches.batch import Shards
from telescope_train.batches.packing import Packing
from telescope_train.checkpoints.folders import (
    RunCheckpoint,
    by_its_path,
    by_moving_it,
    complete_checkpoints,
    restore,
)
from telescope_train.checkpoints.resume import (
    drop_repeated,
    is_over,
    newest_to_go_on,
    open_run_folder,
    trained_before,
)
from telescope_train.checkpoints.saver import Checkpointer, SavedRun
from telescope_train.cluster.placement import bundles_of
from telescope_train.cluster.ray_cluster import HeadProcesses, cluster_has_gpus, ray_cluster
from telescope_train.cluster.supervision import supervised
from telescope_train.cluster_session import ClusterSession, open_nodes
from telescope_train.config.eval_folders import AFTER, BEFORE
from telescope_train.diagnostics.engine_check import UpdateCheck, check_engine
from telescope_train.diagnostics.rank_checks import SelfTest
from telescope_train.ending import end_early
from telescope_train.evals.beside import AfterEvals, EvalsBeside, LiveEvals, SharingAfterEvals
from telescope_train.loop import LoopParts, train
from telescope_train.observability.terminal import (
    LiveView,
    print_notes,
    print_resume,
    print_summary,
    restart_text,
)
from telescope_train.plan.node_checks import with_absolute_model
from telescope_train.plan.notes import notes_of
from telescope_train.plan.prepared import Prepared
from telescope_train.recording import open_recording, run_logs, run_secrets
from telescope_train.resources import (
    Resources,
    open_gateway,
    open_policies,
    open_processes,
    open_renderer,
    rank_settings,
    run_meters,
    supervising,
    threads_of,
    timing_ranks,
)
from telescope_train.restarts import Restarts, restart_at, run_with_restarts
from telescope_train.rollouts.held_out import require_untrained
from telescope_train.rollouts.mix import (
    Mix,
    left_out_of_training,
    make_sampler,
    training_environments,
)
from telescope_train.rollouts.sampled import BEGINNING
from telescope_train.rollouts.slots import Concurrency
from telescope_train.step.credit import credit_rules
from telescope_train.step.losses import Losses
from telescope_train.step.records import record_unfinished
from telescope_train.step.stream_rules import streams_gradients
from telescope_train.step.throughput import Machine
from telescope_train.summary import make_summary, require_disjoint
from telescope_train.trainer.ray_ranks import RayRanks

RANK_DEATH_SHOWS_WITHIN_S = 5.0
"""Seconds after a failure within which the death of a rank is still taken for its cause: Ray tells
it at once, and every rank is asked every second."""
DEFAULT_HIDDEN_SIZE = 1024
"""Hidden size if a model's config has none; it affects only the costs for packing."""
DIAGNOSED_EACH, DIAGNOSED_EVERY, DIAGNOSED_LONG = 20, 5, 500
"""Early steps are diagnosed one by one, later ones at intervals, because it takes milliseconds. In
a run of more than `DIAGNOSED_LONG` steps the intervals grow with it: all steps are looked at."""
_LOGGER = logging.getLogger(__name__)


def run_training(prepared: Prepared) -> dict[str, Any]:
    """Train and return the summary, which the run folder also holds.

    Raises ConfigError, before anything is written, when the run cannot work on this machine. A
    failure later marks the run folder as failed and leaves everything in it readable.
    """
    prepared.require_sound()
    raise_limit()
    with interrupts.taken():
        return _recorded_run(prepared)


def _recorded_run(prepared: Prepared) -> dict[str, Any]:
    config, point = prepared.config, prepared.resume
    with ExitStack() as opening:
        # A run that has a folder records there how it ended, also after a signal.
        opening.enter_context(interrupts.held())
        folder = open_run_folder(config, point, prepared.environments.records, prepared.inputs)
        folder.hide = run_secrets(prepared)
        log = run_logs(config, folder).begin("driver", secrets=folder.hide)
        _take_all_steps(prepared, folder, log, opening)
    with interrupts.held():
        try:
            summary = make_summary(config, folder)
            folder.write_summary(summary)
            require_disjoint(summary)
            folder.finish()
        except (OSError, TelescopeError) as error:
            ended = end_early(config, folder, error)
            if ended is error:
                raise
            raise ended from error
        write_train_report(folder)
        print_summary(summary)
    return summary


def _take_all_steps(
    prepared: Prepared, folder: RunFolder, log: ProcessLog, opening: ExitStack
) -> None:
    """Train, and record in the folder how an early end came about.

    `opening` is closed once a signal may end it.
    """
    config, point = prepared.config, prepared.resume
    try:
        opening.close()
        interrupts.raise_if_asked()
        announce(prepared, begins_again=point is None and bool(folder.info().resumes))
        if point is not None and is_over(config, point.checkpoint):
            drop_repeated(point, folder)
        else:
            _on_cluster(prepared, folder)
        _LOGGER.info("the run has taken its last step")
    except BaseException as error:
        with interrupts.held():
            ended = end_early(config, folder, error)
        if ended is error:
            raise
        raise ended from error
    finally:
        log.close()


def announce(prepared: Prepared, *, begins_again: bool = False) -> None:
    """Print where the run begins, and its notes."""
    point = prepared.resume
    if point is not None:
        print_resume(point.lines)
    if begins_again:
        print_notes(["the earlier try saved nothing, so the run begins again in its folder"])
    print_notes(notes_of(prepared))


def _on_cluster(prepared: Prepared, folder: RunFolder) -> None:
    config = prepared.config
    bundles = bundles_of(config, prepared.device)
    with (
        ray_cluster(
            config.ray, bundles, debug=config.run.debug, keep_logs=folder.logs_path / "ray"
        ) as head,
        rare_collections(),
    ):
        if config.ray.ray_address is not None:
            prepared = prepared.on_cluster(has_gpus=cluster_has_gpus())
            prepared = replace(prepared, config=with_absolute_model(prepared.config))
        try:
            interruptible.run(_run(prepared, folder, head))
        except Exception:
            # If a process has died, its death is the cause of other errors.
            head.check()
            raise


async def _run(prepared: Prepared, folder: RunFolder, head: HeadProcesses) -> None:
    """Open every part, train, and close every part in any case."""
    config = prepared.config
    names = [entry.name for entry in config.environments]
    point = prepared.resume
    before = [row for row in folder.metrics() if point and row["step"] <= point.checkpoint.step]
    with (
        ExitStack() as closing,
        LiveView(config.run.number_of_steps, names, rows_before=before, hide=folder.hide) as view,
        showing_troubles(view.warn),
    ):
        async with open_nodes(prepared, folder) as session:
            renderer = await open_renderer(prepared, folder, view)
            async with (
                open_gateway(prepared) as gateway,
                open_recording(
                    prepared,
                    folder,
                    view,
                    reached_at=session.traces_at(config),
                    secret=session.secret,
                ) as recording,
                open_processes(
                    prepared, folder, session, recording.traces_endpoint, view=view
                ) as processes,
                open_policies(
                    prepared,
                    folder,
                    processes,
                    recording,
                    renderer=renderer,
                    gateway=gateway,
                    warn=view.warn,
                ) as policies,
            ):
                resources = Resources(
                    prepared=prepared,
                    folder=folder,
                    view=view,
                    processes=processes,
                    policies=policies,
                    head=head,
                )
                try:
                    await _while_watched(resources, session)
                finally:
                    # No signal cuts short what is closed from here on.
                    closing.enter_context(interrupts.held())


async def _while_watched(resources: Resources, session: ClusterSession) -> None:
    """Train, while all processes of the run are watched."""
    policies, config = resources.policies, resources.prepared.config
    if apart := session.logs.nodes:
        resources.view.note(f"logs are fetched from {', '.join(apart)}")
    watches = [
        *supervising(resources),
        timing_ranks(resources),
        session.logs.run(),
        resources.head.watch(),
    ]
    watches.append(Concurrency.from_config(config, policies.attempts.slots, policies.pool).run())
    if (meters := run_meters(resources)) is not None:
        watches.append(meters.run())
    await supervised(_train(resources), watches)
    if meters is not None:
        # Also a run that is shorter than the interval has what happened in it.
        await meters.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """The parts that are ready before the first step, and stay when ranks are restarted."""

    resources: Resources
    evals: EvalsBeside
    mix: Mix
    packing: Packing
    losses: Losses
    updates: UpdateCheck


async def _train(resources: Resources) -> None:
    """Prepare all parts of the loop, take the steps, and evaluate."""
    prepared, view = resources.prepared, resources.view
    evals, ranks = prepared.config.evals, resources.processes.ranks
    grace_s = RANK_DEATH_SHOWS_WITHIN_S
    ready = await supervised(_get_ready(resources), [ranks.watch()], grace_s=grace_s)
    restarts = Restarts(prepared.config.ray.max_trainer_restarts)
    await run_with_restarts(
        None if prepared.resume is None else prepared.resume.checkpoint,
        lambda begun: supervised(_take_steps(ready, begun), [ranks.watch()], grace_s=grace_s),
        go_back=lambda died: _go_back(resources, died),
        died=partial(_note_death, resources, restarts),
    )
    if evals.eval_after_training:
        view.phase("evals after training")
        await ready.evals.whole_round(AFTER, prepared.config.run.number_of_steps)


def _note_death(resources: Resources, restarts: Restarts, died: RankDiedError) -> None:
    # If Ray itself has died, new ranks cannot be started.
    resources.head.check()
    restarts.count(died, resources.folder.last_step())


async def _get_ready(resources: Resources) -> _Ready:
    """Open all parts of the loop, load the first weights everywhere, and run the self-tests."""
    prepared, folder, view = resources.prepared, resources.folder, resources.view
    config, ranks = prepared.config, resources.processes.ranks
    publisher, environments = resources.policies.publisher, prepared.environments
    evals = _evals(resources)
    # Before the servers are waited for, since it may refuse an environment.
    training = _recorded(environments.opened.training, view)
    played = evals.environments
    mix = await training_environments(config, training, played, environments.records)
    await publisher.connect()
    _note_examples(prepared, folder, mix)
    for line in left_out_of_training(prepared.config.environments, mix.descriptions):
        view.note(line)
    declared = mix.descriptions.items()
    folder.note_reward_ranges(
        {name: (one.reward_min, one.reward_max) for name, one in declared},
        weights={name: one.reward_weights for name, one in declared},
    )
    # At the first weights, so that a server whose version is none of a checkpoint has those.
    await resources.policies.opponents.begin(publisher.send_to)
    first_version = await _restore(resources)
    packing = _packing(prepared, mix, ranks)
    agreement = await _prove(resources, mix, packing)
    drop_repeated(prepared.resume, folder)
    if config.evals.eval_before_training and not first_version:
        view.phase("evals before training")
        await evals.whole_round(BEFORE, first_version)
    losses = Losses(view.warn)
    return _Ready(
        resources=resources,
        evals=evals,
        mix=mix,
        packing=packing,
        losses=losses,
        updates=UpdateCheck(
            agreement,
            first_version,
            is_exact=config.scheduling.in_flight_update != "continue"
            and not (config.trainer.use_lora and config.trainer.lora_dropout),
        ),
    )


async def _take_steps(ready: _Ready, begun: RunCheckpoint | None) -> None:
    """Take every step after the checkpoint `begun`, whose weights ranks and servers have.

    None = from the beginning. Can be called again once it has ended.
    """
    resources, mix = ready.resources, ready.mix
    prepared, folder, view = resources.prepared, resources.folder, resources.view
    config, ranks, source = prepared.config, resources.processes.ranks, resources.policies.source
    evals = ready.evals
    attempts = resources.policies.attempts
    # Each task that plays a place inherits it: this process itself calls the author's function.
    hold_watch = HoldWatch()
    if config.rollout.should_accept_fn is not None:
        CURRENT.set(Request(hold_watch.start(), call=0))
    sampler = make_sampler(config, mix, source, attempts, prepare=source.prepare)
    state = BEGINNING if begun is None else begun.sampler_state()
    drop_events(folder.events_path, after=state.first_repeated_batch, is_repeated=state.repeated())
    sampler.restore(state)
    records, started_at = prepared.environments.records, folder.info().started_at
    checkpointer = Checkpointer(
        SavedRun.from_config(config, records, prepared.inputs, started_at=started_at),
        ranks,
        sampler,
        resumed_from=None if begun is None else begun.path,
        timeline=resources.policies.recording.timeline,
    )
    known: dict[str, float] = {}
    thrown_out = attempts.slots.num_thrown_out

    def take_counts() -> dict[str, float]:
        nonlocal thrown_out
        before, thrown_out = thrown_out, attempts.slots.num_thrown_out
        counts = evals.take_counts() | {"servers/lost": float(resources.policies.pool.num_lost)}
        if config.scheduling.follow_kv_cache_use:
            counts["servers/thrown_out"] = float(thrown_out - before)
        return counts

    def take_known() -> dict[str, float]:
        known.clear()
        known.update(evals.take_known())
        return known

    parts = LoopParts(
        config=config,
        rules=credit_rules(config, mix, vocab_size=prepared.facts.vocab_size),
        packing=ready.packing,
        sampler=sampler,
        trainer=ranks,
        publisher=AfterEvals(publisher=resources.policies.publisher, evals=evals),
        folder=folder,
        machine=_machine(prepared, ranks),
        first_version=0 if begun is None else begun.step,
        streams_gradients=streams_gradients(config),
        timeline=resources.policies.recording.timeline,
        gpu_sharing=SharingAfterEvals(gpu_sharing=resources.policies.gpu_sharing, evals=evals),
        losses=ready.losses,
        take_counts=take_counts,
        take_known=take_known,
        held_out=evals.questions,
    )
    view.phase("training")
    try:
        await evals.go_on(parts.first_version)
        await train(parts, after_step=_after_step(ready, checkpointer, known))
        view.phase("saving the checkpoint")
        # Before the evals end: what was trained is safe then, whatever becomes of them.
        if begun is None or not begun.ends(config.run.number_of_steps):
            folder.require_here()
            await checkpointer.finish(config.run.number_of_steps)
        await evals.finish()
    finally:
        await evals.close()
        await checkpointer.close()
        record_unfinished(folder, await sampler.close())
        resources.policies.recording.events.flush()
        hold_watch.stop()


async def _go_back(resources: Resources, died: RankDiedError) -> RunCheckpoint | None:
    """Restart the ranks, with everything as at the newest complete checkpoint.

    Returns the checkpoint; None = as at the beginning of the run.
    """
    prepared, folder, view = resources.prepared, resources.folder, resources.view
    ranks, publisher = resources.processes.ranks, resources.policies.publisher
    # First of all, because servers in the middle of an update wait for them.
    await ranks.close()
    # Until new ranks have their weights, there are none for a server that comes back.
    await publisher.weights_change()
    # Without its folder it would begin at step 0, in a new one that is no run's.
    folder.require_here()
    begun = newest_to_go_on(prepared.config, prepared.resume)
    restart = restart_at(begun, died, folder.last_step(), time_s=clock.now_s())
    view.warn(restart_text(restart))
    folder.go_back(restart)
    view.go_back(folder.metrics())
    await resources.policies.gpu_sharing.trainer_works()
    try:
        await ranks.start_again(rank_settings(prepared), num_threads=threads_of(prepared))
    except ConfigError as error:
        # Another try would wait for the same room: a node is gone, and the others are full.
        raise ProcessDiedError(f"{died}. The ranks cannot start again: {error}") from None
    # They take a while to start. What they write makes the folder anew, but not its `run.json`.
    folder.require_here()
    if begun is not None:
        await restore(ranks, begun, by_moving_it)
    await resources.policies.gpu_sharing.servers_work()
    await publisher.restore(restart.step)
    return begun


def _evals(resources: Resources) -> EvalsBeside:
    prepared, policies = resources.prepared, resources.policies
    live = LiveEvals(
        config=prepared.config,
        environments=_recorded(prepared.environments.opened.evals, resources.view),
        policies=policies.eval_source,
        folder=resources.folder,
        concurrency=prepared.config.inference.max_num_seqs,
    )
    return EvalsBeside(
        live,
        policies.eval_servers,
        policies.publisher,
        show=resources.view.note,
        on_result=policies.recording.evaluated,
    )


def _after_step(
    ready: _Ready, checkpointer: Checkpointer, known: Mapping[str, float]
) -> Callable[[int, dict[str, float]], Awaitable[None]]:
    """Return the work after each step: show it, report problems once, evaluate, save.

    `known`: the results of evals that have been written into the metrics of the step.
    """
    resources, evals = ready.resources, ready.evals
    view, policies = resources.view, resources.policies
    recording = policies.recording
    history = GrowingHistory(resources.folder.metrics())
    said: set[tuple[str, str | None]] = set()

    async def after_step(step: int, row: dict[str, float]) -> None:
        resources.folder.require_here()
        view.update(row)
        recording.row(row)
        ready.updates.note(step, row)
        history.add({**row, **known})
        if is_diagnosed(step, history.num_steps):
            for finding in diagnose(history.present):
                key = (finding.rule, finding.environment)
                if key not in said and not finding.is_over:
                    said.add(key)
                    view.warn(finding.text)
        await policies.opponents.after_step(step, policies.publisher.send_to)
        await evals.after_step(step)
        await checkpointer.after_step(step)

    return after_step


def is_diagnosed(step: int, num_steps: int) -> bool:
    """Return whether a run that has taken `num_steps` is diagnosed after this one."""
    every = DIAGNOSED_EVERY << max(0, (num_steps // DIAGNOSED_LONG).bit_length() - 1)
    return num_steps <= DIAGNOSED_EACH or not step % every


def _note_examples(prepared: Prepared, folder: RunFolder, mix: Mix) -> None:
    """Record held-out examples; raise if an earlier part of the run trained on one."""
    point = prepared.resume
    before = set[tuple[str, str]]() if point is None else trained_before(point, folder)
    require_untrained(mix.held_out, before)
    held_out = [(name, one) for name, held in mix.held_out.items() for one in held.ids]
    folder.write_examples(held_out=held_out, trained_before=before or ())


async def _restore(resources: Resources) -> WeightVersion:
    """Load the initial weights into ranks and servers; returns their version."""
    prepared, opponents = resources.prepared, resources.policies.opponents
    resume, publisher = prepared.resume, resources.policies.publisher
    if resume is None:
        if prepared.config.model.model_dtype == "bfloat16" and prepared.dtype == "float32":
            # Servers read the files as they are; the trainer has rounded what they hold.
            await publisher.publish(0)
        return 0
    ranks = resources.processes.ranks
    how = by_moving_it if resume.is_same_run else by_its_path

    async def go_to(checkpoint: RunCheckpoint) -> None:
        await publisher.weights_change()
        await restore(ranks, checkpoint, how)
        await publisher.publish(checkpoint.step)

    last = resume.checkpoint
    held = opponents.kept.at(last.step)
    found = await asyncio.to_thread(complete_checkpoints, last.path.parent) if held else ()
    saved = {one.step: one for one in found if one.manifest.run == last.manifest.run}
    for version in sorted({*held} & {*saved} - {last.step}):
        await go_to(saved[version])
        await publisher.send_to(opponents.pools[held.index(version)])
    await go_to(last)
    for server, version in enumerate(held):
        if version and (version == last.step or version not in saved):
            await publisher.send_to(opponents.pools[server])
            if version != last.step:
                resources.view.warn(
                    f"no checkpoint holds the older version {version}; in its place plays version "
                    f"{last.step}, with which the run goes on"
                )
    return last.step


async def _prove(resources: Resources, mix: Mix, packing: Packing) -> SelfTest:
    """Run and return the last self-test, and show and record all of them."""
    ranks, prepared = resources.processes.ranks, resources.prepared
    quantization = prepared.config.inference.inference_quantization

    async def logprobs(shards: Shards) -> list[list[NDArray[np.float32]]]:
        async with resources.policies.gpu_sharing.trainers_turn():
            return await ranks.logprobs(shards)

    agreement = await check_engine(
        resources.policies.source,
        {name: one.sampling for name, one in mix.playing.items()},
        packing,
        logprobs,
        dtype=prepared.dtype if quantization == "none" else quantization,
        why_silent=lambda: next(
            (x.reason for x in resources.policies.pool.servers if x.reason), ""
        ),
    )
    tests = [*ranks.self_tests, agreement]
    resources.view.phase("self-tests passed: " + ", ".join(test.text for test in tests))
    if (reason := ranks.why_nothing_is_shared) is not None:
        resources.view.phase(f"prompts are computed for each rollout: {reason}")
    if ranks.activations:
        resources.view.phase(ranks.activations)
    resources.folder.write_self_tests([asdict(test) for test in tests])
    return agreement


def _packing(prepared: Prepared, mix: Mix, ranks: RayRanks) -> Packing:
    return Packing(
        seq_len=prepared.config.trainer.seq_len,
        num_ranks=ranks.num_ranks,
        hidden_size=prepared.facts.hidden_size or DEFAULT_HIDDEN_SIZE,
        max_tokens=max(one.sampling.max_tokens for one in mix.playing.values()),
        share_prefixes=ranks.why_nothing_is_shared is None,
    )


def _machine(prepared: Prepared, ranks: RayRanks) -> Machine:
    return Machine(
        facts=prepared.facts,
        seq_len=prepared.config.trainer.seq_len,
        hidden_size=prepared.facts.hidden_size or DEFAULT_HIDDEN_SIZE,
        gpu_name=ranks.gpu_name,
        ranks_per_shard=ranks.layout.ranks_per_shard,
    )


def _recorded(
    clients: Mapping[str, EnvironmentClient], view: LiveView
) -> dict[str, EnvironmentClient]:
    return {name: RecordedEnvironment(one, note=view.note) for name, one in clients.items()}
