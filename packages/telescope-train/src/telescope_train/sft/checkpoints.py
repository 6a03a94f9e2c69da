"""Checkpoints of `telescope sft`: saving between steps, and the point to continue from.

The folders have the form of those of `telescope train`. The position in the data is not saved,
because it can be computed from the seed and the number of steps.
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from telescope_core.base import interrupts
from telescope_core.base.errors import ConfigError
from telescope_core.base.secret_names import without_secrets
from telescope_core.open import record_environment
from telescope_core.records import RunFolder, RunState
from telescope_core.records.folders import end_replacing, sweep
from telescope_train.backends.protocol import BackendSettings, Ranks
from telescope_train.checkpoints.folders import (
    GoOn,
    RunCheckpoint,
    by_its_path,
    by_moving_it,
    complete_checkpoints,
    find_checkpoints,
    read_whole,
    require_start,
    unproved,
)
from telescope_train.checkpoints.resume import LATEST, input_changes, inputs_of
from telescope_train.checkpoints.saver import Checkpointer, SavedRun
from telescope_train.config.earlier import in_names_of_today
from telescope_train.sft.config import SftConfig, checkpoint_section
from telescope_train.sft.examples import GoldSamples

MAY_DIFFER = frozenset(
    {
        *("output", "make_tiny_model", "number_of_steps", "number_of_epochs"),
        *("stop_at_accuracy", "loss_log_every"),
        *("learning_rate", "lr_scheduler", "warmup_steps", "cooldown_steps", "min_lr_ratio"),
        *("weight_decay", "grad_clip", "gradient_checkpointing", "activation_memory_gib"),
        *("entropy_chunk_size", "mixed_precision_dtype"),
        *("checkpoint_every", "checkpoint_keep_last", "checkpoint_keep_every"),
        *("trainer_num_workers", "ray_address", "fsdp_context_parallel_size"),
        *("fsdp_replicate_size", "lora_dropout", "resume_from_checkpoint"),
        *("use_wandb", "wandb_project", "wandb_tags", "use_tensorboard", "trackers"),
    }
)
"""Settings that may change when training is resumed. If one of the others changed, the weights or
the position in the data would mean something else."""

_ROWS = "sft_rows"
"""Key in a checkpoint's settings of the digest of its samples."""
_MOMENT = "sft_moment"
"""Key there of the time that the chat template showed as the present."""


def log_folder(config: SftConfig) -> Path:
    """Return the folder of settings, measurements and checkpoints: `<output>-log`."""
    output = Path(config.output)
    return output.with_name(f"{output.name}-log")


def sft_resume_point(config: SftConfig) -> RunCheckpoint | None:
    """Return the checkpoint to continue from; None if training starts from the beginning.

    Raises ConfigError if there is no such checkpoint, if settings differ that must be the same, if
    files have changed since they were written, or if a start from the beginning would mix its
    checkpoints with older ones.
    """
    own = _folder(config)
    end_replacing(own)
    found, given = find_checkpoints(own), config.resume_from_checkpoint
    if given == LATEST:
        if not found.complete:
            lacking = "".join(f"\n  {path}: {why}" for path, why in sorted(found.broken.items()))
            raise ConfigError(
                f"resume_from_checkpoint = {LATEST!r}: {str(own)!r} holds no complete checkpoint; "
                "remove the setting to start from the beginning, or give the folder of a "
                f"checkpoint{lacking}"
            )
        return _checked(found.complete[-1], config)
    if found.complete or found.broken:
        raise ConfigError(
            f"{str(own)!r} holds checkpoints of an earlier training; continue the newest with "
            f"resume_from_checkpoint = {LATEST!r}, choose another output, or delete them"
        )
    if given is None:
        return None
    return _checked(read_whole(Path(given).expanduser(), by_its_path), config)


def resume_notes(config: SftConfig, point: RunCheckpoint) -> list[str]:
    """Return notes about the checkpoint `point`, from which training continues."""
    passed_over: list[str] = []
    if config.resume_from_checkpoint == LATEST:
        passed_over = find_checkpoints(_folder(config)).broken_after(point)
    return [f"{line}; {point.path.name} is taken instead" for line in passed_over] + unproved(point)


def moment_of(point: RunCheckpoint | None) -> datetime | None:
    """Return what the chat template showed as the present before `point`; None if not known."""
    shown = point.manifest.config.get(_MOMENT) if point else None
    return datetime.fromisoformat(shown) if shown is not None else None


def require_same_rows(point: RunCheckpoint | None, config: SftConfig, samples: GoldSamples) -> None:
    """Raise ConfigError if the dataset has other rows than when `point` was saved.

    A branch on the Hub moves without a change of the settings or of a file here.
    """
    before = point.manifest.config.get(_ROWS) if point else None
    if point is not None and before is not None and before != samples.digest():
        raise ConfigError(
            f"dataset {config.dataset!r} has other rows than {str(point.path)!r} was trained on; "
            "set dataset_revision to the commit of that time, or start another training from an "
            "export of the weights"
        )


def how_to_go_on(config: SftConfig) -> GoOn:
    """Return the advice about a damaged checkpoint."""
    return by_moving_it if config.resume_from_checkpoint == LATEST else by_its_path


def ended_text(config: SftConfig, why: str) -> str:
    """Return why training ended early, what it has kept, and how to continue it."""
    if saved := complete_checkpoints(_folder(config)):
        return (
            f"{why}; step {saved[-1].step} is saved in {saved[-1].path}: continue with "
            f"--resume_from_checkpoint {LATEST}"
        )
    advice = "" if config.checkpoint_every else "; set checkpoint_every to be able to continue"
    return f"{why}; no checkpoint was saved, so training begins again{advice}"


@contextmanager
def no_half_checkpoints(config: SftConfig) -> Generator[None]:
    """Remove a checkpoint that was incomplete when the block failed; nobody may be writing."""
    try:
        yield
    except BaseException:
        with interrupts.held(), suppress(OSError):
            sweep(_folder(config))
        raise


def _inputs(config: SftConfig) -> dict[str, str]:
    """Return the digests of all input files, including those of environments."""
    found = inputs_of(config.model, chat_template=config.chat_template, dataset=config.dataset)
    for one in config.environments:
        record = record_environment(one.name, settings=one.env)
        found[f"environments: {one.name}"] = f"{record.version} {record.lock_digest}"
        found |= {f"environments: {one.name}: {name}": d for name, d in record.files.items()}
    return found


def _folder(config: SftConfig) -> Path:
    return log_folder(config) / "checkpoints"


def _checked(checkpoint: RunCheckpoint, config: SftConfig) -> RunCheckpoint:
    where, before = str(checkpoint.path), checkpoint.manifest.config.get("sft")
    if before is None:
        raise ConfigError(
            f"{where!r} is a checkpoint of `telescope train`; export it, and set model to the "
            "exported folder"
        )
    # A setting that the checkpoint does not know had no other value than today's default.
    defaults = SftConfig.model_construct().model_dump(mode="json", warnings=False)
    before = in_names_of_today({**defaults, **before})
    before = without_secrets(before, keeps_names=False)
    now = without_secrets(config.model_dump(mode="json"), keeps_names=False)
    changed = [
        f"  {name}: {before.get(name, 'not set')!r} -> {now.get(name, 'not set')!r}"
        for name in sorted({*before, *now} - MAY_DIFFER)
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ConfigError(
            f"training can be resumed only with the model, examples, batch size and seed that it "
            f"had in {where!r}; restore these settings:\n" + "\n".join(changed)
        )
    if config.number_of_epochs is None:
        require_steps_left(checkpoint, config)
    input_changes(checkpoint, _inputs(config))
    require_start(checkpoint, how_to_go_on(config), samples=False)
    return checkpoint


def require_steps_left(checkpoint: RunCheckpoint, config: SftConfig) -> None:
    """Raise ConfigError if `checkpoint` has all the steps of `config`, and its end is recorded."""
    # A kill after the last checkpoint leaves only the end to be recorded.
    is_left = checkpoint.step == config.number_of_steps and _is_unfinished(config)
    if checkpoint.step >= config.number_of_steps and not is_left:
        raise ConfigError(
            f"{str(checkpoint.path)!r} has {checkpoint.step} steps, and number_of_steps is "
            f"{config.number_of_steps}, so nothing is left to do; raise number_of_steps, or "
            "number_of_epochs if you gave that"
        )


def _is_unfinished(config: SftConfig) -> bool:
    """Return whether training goes on in its own folder, where it has not ended as it should.

    As for `require_ended`, a folder with a damaged `run.json` holds no finished training.
    """
    if config.resume_from_checkpoint != LATEST:
        return False
    try:
        return RunFolder(log_folder(config)).info().state is not RunState.FINISHED
    except ConfigError:
        return True


def checkpointer(
    config: SftConfig,
    settings: BackendSettings,
    ranks: Ranks,
    samples: GoldSamples,
    *,
    resumed_from: RunCheckpoint | None,
) -> Checkpointer:
    """Return the `Checkpointer` that saves the training between its steps."""
    run = SavedRun(
        name=Path(config.output).name,
        folder=_folder(config).absolute(),
        number_of_steps=config.number_of_steps,
        section=checkpoint_section(config),
        model=settings.model,
        config={
            "sft": config.model_dump(mode="json"),
            _ROWS: samples.digest(),
            _MOMENT: samples.moment.isoformat(),
            "model": settings.model.model_dump(mode="json"),
            "trainer": settings.trainer.model_dump(mode="json"),
        },
        inputs=_inputs(config),
    )
    path = resumed_from.path if resumed_from else None
    return Checkpointer(run, ranks, sampler=None, resumed_from=path)
