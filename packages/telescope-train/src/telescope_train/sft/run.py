"""`run_sft`: supervised training on environments' gold answers or on a dataset.

The same samples, packing and trainer ranks as reinforcement learning, with another loss.
"""

import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from telescope_core.base import interruptible, interrupts
from telescope_core.base.errors import ConfigError, NoRoomError, NotWrittenError, TelescopeError
from telescope_core.base.folders import why_not_writable
from telescope_core.records import RunFolder
from telescope_core.records.logs import Logs
from telescope_core.records.room import not_written
from telescope_core.settings.config import save_resolved
from telescope_train.backends import layout_of
from telescope_train.backends.protocol import BackendSettings, GpuMemoryError, Ranks
from telescope_train.batches.batch import PackedBatch, StepPlan, TrainingSample
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.chat.supervised import end_note
from telescope_train.chat.template import read_chat_template
from telescope_train.chat.tokenizer import load_stop_ids, load_tokenizer
from telescope_train.checkpoints.folders import RunCheckpoint, restore
from telescope_train.checkpoints.resume import LATEST
from telescope_train.checkpoints.saver import Checkpointer
from telescope_train.cluster.network import Network
from telescope_train.cluster.placement import OWN_CLUSTER_S, Bundle, RankRoom, RoomRequest, reserve
from telescope_train.cluster.ray_cluster import ray_cluster
from telescope_train.config.schema import ModelSection, RaySection
from telescope_train.config.trainer_section import smaller_rank
from telescope_train.models.device import machine_device, threads_of
from telescope_train.models.facts import UNKNOWN_FACTS, context_problem, read_model_facts
from telescope_train.models.location import require_replaceable
from telescope_train.models.tiny import character_tokenizer, make_tiny_model, require_tiny
from telescope_train.observability.trackers.logins import login_problem
from telescope_train.observability.trackers.tracker import TrackedRun, load_tracker, names_in_use
from telescope_train.observability.trackers.tracking import Tracking
from telescope_train.plan.checks.megatron import megatron_model_problems
from telescope_train.plan.checks.model import look_at_model, rounding_notes
from telescope_train.plan.checks.trainer import lora_targets, shared_rows_problem
from telescope_train.sft.checkpoints import (
    checkpointer,
    ended_text,
    how_to_go_on,
    log_folder,
    moment_of,
    no_half_checkpoints,
    require_same_rows,
    require_steps_left,
    resume_notes,
    sft_resume_point,
)
from telescope_train.sft.config import SftConfig, in_steps, settings_found, trainer_section
from telescope_train.sft.examples import GoldSamples, dataset_samples, gold_samples
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.trainer.ray_ranks import RayRanks
from telescope_train.trainer.worker import TrainerWorker

TRUNCATED, DROPPED = "examples/truncated", "examples/dropped"
RECORDED = (
    *("loss/total", "entropy", "grad_norm", "learning_rate", "optimizer/skipped"),
    *(f"activations/{name}" for name in ("recomputed_layers", "kept_gib", "room_gib")),
    *("examples/learnt", TRUNCATED, DROPPED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRow:
    """One row of measurements."""

    step: int
    """Number of steps taken."""
    num_steps: int
    """Number of steps of the whole training."""
    accuracy: float
    """Expected share of sampled answers that equal the gold one, on held-out examples."""
    metrics: dict[str, float]
    """Everything recorded, `accuracy` and `accuracy/<environment>` included."""


def run_sft(
    config: SftConfig,
    *,
    on_row: Callable[[SftRow], None] = lambda row: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Path:
    """Train, write the model to `config.output` and return that folder.

    `tell` gets a line about settings that change nothing, and for each environment with secrets.

    Settings, measurements and checkpoints go to `<output>-log/`. Nothing is written before the
    settings, the tokenizer and the environments have proved usable, nor while another training
    writes to the same output.
    """
    with interrupts.taken():
        try:
            return _run_sft(config, on_row, tell)
        except interrupts.Interrupted as error:
            with interrupts.held():
                told = ended_text(config, f"{error}")
                raise interrupts.Interrupted(error.number, told) from error


def _run_sft(
    config: SftConfig, on_row: Callable[[SftRow], None], tell: Callable[[str], None]
) -> Path:
    output, folder = Path(config.output), log_folder(config).absolute()
    prepared = prepare(config, tell)
    config, point = prepared.config, prepared.point
    goes_on = config.resume_from_checkpoint == LATEST
    run = RunFolder.begin(folder, name=output.name, has_ended_elsewhere=goes_on)
    try:
        if config.make_tiny_model and point is None:
            make_tiny_model(config.model, seed=config.seed)
        save_resolved(config, folder / "config.json")
        with (
            no_half_checkpoints(config),
            _advising_on_room(config),
            _tracked(config, run, point, on_row, tell) as told,
        ):
            interruptible.run(_train_and_export(config, prepared.samples, point, run, told))
    except BaseException as error:
        with interrupts.held(), suppress(OSError, NoRoomError):
            if isinstance(error, KeyboardInterrupt):
                with suppress(TelescopeError):
                    run.interrupt(f"{error}")
            else:
                run.fail(f"{type(error).__name__}: {error}")
        raise
    run.finish()
    return output


@contextmanager
def _tracked(
    config: SftConfig,
    run: RunFolder,
    point: RunCheckpoint | None,
    on_row: Callable[[SftRow], None],
    tell: Callable[[str], None],
) -> Generator[Callable[[SftRow], None]]:
    """Yield what is called with each row, which trackers get too; waits for them at the end."""
    if not (names := names_in_use(config)):
        yield on_row
        return
    described = TrackedRun(
        name=Path(config.output).name,
        folder=run.path,
        config=config.model_dump(mode="json"),
        first_step=point.step + 1 if point else 0,
        options={"wandb_project": config.wandb_project, "wandb_tags": config.wandb_tags},
    )
    tracking = Tracking({name: load_tracker(name) for name in names}, described, warn=tell)

    def told(row: SftRow) -> None:
        tracking.row({"step": row.step, **row.metrics})
        on_row(row)

    state = "failed"
    try:
        yield told
        state = "finished"
    finally:
        tracking.close(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSft:
    """What is read before anything is written."""

    config: SftConfig
    """The settings, with steps in place of epochs."""
    point: RunCheckpoint | None
    """The checkpoint to continue from; None = begin."""
    tokenizer: PreTrainedTokenizerBase
    samples: GoldSamples


def prepare(config: SftConfig, tell: Callable[[str], None]) -> PreparedSft:
    """Read the model's files and all samples; raises TelescopeError for what cannot be used.

    `tell` gets a line for each remark. Nothing is trained or written.
    """
    # A queue starts a job again when its earlier try has ended, also one on a machine that is lost.
    goes_on = config.resume_from_checkpoint == LATEST
    RunFolder(log_folder(config).absolute()).require_ended(has_ended_elsewhere=goes_on)
    require_replaceable(Path(config.output))
    _require_writable(config)
    if note := settings_found(config).note:
        tell(note)
    point = sft_resume_point(config)
    if config.make_tiny_model and point is None:
        require_tiny(Path(config.model))
    if point is not None:
        for note in resume_notes(config, point):
            tell(note)
    _look_at_model(config, tell)
    if problem := next(filter(None, map(login_problem, names_in_use(config))), None):
        raise ConfigError(problem)
    tokenizer = _tokenizer(config)
    samples = _samples(config, tokenizer, point, tell)
    config = in_steps(config, len(samples.learnt))
    if point is not None:
        require_steps_left(point, config)
    return PreparedSft(config=config, point=point, tokenizer=tokenizer, samples=samples)


def _samples(
    config: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    point: RunCheckpoint | None,
    tell: Callable[[str], None],
) -> GoldSamples:
    """Read all samples, as they were read before `point`; tell what is worth knowing of them."""
    ends = () if config.make_tiny_model else load_stop_ids(config)
    if (note := end_note(tokenizer, end_ids=ends)) is not None:
        tell(note)
    moment = moment_of(point)
    if config.dataset is not None:
        samples = dataset_samples(config, tokenizer, end_ids=ends, moment=moment)
        require_same_rows(point, config, samples)
    else:
        taken = gold_samples(config, tokenizer, end_ids=ends, moment=moment, tell=tell)
        samples = interruptible.run(taken)
    if (note := samples.repeats_note()) is not None:
        tell(note)
    return samples


@contextmanager
def _advising_on_room(config: SftConfig) -> Iterator[None]:
    """Say how to go on where GPU memory is missing, or a file cannot be written."""
    try:
        yield
    except (OSError, NotWrittenError) as error:
        refused = not_written(error) if isinstance(error, OSError) else error
        if refused is None:
            raise
        raise type(refused)(ended_text(config, f"{refused}")) from error
    except (GpuMemoryError, torch.OutOfMemoryError) as error:
        is_told = isinstance(error, GpuMemoryError)
        told = error if is_told else GpuMemoryError.of("the trainer", error)
        advice = smaller_rank(trainer_section(config), config.megatron, phase="step")
        raise GpuMemoryError(ended_text(config, f"{told}; {advice}")) from None


def _require_writable(config: SftConfig) -> None:
    """Raise ConfigError if one of the folders that are written cannot be; training takes hours."""
    output = Path(config.output)
    # The folder above is looked at with the output, whose place a new model takes.
    written = [output, log_folder(config)]
    written += [Path(config.model)] if config.make_tiny_model else []
    for folder in written:
        if why := why_not_writable(folder.absolute()):
            raise ConfigError(
                f"the folder {folder} cannot be written: {why}; name another "
                f"{'model' if folder == Path(config.model) else 'output'}, or get the right to "
                "write there"
            )


def _look_at_model(config: SftConfig, tell: Callable[[str], None]) -> None:
    """Refuse a model that cannot be trained, before any other reading; print its notes."""
    if not config.make_tiny_model:
        targets = lora_targets(trainer_section(config))
        look = look_at_model(config, dtype=config.model_dtype, lora_targets=targets)
        look.require_sound()
        _require_trainable(config)
        for note in look.notes:
            tell(note)
    rate, use_lora = config.learning_rate, config.use_lora
    for note in rounding_notes(config.model_dtype, learning_rate=rate, use_lora=use_lora):
        tell(note)


def _require_trainable(config: SftConfig) -> None:
    """Raise ConfigError if the backend cannot train the model, or ranks cannot share its rows."""
    facts, size = read_model_facts(config.model), config.fsdp_context_parallel_size
    trainer = trainer_section(config)
    problem = next(megatron_model_problems(trainer, config.megatron, facts), None)
    if problem is None and facts.num_heads is not None and facts.num_kv_heads is not None:
        heads, kv_heads = facts.num_heads, facts.num_kv_heads
        problem = context_problem(size, num_heads=heads, num_kv_heads=kv_heads)
    if problem is None and config.ray_address is None:
        problem = shared_rows_problem(size, facts, machine_device())
    if problem is not None:
        raise ConfigError(problem)


async def _train_and_export(
    config: SftConfig,
    samples: GoldSamples,
    point: RunCheckpoint | None,
    run: RunFolder,
    on_row: Callable[[SftRow], None],
) -> None:
    """Train on `samples`, from checkpoint `point` if there is one, and write the model."""
    longest = max(map(len, (*samples.learnt, *samples.held_out)), default=0)
    settings = replace(backend_settings(config), longest_sequence=longest)
    async with open_ranks(config, settings) as ranks:
        if point is not None:
            await restore(ranks, point, how_to_go_on(config))
        saving = checkpointer(config, settings, ranks, samples, resumed_from=point)
        num_done = point.step if point else 0
        # Later steps are measured again, and without a checkpoint step 0 too.
        run.drop_after(num_done if point else -1)
        step = num_done
        recorded = _last_row(run, config, num_done=num_done)
        try:
            if recorded is not None:
                on_row(recorded)
            else:
                async for row in train(config, samples, ranks, saving, num_done=num_done):
                    run.log_metrics({"step": row.step, **row.metrics})
                    on_row(row)
                    step = row.step
            # Before the last step is saved, from which nobody could come back to write it.
            # The absolute path, because ranks may have another working directory.
            await ranks.save_pretrained(run.path.with_name(Path(config.output).name))
            if config.checkpoint_every and (step > num_done or point is None):
                await saving.finish(step, is_exported=False)
        finally:
            await saving.close()


def _last_row(run: RunFolder, config: SftConfig, *, num_done: int) -> SftRow | None:
    """Return the recorded row of the last step, if `num_done` are all of them; else None."""
    rows = [row for row in run.metrics() if row["step"] == num_done and "accuracy" in row]
    if not rows:
        return None
    metrics = {name: value for name, value in rows[-1].items() if name != "step"}
    row = SftRow(
        step=num_done,
        num_steps=config.number_of_steps,
        accuracy=metrics["accuracy"],
        metrics=metrics,
    )
    is_enough = config.stop_at_accuracy is not None and row.accuracy >= config.stop_at_accuracy
    return row if is_enough or num_done == config.number_of_steps else None


def _tokenizer(config: SftConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model, even of one that is yet to be created."""
    if not config.make_tiny_model:
        return load_tokenizer(config)
    tokenizer = character_tokenizer()
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


async def train(
    config: SftConfig, samples: GoldSamples, ranks: Ranks, saving: Checkpointer, *, num_done: int
) -> AsyncIterator[SftRow]:
    """Take the steps after `num_done`; yields a row before the first one, then as configured.

    If none is left, it yields the row of the last one.
    """
    started_s = time.monotonic()
    counts = {
        "examples/learnt": float(len(samples.learnt)),
        TRUNCATED: float(samples.num_truncated),
        DROPPED: float(samples.num_dropped),
    }
    if num_done in (0, config.number_of_steps):
        yield await _measure(num_done, counts, samples.held_out, ranks, config, started_s)
    steps = islice(_draw(samples.learnt, config), num_done, config.number_of_steps)
    for step, batch in enumerate(steps, start=num_done + 1):
        plan = StepPlan(minibatches=[_packed(batch, ranks, config)], order=[0])
        metrics = await ranks.train_step(plan, version=0) | counts
        if not step % config.loss_log_every or step == config.number_of_steps:
            row = await _measure(step, metrics, samples.held_out, ranks, config, started_s)
            yield row
            if config.stop_at_accuracy is not None and row.accuracy >= config.stop_at_accuracy:
                return
        # Training waits for the checkpoint: the ranks of a small model would only compete with it.
        await saving.after_step(step)
        await saving.written()


def backend_settings(config: SftConfig) -> BackendSettings:
    """Return the settings of the ranks."""
    return BackendSettings(
        model=ModelSection(
            model=config.model,
            model_dtype=config.model_dtype,
            mixed_precision_dtype=config.mixed_precision_dtype,
            chat_template=config.chat_template,
            trust_remote_code=config.trust_remote_code,
        ),
        trainer=trainer_section(config),
        megatron=config.megatron,
        algorithm=None,
        seed=config.seed,
        number_of_steps=config.number_of_steps,
    )


def _draw(samples: Sequence[TrainingSample], config: SftConfig) -> Iterator[list[TrainingSample]]:
    """Yield batches without end: every sample once, in a new order, before any is repeated."""
    generator = np.random.default_rng(config.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < config.batch_size:
            waiting += generator.permutation(len(samples)).tolist()
        chosen, waiting = waiting[: config.batch_size], waiting[config.batch_size :]
        yield [samples[index] for index in chosen]


def _packed(
    samples: Sequence[TrainingSample], ranks: Ranks, config: SftConfig
) -> list[list[PackedBatch]]:
    weights_N = token_weights(samples, "token", max_tokens=config.seq_len)
    return pack(samples, weights_N, seq_len=config.seq_len, num_ranks=ranks.num_ranks)


async def _measure(
    step: int,
    metrics: dict[str, float],
    held_out: Sequence[TrainingSample],
    ranks: Ranks,
    config: SftConfig,
    started_s: float,
) -> SftRow:
    found = {
        environment: await measure_held_out(
            [sample for sample in held_out if sample.environment == environment], ranks, config
        )
        for environment in dict.fromkeys(sample.environment for sample in held_out)
    }
    accuracy = sum(one.num_expected for one in found.values()) / len(held_out)
    nll = sum(one.nll for one in found.values()) / sum(one.num_tokens for one in found.values())
    recorded = {name: metrics[name] for name in RECORDED if name in metrics}
    recorded |= {f"accuracy/{name}": one.num_expected / one.num for name, one in found.items()}
    recorded |= {"accuracy": accuracy, "nll/held_out": nll, "time_s": time.monotonic() - started_s}
    num_steps = config.number_of_steps
    return SftRow(step=step, num_steps=num_steps, accuracy=accuracy, metrics=recorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutFit:
    """Likelihood of the assistant's tokens in some held-out examples, at temperature 1."""

    num: int
    """Number of examples measured."""
    num_expected: float
    """Expected number of those that sampling would write exactly."""
    nll: float
    """Negative log-likelihood, summed, nats."""
    num_tokens: int
    """Number of the assistant's tokens in them."""


async def measure_held_out(
    samples: Sequence[TrainingSample], ranks: Ranks, config: SftConfig
) -> HeldOutFit:
    """Return how well the present weights predict `samples`."""
    batches = _packed(samples, ranks, config)
    num_expected = nll = 0.0
    num_tokens = 0
    for rank_batches, rank_logprobs in zip(batches, await ranks.logprobs(batches), strict=True):
        for batch, logprobs_T in zip(rank_batches, rank_logprobs, strict=True):
            trained_T = batch.mask_T
            sums_S = np.bincount(
                batch.sequence_ids_T[trained_T], weights=logprobs_T[trained_T].astype(np.float64)
            )
            num_expected += float(np.exp(sums_S).sum())
            nll -= float(sums_S.sum())
            num_tokens += batch.num_trained_tokens
    return HeldOutFit(num=len(samples), num_expected=num_expected, nll=nll, num_tokens=num_tokens)


@asynccontextmanager
async def open_ranks(config: SftConfig, settings: BackendSettings) -> AsyncIterator[Ranks]:
    """Load the model on one rank here, or several on Ray; they end with the context."""
    layout = layout_of(settings)
    num_threads = _threads(config, settings, layout.num_ranks)
    if layout.num_ranks == 1:
        ranks = LocalRanks(TrainerWorker(settings, num_threads=num_threads))
        try:
            yield ranks
        finally:
            await ranks.close()
        return
    section = RaySection(ray_address=config.ray_address)
    bundle = Bundle(cpus=1.0, gpus=1 if settings.device == "cuda" else 0)
    request = RoomRequest(
        "trainer ranks", "trainer_num_workers", [bundle] * layout.num_ranks, "PACK"
    )
    is_own = section.ray_address is None
    deadline_s = OWN_CLUSTER_S if is_own else section.ray_placement_timeout_s
    with ray_cluster(section, request.bundles, debug=False):
        room = reserve(request, deadline_s=deadline_s)
        several = RayRanks(
            RankRoom(room, lambda: reserve(request, deadline_s=deadline_s)),
            Logs(folder=(log_folder(config) / "logs").absolute(), is_debug=False),
            network=Network(is_local=is_own),
            timeout_s=section.worker_progress_timeout_s,
            layout=layout,
        )
        try:
            await several.open(settings, num_threads=num_threads)
            yield several
        finally:
            await several.close()
            room.give_back()


def _threads(config: SftConfig, settings: BackendSettings, num_ranks: int) -> int:
    """Return the number of threads of each rank without a GPU."""
    try:
        facts = read_model_facts(settings.model.model)
    except ConfigError:
        facts = UNKNOWN_FACTS  # what is wrong with it is said when it is loaded
    return threads_of(facts, num_ranks=num_ranks, is_alone=config.ray_address is None)
